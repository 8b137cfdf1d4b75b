"""Checkpoints are written while training continues: their content and time, and the result of a kill or an error."""

import os
import signal
import threading
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from pipebench.checkpoint.store import CheckpointFile, Checkpoints
from pipebench.engine.engine import TrainingEngine
from pipebench.recipe.schema import PeriodRecipe
from pipebench.train.checkpointing import CheckpointPolicy
from pipebench.train.engines import on_virtual_clock
from pipebench.train.job import Job
from pipebench.train.loop import TrainingLoop
from pipebench.train.result import INTERRUPTED
from tests.commands import run_code
from tests.patience import PATIENCE_S
from tests.train.test_resuming import checkpointed, checkpointed_run
from tests.train.test_training import Silent, prepared, recipe


class Held(Checkpoints):
    """A store that writes a part only after training has continued from that step, or has ended.

    Attributes:
        begun: steps of which parts were given.
        at_once: the most checkpoints that were being written at a time.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, keep=99)
        self.begun: list[int] = []
        self.at_once, self._now = 0, set[int]()
        self.last = 36
        self.gone_on = threading.Event()

    def write_part(self, step: int, part: str, state: Any) -> CheckpointFile:
        self.begun.append(step)
        self._now.add(step)
        self.at_once = max(self.at_once, len(self._now))
        assert threading.current_thread() is not threading.main_thread()
        assert step == self.last or self.gone_on.wait(PATIENCE_S)
        return super().write_part(step, part, state)

    def commit(self, step: int, parts: Any, progress: Any) -> None:
        super().commit(step, parts, progress)
        self._now.discard(step)
        self.gone_on.clear()


class Continuing(Silent):
    """Progress that lets a checkpoint be written once training has gone on for a minibatch."""

    def __init__(self, store: Held) -> None:
        super().__init__()
        self._store = store

    def update(self, samples: int, clock_s: float, loss: float, occupancy: float) -> None:
        if samples > 22:  # it has given its first, of step 5, whether that is being written yet or not
            self._store.gone_on.set()


def test_training_continues_while_a_checkpoint_of_its_drain_s_state_is_written(tmp_path: Path) -> None:
    expected, _ = checkpointed_run(checkpointed(), Checkpoints(tmp_path / "plain", keep=99))
    store, given = Held(tmp_path / "held"), checkpointed()
    policy = CheckpointPolicy(store)
    result, _ = TrainingLoop(given, on_virtual_clock(given), Continuing(store), lambda point: None, policy).run()
    assert result.points == expected.points
    assert sorted({*store.begun}) == store.steps() == Checkpoints(tmp_path / "plain").steps()
    assert store.at_once == 1
    for step in store.steps():
        mine, theirs = (each.at(step).load() for each in (store, Checkpoints(tmp_path / "plain")))
        for name, value in theirs.parameters.items():
            assert torch.equal(mine.parameters[name], value), (step, name)


class Dying(Checkpoints):
    """A process that is killed while its second checkpoint is written and training goes on."""

    def write_part(self, step: int, part: str, state: Any) -> CheckpointFile:
        if step == 10:
            written = super().write_part(step, part, state)
            while not [*self.folder.parent.glob("went-on")]:
                pass
            print(written.file, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write_part(step, part, state)


class Marking(Silent):
    """Progress that leaves a file once training is past the second checkpoint."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def update(self, samples: int, clock_s: float, loss: float, occupancy: float) -> None:
        if samples > 42:
            (self._folder / "went-on").touch()


def die_behind_training(folder: Path) -> None:
    given = checkpointed()
    policy = CheckpointPolicy(Dying(folder / "kept"))
    TrainingLoop(given, on_virtual_clock(given), Marking(folder), lambda point: None, policy).run()


def test_a_kill_during_a_write_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    line = f"from pathlib import Path; from {__name__} import *; die_behind_training(Path({str(tmp_path)!r}))"
    done = run_code(line, tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout.startswith("stage-0")
    store = Checkpoints(tmp_path / "kept")
    found, skipped = store.latest()
    assert found is not None
    assert (found.step, store.steps(), len(skipped)) == (5, [5, 10], 1)
    resumed, again = checkpointed_run(checkpointed(), store, found)
    whole, engine = checkpointed_run(checkpointed(), Checkpoints(tmp_path / "whole"))
    assert resumed.points == whole.points
    for mine, theirs in zip(again.replicas, engine.replicas, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine.tensors().values(), theirs.tensors().values(), strict=True))


@pytest.mark.parametrize("started", [False, True])
def test_ctrl_c_while_a_writing_thread_starts_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: bool
) -> None:
    """0.2.0 joined a thread that had not started."""
    start, threads = threading.Thread.start, list[threading.Thread]()

    def interrupted(thread: threading.Thread) -> None:
        if thread.name == "checkpoint 10":
            threads.append(thread)
            if started:
                start(thread)
            raise KeyboardInterrupt
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    store = Checkpoints(tmp_path / "kept")
    result, _ = checkpointed_run(checkpointed(), store)
    if started:
        threads[0].join()
    assert result.outcome == INTERRUPTED
    assert store.steps() == [5], "nothing waits for a thread that was not seen to start"


class Broken(Checkpoints):
    """A store that raises an error which isn't a disk's."""

    def commit(self, step: int, parts: Any, progress: Any) -> None:
        raise ZeroDivisionError


def test_an_error_other_than_a_disk_s_ends_the_run(tmp_path: Path) -> None:
    given = checkpointed()
    policy = CheckpointPolicy(Broken(tmp_path))
    with pytest.raises(ZeroDivisionError):
        TrainingLoop(given, on_virtual_clock(given), Silent(), lambda point: None, policy).run()


class Failing:
    """An engine whose third segment fails."""

    def __init__(self, engine: TrainingEngine) -> None:
        self._engine, self._segments = engine, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def train(self, first: int, count: int) -> int:
        self._segments += 1
        if self._segments == 3:
            raise ValueError("a layer fails")
        return self._engine.train(first, count)


def test_a_run_that_fails_finishes_its_checkpoint(tmp_path: Path) -> None:
    given, store = checkpointed(), Checkpoints(tmp_path)
    loop = TrainingLoop(
        given,
        lambda *callbacks: Failing(on_virtual_clock(given)(*callbacks)),  # type: ignore[arg-type]
        Silent(),
        lambda point: None,
        CheckpointPolicy(store),
    )
    with pytest.raises(ValueError, match="a layer fails"):
        loop.run()
    found, _ = store.latest()
    assert found is not None
    assert found.step == 10


def saved_at_evaluations(max_epochs: int = 3) -> Job:
    """A run that evaluates after every epoch of 12 minibatches, where a checkpoint is due, too."""
    return prepared(recipe(max_epochs=max_epochs, checkpoint_every=PeriodRecipe(epochs=1)), plan=([4], [2, 1]))


class FailingAtSecondEvaluation:
    """An engine whose evaluation after step 24 fails."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._num_evaluations = engine, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def evaluate(self) -> dict[str, float]:
        self._num_evaluations += 1
        if self._num_evaluations == 2:
            raise RuntimeError("no prediction has a word")
        return cast("dict[str, float]", self._engine.evaluate())


def test_a_failure_in_an_evaluation_costs_no_training(tmp_path: Path) -> None:
    """0.2.0 wrote a checkpoint after its evaluation: an epoch was lost."""
    given, store = saved_at_evaluations(), Checkpoints(tmp_path / "failed")
    loop = TrainingLoop(
        given,
        lambda *callbacks: cast("TrainingEngine", FailingAtSecondEvaluation(on_virtual_clock(given)(*callbacks))),
        Silent(),
        lambda point: None,
        CheckpointPolicy(store),
    )
    with pytest.raises(RuntimeError, match="no prediction"):
        loop.run()
    found, _ = store.latest()
    assert found is not None
    assert (found.step, len(found.progress["points"])) == (24, 1)
    resumed, again = checkpointed_run(saved_at_evaluations(), store, found)
    whole, engine = checkpointed_run(saved_at_evaluations(), Checkpoints(tmp_path / "whole"))
    assert resumed.points == whole.points
    for mine, theirs in zip(again.replicas, engine.replicas, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine.tensors().values(), theirs.tensors().values(), strict=True))


class Late(Checkpoints):
    """A store that writes the part of step 12 only once training has gone on after the evaluation there."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, keep=99)
        self.gone_on = threading.Event()

    def write_part(self, step: int, part: str, state: Any) -> CheckpointFile:
        assert step != 12 or self.gone_on.wait(PATIENCE_S)
        return super().write_part(step, part, state)


def test_the_evaluation_is_added_to_a_checkpoint_that_is_still_being_written(tmp_path: Path) -> None:
    store, given = Late(tmp_path), saved_at_evaluations()

    class GoingOn(Silent):
        def update(self, samples: int, clock_s: float, loss: float, occupancy: float) -> None:
            if samples > 46:
                store.gone_on.set()

    policy = CheckpointPolicy(store)
    result, _ = TrainingLoop(given, on_virtual_clock(given), GoingOn(), lambda point: None, policy).run()
    found = [store.at(step).progress["points"] for step in store.steps()]
    assert store.steps() == [12, 24, 36]
    for index, points in enumerate(found):
        assert [point["metrics"] for point in points] == [p.metrics for p in result.points[: index + 1]]


def test_a_checkpoint_that_lacks_its_evaluation_is_named(tmp_path: Path) -> None:
    notes: list[str] = []

    class Noting(Silent):
        def note(self, text: str) -> None:
            notes.append(text)

    class Unwritable(Checkpoints):
        def amend(self, step: int, progress: Any) -> None:
            if step == 12:
                raise OSError("No space left on device")
            super().amend(step, progress)

    given = saved_at_evaluations()
    policy = CheckpointPolicy(Unwritable(tmp_path, keep=99))
    TrainingLoop(given, on_virtual_clock(given), Noting(), lambda point: None, policy).run()
    assert notes == ["the checkpoint at minibatch 12 lacks its evaluation: No space left on device; training goes on"]
    assert [len(Checkpoints(tmp_path).at(step).progress["points"]) for step in (12, 24, 36)] == [0, 2, 3]
