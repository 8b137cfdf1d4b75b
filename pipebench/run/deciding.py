"""Decide a run's profile and plan, on which all its processes must agree, and store them in the run's folder.

plan.json and profile.json have their usual formats. overrides.json has the overrides of a resumed run for which they
were made. It is written last and removed first, so it never belongs to another plan.

A process that has computed on a GPU holds hundreds of megabytes there until it ends, which are CUDA's own. The launcher
needs no GPU, but lives as long as the workers. So another process measures the profile and exits:
`pipebench.run.deciding PARENT DESCRIPTOR`.
"""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from pipebench import errors
from pipebench.cluster import Cluster
from pipebench.distributed.launch_child import end_with, python_module
from pipebench.distributed.launch_failure import signal_name
from pipebench.errors import Fault, ProfileError, RecipeError, UserError, WorkersFailedError
from pipebench.files import replace as replace_file
from pipebench.model.plan_layers import form_of
from pipebench.profile.choose import is_measured
from pipebench.profile.model import Profile
from pipebench.profile.stored import read_profile, write_profile
from pipebench.recipe.load import LoadedRecipe, faults_of
from pipebench.recipe.plan_file import PlanForm, parse_plan_file
from pipebench.recipe.schema import Recipe
from pipebench.run.folder import RunFolder
from pipebench.show.progress import preparing
from pipebench.train.job import Decision, Job
from pipebench.train.plan import ANEW
from pipebench.train.prepare import prepare
from pipebench.train.profiled_model import choose_device
from pipebench.typed_json import JsonError, read

_PLAN, _PROFILE, _OVERRIDES = "plan.json", "profile.json", "overrides.json"
_FAILED = 3
# Errors that the deciding process passes on; each is constructed from one sentence.
_KINDS = (errors.UserCodeError, errors.GraphError, errors.PlanError, errors.ProfileError, UserError)


def prepare_job(
    loaded: LoadedRecipe, *, apart: bool = False, prints_lines: bool = False, silent: bool = False, **how: Any
) -> Job:
    """Prepare a recipe.

    Args:
        loaded: the recipe.
        apart: whether another process decides if the profile is measured on a GPU, so that this one uses none.
        prints_lines: whether progress is printed as plain lines if there is no terminal.
        silent: whether no progress is shown.
        how: options of `prepare`.

    Raises:
        RecipeError: the model doesn't allow it.
        WorkersFailedError: the deciding process ended without an answer.
    """
    recipe, cluster = loaded.recipe, loaded.cluster
    showing = nullcontext(lambda work: None) if silent else preparing(recipe.name, prints_lines=prints_lines)
    with faults_of(loaded), showing as on_progress:
        # This check takes no memory of the GPU: torch counts devices without starting CUDA.
        if apart and is_measured(recipe, cluster) and choose_device(recipe.engine.device).type == "cuda":
            how["decision"] = decided_apart(recipe, cluster, on_progress)
        job = prepare(recipe, cluster, on_progress, **how)
    # A resumed run may end before what its recipe asks of extensions; the result then has a note instead.
    late = () if loaded.goes_on else [found for each in job.extensions.values() for found in each.refused(job.setup)]
    if late:
        raise RecipeError(Fault(loaded.origin(key), key, problem) for key, problem in late)
    return job


def decision_of(job: Job) -> Decision:
    """Return the decision of a prepared recipe."""
    return Decision(plan_form(job), job.whole_profile, "the plan")


def plan_form(job: Job) -> PlanForm:
    """Return a prepared recipe's plan in file form."""
    setup = job.setup
    return form_of(setup.plan, [layer.name for layer in setup.graph.layers])


def store_decision(folder: RunFolder, decision: Decision, overrides: Sequence[str]) -> None:
    """Write a decision into a run's folder; raises an OSError."""
    (folder.path / _OVERRIDES).unlink(missing_ok=True)
    texts = {
        _PLAN: decision.plan.text(),
        _PROFILE: write_profile(decision.profile),
        _OVERRIDES: json.dumps(list(overrides)) + "\n",
    }
    for name, text in texts.items():
        replace_file(folder.path / name, text.encode())


def stored_decision(folder: RunFolder | None, overrides: Sequence[str]) -> Decision | None:
    """Return the decision stored for these overrides, if any; raises a UserError if a file is unreadable or invalid."""
    if folder is None or not all((folder.path / name).exists() for name in (_PLAN, _PROFILE, _OVERRIDES)):
        return None
    try:
        made_for = read(list[str], folder.read_bytes(_OVERRIDES))
    except JsonError as error:
        raise UserError(f"{folder.path / _OVERRIDES}: {error}; {ANEW}") from None
    return read_decision(folder) if made_for == list(overrides) else None


def read_decision(folder: RunFolder) -> Decision:
    """Return a run's stored decision; raises a UserError if a file is unreadable or invalid."""
    plan = parse_decided_plan(folder.read_bytes(_PLAN), str(folder.path / _PLAN))
    profile = _profile(folder.read_bytes(_PROFILE), folder.path / _PROFILE)
    return Decision(plan, profile, str(folder.path / _PLAN))


def parse_decided_plan(text: bytes | str, source: str) -> PlanForm:
    """Read a stored plan; raises a RecipeError that locates the fault and says what to do."""
    try:
        return parse_plan_file(text, source)
    except RecipeError as error:
        raise RecipeError(replace(fault, problem=f"{fault.problem}; {ANEW}") for fault in error.faults) from None


def _profile(text: bytes, path: Path) -> Profile:
    try:
        return read_profile(text.decode("utf-8", "replace"))
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}; {ANEW}") from None


def decided_apart(recipe: Recipe, cluster: Cluster, on_progress: Callable[[str], None]) -> Decision:
    """Decide a run in another process, whose memory, on GPUs too, is free when this returns.

    The other process ends with this call, also on Ctrl-C or if this process dies.

    Args:
        recipe: the recipe.
        cluster: its cluster.
        on_progress: gets what is being profiled, in words.

    Raises:
        UserError: of the same class as `prepare` raises.
        WorkersFailedError: the process ended without an answer; the reason has been printed.
    """
    reads, writes = os.pipe()
    with open(reads, "rb") as answers:
        try:
            command = [*python_module("pipebench.run.deciding"), str(os.getpid()), str(writes)]
            # In a process group of its own it doesn't get the terminal's Ctrl-C. This process does, and then ends it.
            process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(writes,), process_group=0)
        finally:
            os.close(writes)
        with process:
            try:
                _ask(process, recipe, cluster)
                return _answer(answers, process, on_progress)
            finally:
                process.kill()
                process.wait()  # after Ctrl-C, `with` alone would wait for only a quarter of a second


def _ask(process: "subprocess.Popen[bytes]", recipe: Recipe, cluster: Cluster) -> None:
    assert process.stdin is not None
    try:
        with process.stdin as questions:
            pickle.dump((recipe, cluster), questions)
    except BrokenPipeError:  # it has ended; its exit code says more
        pass


def _answer(answers: BinaryIO, process: "subprocess.Popen[bytes]", on_progress: Callable[[str], None]) -> Decision:
    """Read the process's words of progress up to its decision or error."""
    with suppress(EOFError, pickle.UnpicklingError):
        while not isinstance(answer := pickle.load(answers), Decision):
            if isinstance(answer, UserError):
                raise answer
            on_progress(answer)
        return answer
    code = process.wait()
    how = f"was ended by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    hint = "; the system sends SIGKILL when memory runs out, unless somebody did" if code == -9 else ""
    print(f"pipebench: error: the process that measures the profile {how}{hint}", file=sys.stderr, flush=True)
    raise WorkersFailedError(_FAILED)


def main(words: Sequence[str]) -> None:
    """Decide the run pickled on standard input; `words` are the parent's process id and the answer's descriptor."""
    end_with(int(words[0]))
    with open(int(words[1]), "wb") as answers:

        def say(answer: str | Decision | UserError) -> None:
            pickle.dump(answer, answers)
            answers.flush()

        recipe, cluster = pickle.load(sys.stdin.buffer)  # written by our parent
        try:
            say(decision_of(prepare(recipe, cluster, say, trains=False)))
        except UserError as error:
            kind = next(kind for kind in type(error).__mro__ if kind in _KINDS)
            say(kind(str(error)))


if __name__ == "__main__":
    main(sys.argv[1:])
