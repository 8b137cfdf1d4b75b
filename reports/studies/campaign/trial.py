"""One disturbed run: its commands, the faults injected into them at the drawn moments, and the result."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from reports.studies.campaign import disks
from reports.studies.campaign.cases import EVALUATED, LAST, Case, write_recipe
from reports.studies.campaign.drawing import (
    ENDINGS,
    FREE,
    FULL,
    KILLS,
    LIVING,
    READ_ONLY,
    SPOIL,
    STOPS,
    TWICE,
    WRITABLE,
    Fault,
    Trial,
)
from reports.studies.campaign.judging import other_bits, record_problems
from reports.studies.campaign.points import BEGUN, FOLDER, PLAN, Question, answered, asked
from reports.studies.campaign.reference import References
from reports.studies.campaign.spoilt import damage, own_lines
from reports.studies.watched_run import WatchedRun

_LIMIT_S = 900.0  # for a command or a moment, on a machine that is busy with other programs
_ORPHANS_S = 60.0  # for workers to end whose launcher was killed
_POLL_S = 0.02
_INTERRUPTED, _MISTAKE = 130, 2  # exit codes
_RUNS = "pipebench-runs"
_PEACE = threading.Lock()  # held while an undisturbed run in processes is trained
_SIGNALS = {name: getattr(signal, name.partition(" ")[0]) for name in STOPS}


@dataclass
class Done:
    """A fault that was injected."""

    kind: str  # of the fault
    point: str  # where a process waited for it
    step: int  # minibatches that were done then
    down_s: float | None = None  # until training continued; None if it never stopped, or nothing was left to train
    again: int | None = None  # minibatches that were trained a second time


@dataclass
class Outcome:
    """The result of a disturbed run."""

    name: str  # of the trial
    case: str  # name of the case
    mode: str  # of the case
    engine: str  # of the case
    done: list[Done] = field(default_factory=list)  # the faults that were injected
    undone: int = 0  # number of faults whose moment never came
    problems: list[str] = field(default_factory=list)  # whatever went wrong, in words; empty if nothing was lost
    took_s: float = 0.0  # wall time of all commands
    # Kinds of requests to stop, and the seconds until the command had ended.
    signal_s: list[tuple[str, float]] = field(default_factory=list)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "Outcome":
        """Return the outcome that `asdict` has converted to data."""
        return cls(**{**data, "done": [Done(**each) for each in data["done"]]})


@dataclass(frozen=True)
class Place:
    """What all trials of a campaign share."""

    folder: Path  # in which every trial has a folder
    database: Path  # an empty MLflow database, which is copied, since making one takes seconds
    settings: Mapping[str, str]  # environment variables of all commands
    references: References  # the undisturbed runs


class DisturbedRun:
    """Runs a trial on this host; the result is `outcome`.

    Args:
        trial: the run and its faults.
        place: shared with other trials.
        seed: draws the damage to files.
    """

    def __init__(self, trial: Trial, place: Place, seed: int) -> None:
        self.trial, self.place = trial, place
        self.folder = place.folder / trial.name
        self.outcome = Outcome(trial.name, trial.case.name, trial.case.mode, trial.case.engine)
        self._chance = Random(f"{seed} {trial.name}")
        self._next = 0  # index of the next fault
        self._stops: list[int] = []  # steps at which the run was stopped
        self._ended: Fault | None = None  # the fault that ends the current command
        self._damaged = 0  # number of damaged checkpoints
        self._disk_fails = False  # whether the disk is full or read-only
        self._prepare()

    def _prepare(self) -> None:
        self.questions = self.folder / "questions"
        self._scratch = self.folder / "tmp"
        for path in (self.questions, self._scratch):
            path.mkdir(parents=True)
        self.recipe = write_recipe(self.folder)
        shutil.copyfile(self.place.database, self.folder / "mlflow.db")
        moments = [asdict(fault.moment) for fault in self.trial.faults]
        (self.questions / PLAN).write_text(json.dumps(moments))
        if self.trial.on_small_disk:
            disks.make(self.folder / _RUNS)

    @property
    def settings(self) -> dict[str, str]:
        """The environment variables of commands into which faults are injected."""
        armed = {FOLDER: str(self.questions)}
        if self.trial.case.in_processes:
            armed[f"{FOLDER}_IN_PROCESSES"] = "1"
        return {**self.unarmed, **armed}

    @property
    def unarmed(self) -> dict[str, str]:
        """The environment variables of other commands."""
        return {**self.place.settings, "TMPDIR": str(self._scratch)}

    def run(self) -> Outcome:
        """Run the trial to its end and return its result."""
        began_s = time.monotonic()
        try:
            words = [str(self.recipe), *case_words(self.trial.case, self.place.references)]
            while words:
                words = self._command(words)
            if not self.outcome.problems:
                self.outcome.problems += self._judged()
        except Exception as error:  # it is a result of this trial and must not end the campaign
            traceback.print_exc()
            self.outcome.problems.append(f"{type(error).__name__}: {str(error)[-1500:]}")
        finally:
            if self.trial.on_small_disk:
                disks.remove(self.folder / _RUNS)
        self.outcome.undone = len(self.trial.faults) - len(self.outcome.done)
        _note_lost(self.outcome.done, self.questions)
        self.outcome.took_s = time.monotonic() - began_s
        return self.outcome

    def _command(self, words: Sequence[str]) -> list[str]:
        """Run a command, inject faults, and return the arguments of the next command; [] if the run is over."""
        with WatchedRun(self.folder, words, self.settings) as run:
            since_s = self._attend(run)
            code = run.wait(_LIMIT_S)
            if since_s is not None and self._ended is not None and self._ended.kind in STOPS:
                self.outcome.signal_s.append((self._ended.kind, time.monotonic() - since_s))
            self.outcome.problems += _orphans(run)
            return self._after(run, code)

    def _attend(self, run: WatchedRun) -> float | None:
        """Inject the drawn faults until the command ends; return the monotonic time of the last one, or None."""
        self._ended, since_s = None, None
        while self._next < len(self.trial.faults):
            index, fault = self._next, self.trial.faults[self._next]
            if not run.wait_until(asked(self.questions, index).exists, _LIMIT_S, f"moment {index}: {fault.moment}"):
                break
            since_s = time.monotonic()
            self.note_done(fault)
            self._do(fault, run)
            self.answer()
        return since_s

    def note_done(self, fault: Fault) -> None:
        """Record that a fault is being injected; one of the processes waits for it."""
        question = Question(**json.loads(asked(self.questions, self._next).read_text()))
        self.outcome.done.append(Done(fault.kind, fault.moment.point, question.step))

    def answer(self) -> None:
        """Let the process that waits continue."""
        answered(self.questions, self._next).touch()
        self._next += 1

    def _do(self, fault: Fault, run: WatchedRun) -> None:
        """Inject a fault into a run, one of whose processes waits."""
        kind = fault.kind
        if kind in KILLS or kind in (SPOIL, TWICE):
            self._kill(fault, run)
        elif kind in STOPS:
            self._ended = fault
            run.signal(_SIGNALS[kind], [run.process.pid])
            if kind.endswith("twice"):
                time.sleep(0.3)  # a signal that is sent while the same one is pending is lost
                run.signal(_SIGNALS[kind], [run.process.pid])
        elif kind == LIVING:
            self._resume_living(run)
        else:
            self._change_disk(kind, run)

    def _kill(self, fault: Fault, run: WatchedRun) -> None:
        parent = run.process.pid
        workers: dict[int, int] = {}
        if fault.victims:
            # Rank 0 ends last, so at the end of a run other victims may be gone; at other moments all start or run.
            ends = fault.moment.point in ("result", "finish", "finished")
            wanted = {*fault.victims} & {*run.workers()} if ends else {*fault.victims}
            run.wait_until(lambda: workers.update(run.workers()) or wanted <= {*workers}, 60.0, "workers")
        else:
            run.workers()  # so that `left_over` knows them
        pids = {
            "kill a worker": [workers.get(rank, 0) for rank in fault.victims],
            "kill several workers": [workers.get(rank, 0) for rank in fault.victims],
            "kill all at once": [parent, *workers.values()],
        }.get(fault.kind, [parent])
        run.signal(signal.SIGKILL, [pid for pid in pids if pid])
        if parent in pids:
            self._ended = fault

    def _change_disk(self, kind: str, run: WatchedRun) -> None:
        runs = self.folder / _RUNS
        self._disk_fails = kind not in ENDINGS
        assert run.run_folder is not None
        change: dict[str, Callable[[], None]] = {
            FULL: lambda: disks.fill(runs),
            FREE: lambda: disks.free(runs),
            READ_ONLY: lambda: disks.make_read_only(run.run_folder),  # type: ignore[arg-type] # it is there
            WRITABLE: lambda: disks.remove(run.run_folder),  # type: ignore[arg-type] # likewise
        }
        change[kind]()

    def _resume_living(self, run: WatchedRun) -> None:
        """Let a second command resume a run that is running: it has to refuse."""
        assert run.run_folder is not None
        code, said = self._resume(run.run_folder.name)
        if code != _MISTAKE or len(own_lines(said)) != 1:
            self.outcome.problems.append(f"a living run is resumed: exit code {code}, {last_line(said)}")

    def _resume(self, run_id: str) -> tuple[int, str]:
        words = [sys.executable, "-m", "pipebench", "run", "--resume", run_id]
        env = {**os.environ, **self.unarmed}
        done = subprocess.run(words, cwd=self.folder, env=env, capture_output=True, text=True, timeout=_LIMIT_S)
        return done.returncode, done.stderr

    def _after(self, run: WatchedRun, code: int) -> list[str]:
        """Check how a command ended; return the arguments of the next command."""
        ended, problems = self._ended, self.outcome.problems
        if problems:
            return []
        if "Traceback" in run.output:
            problems.append(f"a traceback: {last_line(run.output)}")
        if ended is None and code != 0 and self._disk_fails and "pipebench: error: " in run.output:
            return self._mend_disk(run)
        if ended is None or code == 0:
            if code != 0:
                problems.append(f"exit code {code}: {last_line(run.output)}")
            return []
        expected = [-signal.SIGKILL] if ended.kind not in STOPS else [_INTERRUPTED]
        if ended.kind == "SIGHUP" and not self.trial.case.in_processes:
            expected = [-signal.SIGHUP]  # the virtual engine doesn't handle it
        if code not in expected or run.run_folder is None:
            problems.append(f"{ended.kind} ends it with exit code {code}: {last_line(run.output)}")
            return []
        if ended.kind in STOPS and run.steps() and max(run.steps()) < LAST:
            self._stops.append(max(run.steps()))
        return self._go_on(run.run_folder, ended)

    def _mend_disk(self, run: WatchedRun) -> list[str]:
        """Inject the faults up to the one that ends the disk's failure: a command can't restart the run before that."""
        assert run.run_folder is not None
        while self._disk_fails:
            fault = self.trial.faults[self._next]
            text = json.dumps(asdict(Question(run.process.pid, max(run.steps()), time.time())))
            asked(self.questions, self._next).write_text(text)
            self.note_done(fault)
            self._change_disk(fault.kind, run)
            self.answer()
        return ["--resume", run.run_folder.name]

    def _go_on(self, folder: Path, ended: Fault) -> list[str]:
        if ended.kind == SPOIL:
            damage(folder / "checkpoints", self._chance)
            self._damaged += 1
        if ended.kind == TWICE:
            self._resume_twice(folder.name)
            return []
        return ["--resume", folder.name]

    def _resume_twice(self, run_id: str) -> None:
        """Start two commands that resume a run: one has to succeed, and the other has to refuse."""
        command = [sys.executable, "-m", "pipebench", "run", "--resume", run_id]
        env = {**os.environ, **self.unarmed}
        with (self.folder / "twice.txt").open("ab") as log:
            both = [
                subprocess.Popen(command, cwd=self.folder, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
                for _ in range(2)
            ]
            try:
                codes = sorted(each.wait(_LIMIT_S) for each in both)
            finally:
                for each in both:
                    each.kill()
        if codes != [0, _MISTAKE]:
            self.outcome.problems.append(f"resumed twice at once: exit codes {codes[0]} and {codes[1]} for 0 and 2")

    def _judged(self) -> list[str]:
        """Return the problems of a run that has ended: what was lost, and files that are left over."""
        found = sorted((self.folder / _RUNS).glob("*/run.json"))
        if len(found) != 1:
            return [f"{len(found)} run folders"]
        expected = self.expected()
        problems = [*other_bits(found[0].parent / "checkpoints", expected)]
        problems += record_problems(self.folder, LAST // EVALUATED)
        said = "".join(path.read_text(errors="replace") for path in self.folder.glob("*.txt"))
        if said.count("skipped the checkpoint") < self._damaged:
            problems.append(f"{self._damaged} damaged checkpoints, {said.count('skipped the checkpoint')} told")
        left = [path.name for path in found[0].parent.rglob("*.tmp")]
        if left:
            problems.append(f"{len(left)} files written aside are left, {left[0]} for one")
        left = sorted(path.name for path in self._scratch.glob("pipebench-*"))
        if left:
            problems.append(f"{len(left)} temporary folders are left, {left[0]} for one")
        return problems

    def expected(self) -> Path:
        """Return the folder with the checkpoints of the undisturbed run."""
        case = self.trial.case
        if case.adds_in_a_ring:
            return undisturbed_in_processes(case, self.place)
        return self.place.references.of(case.words, self._stops)


def _note_lost(done: Sequence[Done], questions: Path) -> None:
    """Set the downtime and the repeated minibatches of every fault, from the files of `points`."""
    path = questions / BEGUN
    begun = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for index, fault in enumerate(done):
        at_s = json.loads(asked(questions, index).read_text())["at_s"]
        later = asked(questions, index + 1)
        until_s = json.loads(later.read_text())["at_s"] if later.exists() else math.inf
        after = [each for each in begun if at_s < each["at_s"] <= until_s and each["rank"] == 0]
        if after:
            fault.down_s = after[0]["at_s"] - at_s
            fault.again = max(0, fault.step - after[0]["step"]) if fault.step <= LAST else 0


def _orphans(run: WatchedRun) -> list[str]:
    """Wait until the workers of a killed launcher have ended, which they do by themselves; return what is wrong."""
    until_s = time.monotonic() + _ORPHANS_S
    while left := run.left_over():
        if time.monotonic() > until_s:
            return [f"{len(left)} workers outlive the launcher"]
        time.sleep(_POLL_S)
    return []


def case_words(case: Case, references: References) -> list[str]:
    """Return the overrides of a case's commands, engine included."""
    words = [*case.words, f"engine.kind={case.engine}"]
    if case.races and case.in_processes:
        words.append(f"parallelism.push_order={references.of(case.words) / 'push-order.json'}")
    return words


def undisturbed_in_processes(case: Case, place: Place) -> Path:
    """Train a case in processes without faults, once; return the folder with its checkpoints.

    It is the reference of cases whose ring adds in another order than the virtual engine.

    Raises:
        RuntimeError: the run fails.
    """
    folder = place.folder / f"peace-{case.name.replace(' ', '-')}"
    with _PEACE:
        if not folder.exists():
            recipe = write_recipe(folder)
            shutil.copyfile(place.database, folder / "mlflow.db")
            with WatchedRun(folder, [str(recipe), *case_words(case, place.references)], place.settings) as run:
                if run.wait(_LIMIT_S):
                    raise RuntimeError(f"{case.name} fails undisturbed: {last_line(run.output)}")
    return next(folder.glob(f"{_RUNS}/*/checkpoints"))


def last_line(text: str) -> str:
    """Return the last line with an error, or the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line]
    return (errors or lines or ["nothing said"])[-1][:300]
