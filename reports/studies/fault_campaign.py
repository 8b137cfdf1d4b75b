"""Kill runs in processes at random moments and see that nothing is lost: `nox -s faults` prints `fault_campaign.md`.

For every case there is an undisturbed run, and runs whose workers, or whose parent, are killed with SIGKILL at random
moments from the first worker's start to the command's end. A disturbed run has to end with the weights of the
undisturbed one, bit for bit, and with the same points in one MLflow run. Finding processes by what is in their
environment needs Linux.
"""

import argparse
import contextlib
import platform
import random
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pipebench import __version__
from pipebench.run.export import export
from reports.studies.planned_models import table
from reports.studies.watched_run import WatchedRun, recorded, tear

_LIMIT_S = 240.0
# Tries of a disturbed run until one of its kills comes after a checkpoint.
_TRIES = 3
# Checkpoints that were written unseen before a fault that waits for one is done anyway: the next may be the last.
_UNSEEN = 2
_SMALL = (
    "model.width=0.0625", "train.target=null", "train.evaluate_every={minibatches: 50}",
    "train.checkpoint_every={minibatches: 20}", "train.max_epochs=2",
)  # fmt: skip
_TEXT = (
    "train.target=null", "dataset.train_tokens=30000", "dataset.eval_tokens=3000", "train.max_epochs=1",
    "train.evaluate_every={minibatches: 40}", "train.checkpoint_every={minibatches: 20}",
)  # fmt: skip
_ADAM = ("train.optimizer.name=adam", "train.optimizer.lr=0.001", "train.optimizer.momentum=0")
_COMMON = ("engine.kind=distributed", "engine.threads=1", "engine.max_restarts=9")


@dataclass(frozen=True)
class Case:
    """What is trained, and in how many processes.

    Attributes:
        name: for the table.
        plan: replicas per stage.
        recipe: its name.
        overrides: beside the plan and what all have.
    """

    name: str
    plan: str
    recipe: str
    overrides: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        """Return what follows `pipebench run`."""
        return [self.recipe, *_COMMON, *self.overrides, f"parallelism.plan={self.plan}"]

    @property
    def num_workers(self) -> int:
        """Return how many processes there are."""
        return sum(map(int, self.plan.split("-")))


CASES = (
    Case("pipedream", "1-1", "quickstart", _SMALL),
    Case("pipedream", "2-1", "quickstart", _SMALL),
    Case("dp", "2", "quickstart/dp", _SMALL),
    Case("pipedream, Adam", "1-1", "quickstart", (*_SMALL, *_ADAM)),
    Case("pipedream-flush", "1-1", "modes/pipedream-flush", _SMALL),
    Case("gpipe", "1-1", "quickstart/gpipe", _SMALL),
    Case("model", "1-1", "quickstart/model", _SMALL),
    Case("pipedream, text in streams", "2-1", "small/awd_lm/pipedream", _TEXT),
    Case("dp", "3", "quickstart/dp", _SMALL),
)


@dataclass(frozen=True)
class Fault:
    """One thing to do to a run.

    Attributes:
        victims: ranks; empty for the parent, which takes its workers with it and is followed by `--resume`.
        trigger: `after` the start of the attempt's processes, while a `checkpoint` is written (or, where that isn't
            seen, as soon as the second one is whole), or at a `step`.
        step: for the last: when a checkpoint of it or a later one is there.
        delay_s: seconds after that.
        tears: damage the newest checkpoint before the processes start again.
    """

    victims: tuple[int, ...]
    trigger: str = "after"
    step: int = 0
    delay_s: float = 0.0
    tears: bool = False


@dataclass
class Injection:
    """A fault that a run was given, and what came of it.

    Attributes:
        fault: what it was.
        at_s: seconds after the processes of its attempt had started.
        doing: what was going on.
        newest: minibatches done in the newest checkpoint then, -1 for none.
        from_step: where the run went on, in words.
    """

    fault: Fault
    at_s: float
    doing: str
    newest: int
    from_step: str = "?"


@dataclass
class Baseline:
    """A run without faults: what others are compared with.

    Attributes:
        weights: what `pipebench export` gives.
        curves: metric to (step, value), of metrics with several points.
        starts_s: seconds from the first worker's start to the beginning of training.
        lasts_s: seconds from the first worker's start to the end.
        last_step: of the last checkpoint.
    """

    weights: dict[str, torch.Tensor]
    curves: dict[str, list[tuple[int, float]]]
    starts_s: float
    lasts_s: float
    last_step: int


@dataclass
class Outcome:
    """What came of a disturbed run.

    Attributes:
        case: what ran.
        done: its faults.
        num_chosen: how many faults were chosen for it; some may have come too late to be done.
        exit_code: of the last command.
        weights_equal: to the undisturbed run's, bit for bit.
        points_equal: the curves are, in MLflow.
        problems: whatever else isn't as it should be, in words.
    """

    case: Case
    done: list[Injection]
    num_chosen: int = 0
    exit_code: int = -1
    weights_equal: bool = False
    points_equal: bool = False
    problems: list[str] = field(default_factory=list)

    @property
    def fine(self) -> bool:
        """Return whether nothing was lost."""
        return not self.exit_code and self.weights_equal and self.points_equal and not self.problems

    @property
    def tried(self) -> bool:
        """Return whether a checkpoint was needed: a run that only began anew, or ended in peace, shows nothing."""
        return any(what.newest >= 0 for what in self.done)


def undisturbed(case: Case, folder: Path) -> Baseline:
    """Run a case in peace.

    Raises:
        RuntimeError: it doesn't end well.
    """
    with WatchedRun(folder, case.words) as run:
        run.wait_until(lambda: run.workers(0), _LIMIT_S, "workers")
        began_s = time.time()
        if run.wait(_LIMIT_S):
            raise RuntimeError(f"{case.name} {case.plan} fails undisturbed:\n{run.output}")
        assert run.run_folder is not None
        started_s = _started_at_s(run.run_folder)
        return Baseline(
            _weights(run), _curves(recorded(folder)["metrics"]), started_s - began_s, time.time() - began_s,
            max(run.steps()),
        )  # fmt: skip


def disturbed(case: Case, faults: Sequence[Fault], peace: Baseline, folder: Path) -> Outcome:
    """Run a case, do the faults to it one after the other, and compare it with the undisturbed run."""
    done: list[Injection] = []
    sections: list[str] = []
    words, remaining = case.words, list(faults)
    while True:
        with WatchedRun(folder, words) as run:
            now = _do_all(run, remaining)
            done += now
            if not now or now[-1].fault.victims:
                code = run.wait(_LIMIT_S)
                _note_restarts(done, [*sections, *_attempts(run)])
                return _compared(Outcome(case, done, len(faults), code), run, peace)
            sections += _attempts(run)
            remaining = remaining[len(now) :]
            run.wait_until(lambda run=run: not run.left_over(), 30, "the end of orphans")  # type: ignore[misc]
            assert run.run_folder is not None
            words = ["--resume", run.run_folder.name]


def _do_all(run: WatchedRun, faults: Sequence[Fault]) -> list[Injection]:
    """Do faults to a command, one per attempt, until it ends or the parent is killed."""
    done: list[Injection] = []
    for attempt, fault in enumerate(faults):
        what = _do(run, attempt, fault)
        if what is None:
            break
        done.append(what)
        print(f"  {_who(fault)} at {what.at_s:.1f} s: {what.doing}", file=sys.stderr, flush=True)
        if not fault.victims:
            break
    return done


def _attempts(run: WatchedRun) -> list[str]:
    """Return what a command said, attempt by attempt."""
    return re.split(r"; restart \d+ of \d+", run.output)


def _note_restarts(done: Sequence[Injection], sections: Sequence[str]) -> None:
    """Note where the run went on after every fault, which ends one section and begins the next."""
    for index, what in enumerate(done):
        if index + 1 >= len(sections):
            what.from_step = "no restart: all was done"
        elif found := re.search(r"goes on from (?:minibatch (\d+)|the beginning)", sections[index + 1]):
            what.from_step = found[1] or "the beginning"
        else:
            what.from_step = "killed again before that"


def _do(run: WatchedRun, attempt: int, fault: Fault) -> Injection | None:
    """Wait for a fault's moment and do it; None if the run ended before."""
    workers: dict[int, int] = {}

    def there() -> bool:
        # Not all at once: what a process's environment is can't be read while it becomes another program.
        workers.update(run.workers(attempt))
        return bool(workers) and workers.keys() >= set(fault.victims)

    if not run.wait_until(there, _LIMIT_S, f"workers of attempt {attempt}"):
        return None
    began_s = time.monotonic()
    reached = {
        "after": lambda: True,
        "checkpoint": _writing(run),
        "step": lambda: max(run.steps(), default=-1) >= fault.step,
    }[fault.trigger]
    if not run.wait_until(reached, _LIMIT_S, fault.trigger):
        return None
    until_s = time.monotonic() + fault.delay_s
    if fault.delay_s and not run.wait_until(lambda: time.monotonic() > until_s, _LIMIT_S, "a moment"):
        return None
    what = Injection(fault, time.monotonic() - began_s, "", max(run.steps(), default=-1))
    victims = [workers[rank] for rank in fault.victims] or [run.process.pid]
    half = run.steps(whole=False)
    if not set(victims) & {*run.left_over(), run.process.pid}:
        return None
    run.signal(signal.SIGKILL, victims)
    what.doing = _doing(run, half)
    if fault.tears:
        run.wait_until(lambda: not set(workers.values()) & set(run.left_over()), 30, "the end of the killed")
        if run.steps() and run.run_folder is not None:
            step = max(run.steps())
            tear(run.run_folder / "checkpoints" / f"step-{step:08d}")
            what.doing += f"; checkpoint {step} torn"
    return what


def _writing(run: WatchedRun) -> Callable[[], bool]:
    """Return what says whether a checkpoint is being written, or so many were without anybody's seeing it."""
    before, known = set(run.steps(whole=False)), set(run.steps())
    written: set[int] = set()

    def reached() -> bool:
        # Parts without a manifest, which weren't there when the attempt began.
        half = set(run.steps(whole=False)) - before
        written.update(set(run.steps()) - known)
        return bool(half) or len(written) >= _UNSEEN

    return reached


def _doing(run: WatchedRun, half: Sequence[int]) -> str:
    """Return what was going on: the last line said, and a checkpoint that isn't whole."""
    lines = [line for line in run.all_output().splitlines() if line.strip()]
    said = lines[-1] if lines else "nothing said yet"
    said = re.sub(r"^pipebench: |\S+-[0-9a-f]{8} |  wall time.*|  train_loss.*", "", said).strip()
    return f"{said}; checkpoint {half[-1]} half written" if half else said


def _compared(outcome: Outcome, run: WatchedRun, peace: Baseline) -> Outcome:
    """Compare what a disturbed run left with the undisturbed one."""
    if outcome.exit_code:
        outcome.problems.append(f"exit code {outcome.exit_code}: {run.output.strip()[-300:]}")
        return outcome
    weights = _weights(run)
    outcome.weights_equal = weights.keys() == peace.weights.keys() and all(
        torch.equal(weights[name], peace.weights[name]) for name in weights
    )
    try:
        record = recorded(run.folder)
    except Exception as error:  # whatever MLflow and SQLite think of what is left
        outcome.problems.append(f"MLflow's record can't be read: {type(error).__name__}")
        return outcome
    outcome.points_equal = _curves(record["metrics"]) == peace.curves
    outcome.problems += _record_problems(record)
    if (
        any(what.fault.tears and "torn" in what.doing for what in outcome.done)
        and "skipped the checkpoint" not in run.all_output()
    ):
        outcome.problems.append("the torn checkpoint isn't named")
    return outcome


def _record_problems(record: dict[str, Any]) -> Iterator[str]:
    """Say what is wrong with MLflow's record of a run, besides the curves' values."""
    if len(record["runs"]) != 1:
        yield f"{len(record['runs'])} MLflow runs"
    if record["runs"][0]["status"] != "FINISHED":
        yield f"MLflow status {record['runs'][0]['status']}"
    steps = {name: [step for step, _ in rows] for name, rows in _curves(record["metrics"]).items()}
    twice = sorted(name for name, each in steps.items() if len(set(each)) != len(each))
    if twice:
        yield f"{len(twice)} curves have several values at one step, {twice[0]} for one"


def _weights(run: WatchedRun) -> dict[str, torch.Tensor]:
    path = run.folder / "weights.pt"
    export(str(run.run_folder), str(path), None)
    found: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
    return found


def _curves(metrics: dict[str, Any]) -> dict[str, list[tuple[int, float]]]:
    names = [f"curves/{name}" for name in ("train_loss", "eval_loss", "top1", "perplexity")]
    return {name: rows for name, rows in metrics.items() if name in names}


def _started_at_s(folder: Path) -> float:
    from pipebench.run.folder import RunFolder

    return RunFolder(folder).read().started_at_s or time.time()


def _who(fault: Fault) -> str:
    if not fault.victims:
        return "parent"
    return f"rank{'s' if len(fault.victims) > 1 else ''} {', '.join(map(str, fault.victims))}"


def chosen_faults(number: int, case: Case, peace: Baseline, chance: random.Random) -> list[Fault]:
    """Return the faults of a run: in start-up, while a checkpoint is written, in training, and a special one.

    Moments in training follow checkpoints, not the clock, so that they come on a machine of any load.

    Args:
        number: which special fault: two ranks at once, the parent, a torn checkpoint, the end.
        case: the case.
        peace: how long things take.
        chance: decides the rest.
    """
    ranks = tuple(range(case.num_workers))

    def one() -> tuple[int, ...]:
        return (chance.choice(ranks),)

    def training(victims: tuple[int, ...], low: float, high: float, *, tears: bool = False) -> Fault:
        step = round(peace.last_step * chance.uniform(low, high))
        return Fault(victims, "step", step, chance.uniform(0.0, 0.5), tears)

    early = [Fault(one(), "after", delay_s=chance.uniform(0.0, peace.starts_s)), Fault(one(), "checkpoint")]
    chance.shuffle(early)
    middle, late = training(one(), 0.4, 0.6), training(one(), 0.6, 0.8)
    special = (
        [training(ranks[:2], 0.2, 0.4), middle, late],
        [training((), 0.1, 0.4), middle, late],
        [training(ranks, 0.2, 0.4, tears=True), middle, late],
        [middle, late, Fault(one(), "step", peace.last_step, chance.uniform(0.0, 0.5))],
    )
    return [*early, *special[number % len(special)]]


def page(outcomes: Sequence[Outcome], seed: int, took_s: float) -> str:
    """Return the report."""
    kills, chosen = sum(len(out.done) for out in outcomes), sum(out.num_chosen for out in outcomes)
    lost = [outcome for outcome in outcomes if not outcome.fine]
    verdict = f"{len(lost)} not as it should be" if lost else "all recovered" if outcomes else "nothing was tried"
    restarts = sum(
        what.from_step.isdigit() or what.from_step == "the beginning" for out in outcomes for what in out.done
    )
    rows = [row for number, outcome in enumerate(outcomes, 1) for row in _rows(number, outcome)]
    head = ("run", "mode", "plan", "killed", "after", "what was going on", "went on from", "weights", "points")
    summary = (
        f"{kills} of {chosen} chosen faults were done in {len(outcomes)} runs of "
        f"{len({each.case for each in outcomes})} cases, {verdict}; "
        f"{restarts} times a run went on from a checkpoint or began anew. Seed {seed}, {took_s / 60:.0f} minutes, "
        f"pipebench {__version__}, torch {torch.__version__}, {platform.system()} {platform.machine()}."
    )
    problems = [f"- run {n}: {p}" for n, outcome in enumerate(outcomes, 1) for p in outcome.problems]
    return "\n".join([_HEAD, summary, "", table(head, rows), *(["", "## Problems", "", *problems] if problems else [])])


def _rows(number: int, outcome: Outcome) -> Iterator[list[object]]:
    for what in outcome.done:
        doing = what.doing.replace("|", "/")
        newest = f"; newest checkpoint {what.newest}" if what.newest >= 0 else "; no checkpoint yet"
        verdicts = ["equal" if same else "DIFFERENT" for same in (outcome.weights_equal, outcome.points_equal)]
        where = [number, outcome.case.name, outcome.case.plan, _who(what.fault), f"{what.at_s:.1f} s"]
        yield [*where, doing + newest, what.from_step, *verdicts]


_HEAD = """# The fault campaign: kills at random moments, and what was lost

`nox -s faults` makes this page. Small recipes are trained in processes, with a checkpoint every 20 minibatches and an
evaluation every 40 or 50, once undisturbed and then under SIGKILL: workers, one or two at once, at random moments after
their start (in start-up, in training, while a checkpoint is being written, while the record is being closed), or their
parent, which is followed by `pipebench run --resume`; in some runs the newest checkpoint is cut short, too, before the
processes start again. A run counts as recovered if it ends by itself with exit code 0, `pipebench export` gives the
undisturbed run's weights bit for bit (`weights`), and MLflow has one run, FINISHED, with the undisturbed run's curves,
each point once (`points`), and if one of its kills came when there was a checkpoint: a run without is done again. A
fault that comes after its run's end isn't done, and has no row. Runs with several kills have several rows, their
verdict in each.
"""


def _runs(number: int, case: Case, seed: int, runs: int) -> Iterator[Outcome]:
    """Run a case undisturbed and then disturbed so many times."""
    with tempfile.TemporaryDirectory(prefix="pipebench-faults-") as place:
        print(f"{case.name} {case.plan}: undisturbed", file=sys.stderr, flush=True)
        peace = undisturbed(case, Path(place) / "peace")
        for index in range(runs):
            chance = random.Random(seed * 1000 + number * 10 + index)
            yield _run(number + index, case, peace, chance, Path(place) / str(index))


def _run(number: int, case: Case, peace: Baseline, chance: random.Random, folder: Path) -> Outcome:
    """Run a case disturbed, again if no kill came after a checkpoint, until something is lost or `_TRIES` are."""
    for index in range(_TRIES):
        faults = chosen_faults(number, case, peace, chance)
        outcome = disturbed(case, faults, peace, folder / str(index))
        said = "fine" if outcome.fine else f"NOT FINE: {outcome}"
        said += "" if outcome.tried else ", but no kill came after a checkpoint"
        print(f"{case.name} {case.plan}, {folder.name}.{index}: {said}", file=sys.stderr, flush=True)
        if outcome.tried or not outcome.fine:
            return outcome
    outcome.problems.append(f"no kill came after a checkpoint in {_TRIES} tries")
    return outcome


def main() -> None:
    """Run the campaign and print the page; exit code 1 if something was lost."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=1, help="disturbed runs per case")
    parser.add_argument("--only", default="", help="cases whose name or plan contains this")
    asked = parser.parse_args()
    cases = [(number, case) for number, case in enumerate(CASES) if asked.only in f"{case.name} {case.plan}"]
    if not cases:
        names = ", ".join(f"'{case.name} {case.plan}'" for case in CASES)
        parser.error(f"--only: got {asked.only!r}, which is in no case's name; there are {names}")
    began_s = time.monotonic()
    outcomes: list[Outcome] = []
    with contextlib.suppress(KeyboardInterrupt):  # the page then has what there is
        for number, case in cases:
            try:
                outcomes.extend(_runs(number, case, asked.seed, asked.runs))
            except Exception as error:  # the other cases' minutes are worth keeping
                outcomes.append(Outcome(case, [], problems=[f"{type(error).__name__}: {error}"]))
                traceback.print_exc()
    print(page(outcomes, asked.seed, time.monotonic() - began_s))
    sys.exit(0 if outcomes and all(outcome.fine for outcome in outcomes) else 1)


if __name__ == "__main__":
    main()
