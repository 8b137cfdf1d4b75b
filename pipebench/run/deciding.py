"""Decides a run, its profile and plan, in a process that ends: `python -m pipebench.run.deciding PARENT DESCRIPTOR`.

A process that has computed on a GPU keeps memory there until it ends, some hundreds of megabytes of CUDA's own. What
starts a run's workers lives as long as they do and needs no GPU: so it has the profile measured by another process.
"""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from pipebench import errors
from pipebench.cluster import Cluster
from pipebench.distributed.launch_child import end_with
from pipebench.distributed.launch_failure import signal_name
from pipebench.errors import UserError, WorkersFailedError
from pipebench.profile.choose import is_measured
from pipebench.profile.stored import read_profile, write_profile
from pipebench.recipe.plan_file import parse_plan_file
from pipebench.recipe.schema import Recipe
from pipebench.run.decision import decision_of
from pipebench.train.prepare import Decision, choose_device, prepare

_FAILED = 3
_HERE = "the process that decides"
_KINDS = (
    errors.UserCodeError,
    errors.GraphError,
    errors.PlanError,
    errors.ProfileError,
    UserError,
)  # made of one sentence


def measures_on_gpu(recipe: Recipe, cluster: Cluster) -> bool:
    """Return whether deciding a run takes GPU memory. Asking doesn't: torch counts the devices and starts none."""
    return is_measured(recipe, cluster) and choose_device(recipe.engine.device).type == "cuda"


def decided_apart(recipe: Recipe, cluster: Cluster, on_progress: Callable[[int, int], None]) -> Decision:
    """Decide a run in a process of its own: its memory, on GPUs too, is free again when this returns.

    Whatever ends this call, Ctrl-C or the end of this process included, ends that process.

    Args:
        recipe: a validated recipe.
        cluster: the cluster it names.
        on_progress: told of (layers profiled, layers to profile).

    Raises:
        UserError: what `prepare` raises, of the same class.
        WorkersFailedError: the process ended without an answer; why has been printed.
    """
    reads, writes = os.pipe()
    with open(reads, encoding="utf-8") as answers:
        try:
            command = [sys.executable, "-m", "pipebench.run.deciding", str(os.getpid()), str(writes)]
            # Of a process group of its own, it doesn't hear the terminal's Ctrl-C: this process does, and ends it.
            process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(writes,), process_group=0)
        finally:
            os.close(writes)
        with process:
            try:
                _ask(process, recipe, cluster)
                return _answer(answers, process, on_progress)
            finally:
                process.kill()


def _ask(process: "subprocess.Popen[bytes]", recipe: Recipe, cluster: Cluster) -> None:
    assert process.stdin is not None
    try:
        with process.stdin as questions:
            pickle.dump((recipe, cluster, sys.path), questions)  # the recipe may name code that is found there
    except BrokenPipeError:  # it has ended already: its exit code says more
        pass


def _answer(answers: TextIO, process: "subprocess.Popen[bytes]", on_progress: Callable[[int, int], None]) -> Decision:
    """Read what the process says until it has decided."""
    for line in answers:
        kind, *values = json.loads(line)
        if kind == "progress":
            on_progress(*values)
        elif kind == "decided":
            plan, profile = values
            return Decision(parse_plan_file(plan, _HERE), read_profile(profile), _HERE)
        else:
            raise getattr(errors, kind)(values[0])
    code = process.wait()
    how = f"was ended by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    hint = "; the system sends SIGKILL when memory runs out, unless somebody did" if code == -9 else ""
    print(f"pipebench: error: the process that measures the profile {how}{hint}", file=sys.stderr, flush=True)
    raise WorkersFailedError(_FAILED)


def main(words: Sequence[str]) -> None:
    """Decide the run that standard input tells of; `words` are the parent's process id and where to answer."""
    end_with(int(words[0]))
    with open(int(words[1]), "w", encoding="utf-8") as answers:

        def say(*answer: Any) -> None:
            print(json.dumps(answer), file=answers, flush=True)

        recipe, cluster, sys.path[:] = pickle.load(sys.stdin.buffer)  # our parent's own words
        try:
            decision = decision_of(prepare(recipe, cluster, lambda *done: say("progress", *done), trains=False))
        except UserError as error:
            kinds = (kind.__name__ for kind in type(error).__mro__ if kind in _KINDS)
            say(next(kinds), str(error))
        else:
            say("decided", decision.plan.text(), write_profile(decision.profile))


if __name__ == "__main__":
    main(sys.argv[1:])
