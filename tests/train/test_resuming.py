"""Runs with checkpoints: resuming, when they are written, their cost, and stops that end with one."""

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from pipebench.checkpoint.progress import SavedProgress
from pipebench.checkpoint.state import CheckpointError, ModelState
from pipebench.checkpoint.store import Checkpoint, CheckpointFile, Checkpoints
from pipebench.engine.admission import StopRequest
from pipebench.engine.engine import TrainingEngine
from pipebench.recipe.schema import PeriodRecipe, TargetRecipe
from pipebench.schedule.programs import forward_programs
from pipebench.train.checkpointing import CheckpointPolicy, resume_point
from pipebench.train.curves import Curves
from pipebench.train.engines import on_virtual_clock
from pipebench.train.job import Job
from pipebench.train.loop import TrainingLoop
from pipebench.train.result import DIVERGED, INTERRUPTED, MISSED, Point, RunResult
from tests.checkpoint.spoiling import Left
from tests.engine.test_sharding import Wide, momentum
from tests.support import Blobs, Mlp, flat_cluster, make_setup
from tests.train.test_training import Silent, prepared, recipe, train


def checkpointed_run(
    given: Job,
    checkpoints: Checkpoints,
    found: Checkpoint | None = None,
    on_point: Callable[[Point], None] = lambda point: None,
) -> tuple[RunResult, Any]:
    """Train with checkpoints; return the result and the engine."""
    engines: list[Any] = []

    def make(*callbacks: Any) -> Any:
        engines.append(on_virtual_clock(given)(*callbacks))
        return engines[-1]

    goes_on = None if found is None else resume_point(found, given)
    result, _ = TrainingLoop(given, make, Silent(), on_point, CheckpointPolicy(checkpoints, goes_on)).run()
    return result, engines[0]


def checkpointed(max_epochs: int = 3) -> Job:
    """A run that drains for checkpoints twice per epoch of 12 minibatches."""
    every = PeriodRecipe(minibatches=5)
    return prepared(recipe(max_epochs=max_epochs, checkpoint_every=every), plan=([4], [2, 1]))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunResult, Any, Checkpoints]:
    """Return the result, engine and checkpoints of a run that isn't stopped."""
    place = Checkpoints(tmp_path_factory.mktemp("whole"), keep=99)
    return *checkpointed_run(checkpointed(), place), place


@pytest.mark.parametrize("step", [5, 12, 15, 30])
def test_a_resumed_run_ends_like_one_that_never_stopped(
    tmp_path: Path, step: int, undisturbed: tuple[RunResult, Any, Checkpoints]
) -> None:
    whole, engine, place = undisturbed
    assert place.steps() == [5, 10, 12, 15, 20, 25, 30, 35, 36]  # 12 is best
    reported: list[Point] = []
    resumed, again = checkpointed_run(checkpointed(), Checkpoints(tmp_path), place.at(step), reported.append)
    for mine, theirs in zip(again.replicas, engine.replicas, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine.tensors().values(), theirs.tensors().values(), strict=True))
    # All points are reported, also those before the checkpoint: the process may have died before recording them.
    assert resumed.points == whole.points == tuple(reported)
    assert resumed.sentence == whole.sentence
    same = {name: value for name, value in whole.metrics.items() if name not in ("wall_time_s", "start_time_s")}
    assert {name: resumed.metrics[name] for name in same} == pytest.approx(same)


def rarely_saved() -> Job:
    """A run that evaluates thrice per epoch of 12 minibatches, and writes a checkpoint every epoch."""
    given = recipe(evaluate_every=PeriodRecipe(minibatches=4), checkpoint_every=PeriodRecipe(epochs=1))
    return prepared(given, lr=0.9, plan=([4], [2, 1]))


def test_the_best_point_is_the_first_of_the_best_that_are_numbers() -> None:
    nan, draw = float("nan"), random.Random(0)
    for better in ("min", "max"):
        curves = Curves(None, {"top1": better})
        assert curves.best_point is None
        for index in range(40):
            curves.add(
                Point(index, index, {"top1": draw.choice([nan] if index < 3 else [nan, 1.0, 2.0, 3.0])}), 0.0, 0.0
            )
            numbers = [point for point in curves.points if point.metrics["top1"] == point.metrics["top1"]]
            values = [point.metrics["top1"] for point in numbers]
            extreme = (min if better == "min" else max)(values, default=nan)
            expected = next((point for point in numbers if point.metrics["top1"] == extreme), curves.points[0])
            assert curves.best_point is expected


def test_curves_in_checkpoints_cost_training_little(tmp_path: Path) -> None:
    """Copying every number of 18,000 points took half a second, and their text of twice the length two seconds more."""
    store = Checkpoints(tmp_path, keep=99)
    checkpointed_run(checkpointed(), store)
    checkpoint = store.at(36)
    saved = SavedProgress.from_json(checkpoint.progress)
    data = saved.to_json()
    assert data["points"] == saved.points
    assert data["points"] is not saved.points
    assert data["points"][0] is saved.points[0]
    assert "\n" not in (checkpoint.path / "manifest.json").read_text()


def test_checkpoints_may_be_rarer_than_evaluations(tmp_path: Path) -> None:
    """Once every evaluation wrote one, whatever the recipe said."""
    store = Checkpoints(tmp_path / "whole", keep=99)
    whole, engine = checkpointed_run(rarely_saved(), store)
    values = [point.metrics["top1"] for point in whole.points]
    best = {4 * (index + 1) for index, value in enumerate(values) if value > max(values[:index], default=-1.0)}
    assert len(values) == 9
    assert {*store.steps()} == {12, 24, 36} | best
    assert len(store.steps()) < 9
    for step in store.steps():
        resumed, again = checkpointed_run(rarely_saved(), Checkpoints(tmp_path / f"from {step}"), store.at(step))
        assert resumed.points == whole.points
        for mine, theirs in zip(again.replicas, engine.replicas, strict=True):
            pairs = zip(mine.tensors().values(), theirs.tensors().values(), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), step


def test_checkpoint_drains_are_part_of_the_recipe() -> None:
    """They are drains like any other, with or without an evaluation there."""
    drained, plain = checkpointed(), prepared(recipe())
    results = [train(given)[0].points[-1].metrics["train_loss"] for given in (drained, plain)]
    assert results[0] != results[1]


class Full(Checkpoints):
    """A disk, or memory, that is full from some step on."""

    def __init__(self, folder: Path, error: Exception) -> None:
        super().__init__(folder, keep=9)
        self._error = error

    def write_part(self, step: int, part: str, state: Any) -> CheckpointFile:
        if step > 10:
            raise self._error
        return super().write_part(step, part, state)


class Noted(Silent):
    """Progress that records notes."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
        (MemoryError(), "MemoryError"),  # a process whose share never came kept the first one waiting
        (RuntimeError("unexpected pos\nat: 3"), "RuntimeError: unexpected pos at: 3"),
    ],
)
def test_a_part_that_cannot_be_written_ends_checkpoints_but_not_the_run(
    tmp_path: Path, error: Exception, reason: str
) -> None:
    progress, given = Noted(), checkpointed()
    result, _ = TrainingLoop(
        given, on_virtual_clock(given), progress, lambda point: None, CheckpointPolicy(Full(tmp_path, error))
    ).run()
    assert result.outcome == MISSED
    assert progress.notes[0].startswith(f"no checkpoint at minibatch 12: {reason}; those before stay, ")
    assert Checkpoints(tmp_path).latest()[0] is not None
    assert Checkpoints(tmp_path).steps() == [5, 10]


class Removed(Checkpoints):
    """Checkpoints whose run's folder is removed before that of minibatch 12."""

    def write_part(self, step: int, part: str, state: Any) -> CheckpointFile:
        if step == 12 and self.folder.is_dir():
            assert self.steps() == [5, 10]
            shutil.rmtree(self.folder.parent)
        return super().write_part(step, part, state)


def test_no_checkpoint_is_said_to_stay_in_a_removed_folder(tmp_path: Path) -> None:
    """0.2.0 said that those before stay."""
    progress, given, store = Noted(), checkpointed(), Removed(tmp_path / "run" / "checkpoints", keep=9)
    store.folder.parent.mkdir()
    loop = TrainingLoop(given, on_virtual_clock(given), progress, lambda point: None, CheckpointPolicy(store))
    assert loop.run()[0].outcome == MISSED
    assert progress.notes[0].startswith("no checkpoint at minibatch 12: ")
    assert progress.notes[0].endswith("; there is no other one, training goes on")


class Stopped:
    """An engine that another process has asked to stop after some minibatches."""

    def __init__(self, engine: Any, after: int, reason: str) -> None:
        self._engine, self._left, self._reason = engine, after, reason

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def stop_reason(self) -> str | None:
        return self._reason if self._left <= 0 else None

    def train(self, first: int, count: int) -> int:
        done = min(count, max(0, self._left))
        self._left -= count
        return int(self._engine.train(first, done))


@pytest.mark.parametrize(
    ("reason", "outcome", "steps"), [("interrupted", INTERRUPTED, [5, 8]), ("diverged: x", DIVERGED, [5])]
)
def test_an_agreed_stop_ends_with_a_checkpoint_unless_the_weights_are_lost(
    tmp_path: Path, reason: str, outcome: str, steps: list[int]
) -> None:
    given = checkpointed()
    result, _ = TrainingLoop(
        given,
        lambda *callbacks: cast("TrainingEngine", Stopped(on_virtual_clock(given)(*callbacks), 8, reason)),
        Silent(),
        lambda point: None,
        CheckpointPolicy(Checkpoints(tmp_path)),
    ).run()
    assert result.outcome == outcome
    assert Checkpoints(tmp_path).steps() == steps
    assert result.sentence == ("interrupted after 32 samples" if outcome == INTERRUPTED else reason)


@pytest.mark.parametrize("step", [12, 36])
def test_a_run_stopped_right_before_an_evaluation_resumes_with_it(tmp_path: Path, step: int) -> None:
    whole, _ = checkpointed_run(checkpointed(), Checkpoints(tmp_path / "whole"))
    given, checkpoints = checkpointed(), Checkpoints(tmp_path / "stopped")
    TrainingLoop(
        given,
        lambda *callbacks: cast("TrainingEngine", Stopped(on_virtual_clock(given)(*callbacks), step, "interrupted")),
        Silent(),
        lambda point: None,
        CheckpointPolicy(checkpoints),
    ).run()
    found, _ = checkpoints.latest()
    assert found is not None
    assert (found.step, len(found.progress["points"])) == (step, step // 12 - 1)
    resumed, _ = checkpointed_run(checkpointed(), Checkpoints(tmp_path / "again"), found)
    assert (resumed.points, resumed.sentence) == (whole.points, whole.sentence)


@pytest.mark.parametrize("step", [12, 36])
def test_a_run_stopped_in_an_evaluation_resumes_with_it(tmp_path: Path, step: int) -> None:
    """With the metrics of an undisturbed run, also the times: the part of the evaluation isn't counted."""
    whole, _ = checkpointed_run(checkpointed(), Checkpoints(tmp_path / "whole"))
    given, checkpoints, stop = checkpointed(), Checkpoints(tmp_path / "stopped"), StopRequest()

    def make(*callbacks: Any) -> Any:
        engine: Any = on_virtual_clock(given, stop)(*callbacks)
        execute, evaluated = engine._execute, [0]

        def counting(event: Any) -> None:
            execute(event)
            evaluated[0] += engine.meter.evaluating
            if evaluated[0] == 3 + (step // 12 - 1) * per_evaluation:
                stop.reason = "interrupted"

        per_evaluation = sum(map(len, map(list, forward_programs(given.setup.evaluation.pipeline, 3))))
        engine._execute = counting
        return engine

    result, _ = TrainingLoop(given, make, Silent(), lambda point: None, CheckpointPolicy(checkpoints)).run()
    assert result.outcome == INTERRUPTED
    found, _ = checkpoints.latest()
    assert found is not None
    assert (found.step, len(found.progress["points"])) == (step, step // 12 - 1)
    resumed, _ = checkpointed_run(checkpointed(), Checkpoints(tmp_path / "again"), found)
    assert (resumed.points, resumed.sentence) == (whole.points, whole.sentence)
    same = {name: value for name, value in whole.metrics.items() if name not in ("wall_time_s", "start_time_s")}
    assert {name: resumed.metrics[name] for name in same} == pytest.approx(same)


def test_totals_add_up_over_plans_and_rates_are_of_the_last(tmp_path: Path) -> None:
    """An epoch under one plan, one under another, one under the first again."""
    plans: list[Any] = [([4], [2, 1]), ([2, 4], [1, 1, 1]), ([4], [2, 1])]
    alone = [train(prepared(recipe(max_epochs=1, target=None), plan=plan))[0].metrics for plan in plans]
    store, result = Checkpoints(tmp_path), None
    for index, plan in enumerate(plans):
        given = prepared(recipe(max_epochs=index + 1, target=None), plan=plan)
        result, _ = checkpointed_run(given, store, store.latest()[0])
        metrics = result.metrics
        for name in alone[0]:
            if name.startswith("comm_bytes") and "per_sample" not in name:
                assert metrics[name] == sum(each.get(name, 0) for each in alone[: index + 1]), name
        for name in (
            "epoch_time_s",
            "throughput_samples_per_s",
            *(each for each in alone[index] if "per_sample" in each),
        ):
            assert metrics[name] == pytest.approx(alone[index][name]), name
        assert metrics["training_time_s"] == pytest.approx(sum(each["training_time_s"] for each in alone[: index + 1]))
        assert metrics.get("workers_counted_from_samples", 0) == 46 * index
        assert [f"since epoch {index}" in note for note in result.notes.values()] == [True] * (index > 0)
    assert "lost_time_s" not in metrics


@pytest.mark.parametrize("change", ["schedule", "bandwidth", "precision"])
def test_rates_are_of_the_last_schedule_cluster_and_precision(tmp_path: Path, change: str) -> None:
    """In 0.2.0 a mode with the stages of the one before continued its counters, though it has other rates."""
    plan, store = ([2, 4], [1, 1, 1]), Checkpoints(tmp_path, keep=99)
    checkpointed_run(prepared(recipe(max_epochs=1, target=None), plan=plan), store)

    def other(max_epochs: int) -> Job:
        given = prepared(recipe(max_epochs=max_epochs, target=None), plan=plan)
        if change == "schedule":  # model parallelism
            one: dict[str, Any] = {"order": "all-forwards", "weights": "one", "depth": 1}
            setup = make_setup(Mlp(), plan, dataset=Blobs(num_train=46), lr=lambda stage, before, own: 0.1, **one)
            return replace(given, setup=setup)
        if change == "bandwidth":
            slow = replace(given.recipe, cluster=replace(given.recipe.cluster, bandwidth="1 kbit/s"))
            return replace(given, recipe=slow)
        return replace(given, recipe=replace(given.recipe, train=replace(given.recipe.train, precision="bf16")))

    alone = train(other(1))[0].metrics
    resumed = checkpointed_run(other(2), store, store.at(12))[0].metrics
    for name in ("throughput_samples_per_s", "bubble_fraction", "weight_versions_max", "peak_memory_bytes_max"):
        assert resumed[name] == pytest.approx(alone[name]), name
    assert resumed["workers_counted_from_samples"] == 46


def slow_at_drains(given: Job, *callbacks: Any) -> Any:
    """A virtual engine with a clock on which evaluations and checkpoints take a second."""
    engine = on_virtual_clock(given)(*callbacks)

    def take_a_second() -> None:
        engine.clock_s += 1.0

    engine.sync_clock = take_a_second  # type: ignore[method-assign]
    return engine


def test_a_target_that_an_earlier_evaluation_reached_has_that_evaluation_s_checkpoint_time(tmp_path: Path) -> None:
    """In 0.2.0 it had the seconds of all checkpoints, also of those after the target: more than the whole."""
    every, store, metrics = PeriodRecipe(minibatches=5), Checkpoints(tmp_path, keep=99), []
    for goal, step in ((2.0, None), (0.0, 36), (0.0, None)):  # missed; resumed with a lower target; with that one alone
        given = prepared(recipe(checkpoint_every=every, target=TargetRecipe("top1", goal)))
        found = None if step is None else resume_point(store.at(step), given)
        policy = CheckpointPolicy(store, found)
        loop = TrainingLoop(given, partial(slow_at_drains, given), Silent(), lambda point: None, policy)
        metrics.append(loop.run()[0].metrics)
    for name in ("", "_without_evaluation", "_checkpoint"):
        resumed, alone = (each[f"time_to_accuracy{name}_s"] for each in metrics[1:])
        assert resumed == pytest.approx(alone), name
    assert metrics[1]["time_to_accuracy_checkpoint_s"] == pytest.approx(2.0)


def test_a_resumed_run_frees_the_checkpoint(tmp_path: Path) -> None:
    """In 0.2.0 every process kept the whole model's state, of sharded replicas in memory, until its end."""
    store = Checkpoints(tmp_path)
    checkpointed_run(checkpointed(1), store)
    found = resume_point(store.at(12), given := checkpointed(2))
    assert {*found.state.optimizer} <= {*found.state.parameters} != set()
    TrainingLoop(given, on_virtual_clock(given), Silent(), lambda point: None, CheckpointPolicy(store, found)).run()
    assert found.state == ModelState()


@pytest.mark.parametrize("replica", [0, 1])
def test_lost_optimizer_state_of_a_replica_s_piece_is_found(tmp_path: Path, replica: int) -> None:
    """In 0.2.0 the other replica's pieces hid it, and the run continued with zeros in the lost ones."""
    sharded: dict[str, Any] = {"shard": "optimizer", "order": "sequential", "weights": "one", "depth": 1}
    setup = make_setup(Wide(), ([], [2]), dataset=Blobs(48), sums="ordered", make_optimizer=momentum, **sharded)
    given = Job(recipe(max_epochs=1, checkpoint_every=PeriodRecipe(minibatches=12)), flat_cluster(4), setup)
    store = Checkpoints(tmp_path / "checkpoints")
    checkpointed_run(given, store)
    (step,) = store.steps()

    def forget(data: Any) -> None:
        assert "b.weight" in data["pieces"], "both replicas have a piece of it"
        del data["optimizer"]["b.weight"]

    Left(tmp_path).change_part(replica, forget)
    with pytest.raises(CheckpointError, match=r"optimizer's state of b\.weight: found none, expected is the "):
        resume_point(store.at(step), given)


def test_lost_time_adds_up(tmp_path: Path) -> None:
    store, given = Checkpoints(tmp_path), checkpointed(1)
    checkpointed_run(given, store)
    for index in range(1, 3):
        given = checkpointed(index + 1)
        found = store.latest()[0]
        assert found is not None
        keeping = CheckpointPolicy(store, resume_point(found, given), lost_s=7.0)
        result, _ = TrainingLoop(given, on_virtual_clock(given), Silent(), lambda point: None, keeping).run()
        assert result.metrics["lost_time_s"] == 7.0 * index
    assert result.metrics["total_time_s"] > 14


def test_a_requested_stop_writes_a_checkpoint_to_the_given_place(tmp_path: Path) -> None:
    """The recipe wants no checkpoints: a place is asked for once, when the run is stopped."""
    given, stop, asked = prepared(recipe(max_epochs=5)), StopRequest(), []

    class Stopping(Silent):
        def evaluation(self, point: Point, epoch: float) -> None:
            stop.reason = "interrupted"

    def place() -> Checkpoints:
        asked.append(1)
        return Checkpoints(tmp_path)

    result, _ = TrainingLoop(
        given, on_virtual_clock(given, stop), Stopping(), lambda point: None, CheckpointPolicy(late=place)
    ).run()
    assert (result.outcome, result.sentence, asked) == (INTERRUPTED, "interrupted after 46 samples", [1])
    found = Checkpoints(tmp_path).latest()[0]
    assert found is not None
    assert resume_point(found, given).progress.samples == 46


def test_a_run_of_best_checkpoints_writes_another_once_the_last_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With checkpoints of the best evaluation only, a kill cost days."""
    now = [0.0]
    monkeypatch.setattr("pipebench.train.loop.time.monotonic", lambda: now[0])
    given = prepared(recipe(max_epochs=8), lr=0.0)  # no evaluation is better than the first
    store = Checkpoints(tmp_path, keep=99)

    class Slow(Silent):
        def evaluation(self, point: Point, epoch: float) -> None:
            now[0] += 250.0

    policy = CheckpointPolicy(late=lambda: store, keeps=True)
    TrainingLoop(given, on_virtual_clock(given), Slow(), lambda point: None, policy).run()
    assert store.steps() == [12 * epoch for epoch in (1, 4, 7, 8)]


def test_a_run_without_an_interval_has_checkpoints_of_its_best_evaluation_and_its_end(tmp_path: Path) -> None:
    given = prepared(recipe(max_epochs=4))
    store = Checkpoints(tmp_path, keep=1)
    policy = CheckpointPolicy(late=lambda: store, keeps=True)
    loop = TrainingLoop(given, on_virtual_clock(given, StopRequest()), Silent(), lambda point: None, policy)
    result, _ = loop.run()
    metric = next(iter(given.setup.dataset.metrics))
    best = min if given.setup.dataset.metrics[metric] == "min" else max
    values = [point.metrics[metric] for point in result.points]
    per_epoch = given.setup.sampler.minibatches_per_epoch
    steps = {(values.index(best(values)) + 1) * per_epoch, 4 * per_epoch}  # the best may be the last
    assert {*store.steps()} == steps
    assert "checkpoint_time_s" not in result.metrics
    store.remove()
    assert not store.steps()
