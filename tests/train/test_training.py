"""Training to a target: outcomes, the clock, short last minibatches, learning rates."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from pipebench.checkpoint.progress import SavedProgress
from pipebench.checkpoint.store import Checkpoint, CheckpointFile, Checkpoints
from pipebench.cluster import Cluster
from pipebench.engine.admission import StopRequest
from pipebench.engine.engine import TrainingEngine
from pipebench.recipe.schema import (
    ClusterRecipe,
    OptimizerRecipe,
    ParallelismRecipe,
    PeriodRecipe,
    Recipe,
    ScheduleRecipe,
    TargetRecipe,
    TrainRecipe,
)
from pipebench.schedule.pipeline import Pipeline, chain
from pipebench.simulate.timeline import Timeline
from pipebench.train.checkpointing import CheckpointPolicy, resume_point
from pipebench.train.curves import Curves
from pipebench.train.engines import on_virtual_clock
from pipebench.train.job import Job
from pipebench.train.learning_rate import learning_rate
from pipebench.train.loop import TrainingLoop
from pipebench.train.profiled_model import initial_model
from pipebench.train.request import travelling_sizes
from pipebench.train.result import COMPLETED, DIVERGED, INTERRUPTED, MISSED, REACHED, Point, RunResult
from pipebench.train.simulated import simulate_epoch
from pipebench.typed_json import read, write
from tests.support import Blobs, Mlp, flat_cluster, make_setup


class Silent:
    """Progress nobody sees; may interrupt."""

    def __init__(self, interrupt_after: int = 10**9) -> None:
        self.updates: list[tuple[int, float, float, float]] = []
        self._interrupt_after = interrupt_after

    def update(self, samples: int, clock_s: float, loss: float, occupancy: float) -> None:
        self.updates.append((samples, clock_s, loss, occupancy))
        if len(self.updates) >= self._interrupt_after:
            raise KeyboardInterrupt

    def evaluation(self, point: Point, epoch: float) -> None:
        """Nothing to do."""

    def note(self, text: str) -> None:
        """Nothing to do."""


def recipe(**train: Any) -> Recipe:
    defaults: dict[str, Any] = {
        "minibatch_size": 4,
        "max_epochs": 3,
        "optimizer": OptimizerRecipe(lr=0.1),
        "target": TargetRecipe("top1", 2.0),
    }
    return Recipe(
        name="test",
        model={"name": "mlp"},
        dataset={"name": "blobs"},
        train=TrainRecipe(**defaults | train),
        cluster=ClusterRecipe("flat"),
        parallelism=ParallelismRecipe(mode="pipedream"),
    )


def prepared(given: Recipe, lr: float = 0.1, plan: Any = ([4], [2, 1]), num_train: int = 46) -> Job:
    setup = make_setup(Mlp(), plan, dataset=Blobs(num_train=num_train), lr=lambda stage, before, own: lr)
    return Job(given, flat_cluster(4), setup)


def train(given: Job, progress: Silent | None = None) -> tuple[RunResult, Timeline, list[Point]]:
    points: list[Point] = []
    result, timeline = TrainingLoop(given, on_virtual_clock(given), progress or Silent(), points.append).run()
    return result, timeline, points


def test_a_missed_target_says_so_and_has_no_time() -> None:
    result, _, points = train(prepared(recipe()))
    assert result.outcome == MISSED
    assert result.exit_code == 1
    assert "missed top1 2: the best in 3 epochs was top1" in result.sentence
    assert "time_to_accuracy_s" not in result.metrics
    assert [point.samples for point in points] == [46, 92, 138]
    assert result.points == tuple(points)


@pytest.mark.parametrize(
    ("num_train", "said"), [(16, []), (15, ["an epoch has 15 samples, fewer than an update takes"])]
)
def test_a_run_whose_update_is_more_than_an_epoch_says_so(num_train: int, said: list[str]) -> None:
    """Four replicas take four minibatches of four samples per update."""
    result, _, _ = train(prepared(recipe(max_epochs=1), plan=([], [4]), num_train=num_train))
    assert result.metrics["samples_per_update"] == 16
    assert [note for note in result.notes.values() if "an epoch has" in note] == said


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_a_run_whose_stages_clip_alone_says_so(clip_norm: float | None) -> None:
    given = prepared(recipe(max_epochs=1))
    result, _, _ = train(replace(given, setup=replace(given.setup, clip_norm=clip_norm)))
    said = "gradients are clipped by each stage's own norm, not by the global one"
    assert [note for note in result.notes.values() if said in note] == [said] * (clip_norm is not None)


def test_a_metric_that_turns_nan_says_since_when_and_its_best_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([0.5, math.nan, math.nan])
    evaluate = TrainingEngine.evaluate
    monkeypatch.setattr(TrainingEngine, "evaluate", lambda engine: evaluate(engine) | {"top1": next(scores)})
    result, _, _ = train(prepared(recipe()))
    since = "top1 is not a number from the evaluation after 2 epochs on"
    assert result.sentence == f"missed top1 2: the best in 3 epochs was top1 0.5; {since}"
    assert result.metrics["best_top1"] == 0.5


def test_a_point_without_a_number_is_not_the_best() -> None:
    curves = Curves(TargetRecipe("top1", 2.0), {"top1": "max"})
    for samples, top1 in enumerate((math.nan, 0.25, 0.5, 0.25)):
        curves.add(Point(samples, 0.0, {"top1": top1}), 0.0, 0.0)
    assert curves.best_point == curves.points[2]
    assert not [*curves.no_numbers()], "the last evaluation gave a number"


def test_a_reached_target_stops_the_run_with_its_time() -> None:
    result, _, points = train(prepared(recipe(target=TargetRecipe("top1", 0.0))))
    assert (result.outcome, result.exit_code, len(points)) == (REACHED, 0, 1)
    metrics = result.metrics
    assert metrics["time_to_accuracy_s"] == points[0].clock_s == metrics["total_time_s"]
    assert metrics["epochs_to_target"] == 1
    evaluation_s = metrics["evaluation_time_s"]
    assert metrics["time_to_accuracy_without_evaluation_s"] == pytest.approx(points[0].clock_s - evaluation_s)
    assert evaluation_s > 0
    assert metrics["time_to_accuracy_checkpoint_s"] == 0.0
    assert metrics["training_time_s"] + evaluation_s == pytest.approx(metrics["total_time_s"])
    assert metrics["start_time_s"] > 0
    assert metrics["throughput_samples_per_s"] == pytest.approx(46 / (points[0].clock_s - evaluation_s))


def test_checkpoints_that_take_no_time_leave_none_to_the_target() -> None:
    """0.2.0 took the other parts from the whole, which left 7e-15 s."""
    every, plan = PeriodRecipe(minibatches=2), ([2, 4, 6], [1, 1, 1, 1])
    _, _, points = train(prepared(recipe(evaluate_every=every), plan=plan))
    best = TargetRecipe("top1", max(point.metrics["top1"] for point in points))
    result, _, points = train(prepared(recipe(target=best, evaluate_every=every), plan=plan))
    assert len(points) == 2
    assert result.metrics["time_to_accuracy_checkpoint_s"] == 0.0


def test_without_a_target_it_trains_every_epoch() -> None:
    result, _, points = train(prepared(recipe(target=None)))
    assert (result.outcome, result.exit_code, len(points)) == (COMPLETED, 0, 3)


@pytest.mark.parametrize("plan", [([], [1]), ([4], [2, 1]), ([2, 4, 6], [1, 1, 1, 1])], ids=str)
def test_divergence_is_a_result(plan: Any) -> None:
    result, _, _ = train(prepared(recipe(optimizer=OptimizerRecipe(lr=1e308)), lr=1e308, plan=plan))
    assert (result.outcome, result.exit_code) == (DIVERGED, 1)
    assert result.sentence.startswith("diverged: the training loss is ")
    assert "lower train.optimizer.lr (1e+308) or set train.schedule.warmup_epochs" in result.sentence
    assert result.metrics["total_time_s"] > 0


def test_a_loss_that_is_nan_before_any_update_is_no_fault_of_the_rate() -> None:
    given = prepared(recipe())
    cast(Blobs, given.setup.dataset)._x.fill_(math.nan)
    result, _, _ = train(given)
    assert result.outcome == DIVERGED
    assert "nan after 4 samples (epoch 0.09); that is the first minibatch, before any update" in result.sentence
    assert "lr" not in result.sentence


def test_ctrl_c_keeps_what_was_trained() -> None:
    result, timeline, points = train(prepared(recipe()), Silent(interrupt_after=15))
    assert (result.outcome, result.exit_code) == (INTERRUPTED, 130)
    assert len(points) == 1, "the first epoch was finished"
    assert "interrupted after" in result.sentence
    assert timeline.spans


def test_evaluation_periods_in_minibatches() -> None:
    _, _, points = train(prepared(recipe(evaluate_every=PeriodRecipe(minibatches=5), max_epochs=1)))
    assert [point.samples for point in points] == [20, 40, 46]


def test_the_clock_never_pauses_and_only_grows() -> None:
    progress = Silent()
    _, timeline, points = train(prepared(recipe()), progress)
    clocks = [clock_s for _, clock_s, _, _ in progress.updates]
    assert clocks == sorted(clocks)
    assert all(0 <= occupancy <= 1 for *_, occupancy in progress.updates)
    evaluations = [span for span in timeline.spans if span.kind == "evaluate"]
    assert max(span.end_s for span in evaluations) == pytest.approx(points[-1].clock_s)
    training = [span for span in timeline.spans if span.kind == "forward" and span.start_s < points[0].clock_s]
    first = min(span.start_s for span in evaluations)
    assert max(span.end_s for span in training) <= first, "the pipeline is drained before an evaluation"


def test_the_training_loss_weighs_a_short_minibatch_rightly() -> None:
    """With a rate of zero the loss of an epoch is the mean over all samples, whatever the minibatches."""
    result, _, points = train(prepared(recipe(max_epochs=1), lr=0.0))
    model, data = Mlp(), Blobs(num_train=46)
    fields = data.fetch("train", range(46), ["x", "label"])
    mean = torch.nn.functional.cross_entropy(model(fields["x"]), fields["label"]).item()
    assert points[0].metrics["train_loss"] == pytest.approx(mean, rel=1e-12)
    assert result.metrics["throughput_samples_per_s"] > 0


def test_a_simulated_run_has_throughput_and_no_accuracy() -> None:
    given = prepared(recipe())
    simulated, _ = simulate_epoch(given)
    trained, _, _ = train(prepared(recipe(max_epochs=1, target=None)))
    assert (simulated.outcome, simulated.points) == (COMPLETED, ())
    for name in ("epoch_time_s", "throughput_samples_per_s", "bubble_fraction", "comm_bytes_total"):
        assert simulated.metrics[name] == pytest.approx(trained.metrics[name], rel=1e-9), name


def test_results_round_trip_as_json() -> None:
    result, _, _ = train(prepared(recipe()))
    assert write(read(RunResult, write(result))) == write(result)


def rate_of(
    schedule: ScheduleRecipe, replicas: tuple[int, ...] = (1,), *, flushes: bool = False, **optimizer: Any
) -> Any:
    given = TrainRecipe(
        minibatch_size=10, max_epochs=10, schedule=schedule, optimizer=OptimizerRecipe(lr=1.0, **optimizer)
    )
    pipeline = Pipeline(replicas, chain(len(replicas)), "1f1b", flushes, 2)
    return learning_rate(given, pipeline, num_train=100)


def test_learning_rate_schedules() -> None:
    step = rate_of(ScheduleRecipe("step", every_epochs=3, factor=0.1))
    assert [step(0, before, 10) for before in (0, 299, 300, 599, 600)] == pytest.approx([1, 1, 0.1, 0.1, 0.01])
    cosine = rate_of(ScheduleRecipe("cosine", warmup_epochs=1))
    assert [cosine(0, before, 10) for before in (0, 10, 90, 100)] == pytest.approx([0.1, 0.2, 1.0, 1.0])
    assert cosine(0, 550, 10) == pytest.approx(0.5)
    assert 0 < cosine(0, 990, 10) < 0.001
    polynomial = rate_of(ScheduleRecipe("polynomial", power=2, warmup_epochs=1))
    assert [polynomial(0, before, 10) for before in (0, 90, 100, 500, 900)] == pytest.approx([0.1, 1, 0.81, 0.25, 0.01])
    assert rate_of(ScheduleRecipe())(0, 12345, 10) == 1.0


def test_rates_scale_with_the_samples_of_an_update() -> None:
    scaled = rate_of(ScheduleRecipe(), (3, 1, 2))
    assert [scaled(stage, 0, 10) for stage in range(3)] == pytest.approx([1, 1 / 3, 2 / 3])
    same = rate_of(ScheduleRecipe(), (3, 1, 2), lr_scaling="none")
    assert [same(stage, 0, 10) for stage in range(3)] == [1, 1, 1]
    flushing = rate_of(ScheduleRecipe(), (3, 1, 2), flushes=True)
    assert [flushing(stage, 0, 10) for stage in range(3)] == [1, 1, 1], "all stages average over the same minibatches"


@pytest.mark.parametrize(
    ("schedule", "annealing_epochs", "expected"),
    [
        (ScheduleRecipe(), 4.0, 4.0),
        (ScheduleRecipe(), None, 2.5),  # a quarter of ten epochs
        (ScheduleRecipe("step", every_epochs=4, factor=1.0), None, 1.0),  # of the time until the first drop
        (ScheduleRecipe(warmup_epochs=1), None, 5.0),  # five warm-ups
    ],
)
def test_pipemare_s_rates_grow_to_the_recipe_s(
    schedule: ScheduleRecipe, annealing_epochs: float | None, expected: float
) -> None:
    """Stage i of 4 has lr / tau_i^p, p = 1 - min(k / K, 1), tau_i = 3 - i, where that is more than 1."""
    given = TrainRecipe(minibatch_size=10, max_epochs=10, schedule=schedule, optimizer=OptimizerRecipe(lr=1.0))
    pipeline = Pipeline((1,) * 4, chain(4), "1f1b", False, 4, weights="correct")
    rate = learning_rate(given, pipeline, 100, annealing_epochs)
    plain = learning_rate(given, replace(pipeline, weights="stash"), 100, annealing_epochs)
    for before in (0, 50, 100, 200, 390, 500, 990):
        p = 1 - min(before / 100 / expected, 1)
        for stage, tau in enumerate((3, 2, 1, 1)):
            assert rate(stage, before, 10) == pytest.approx(plain(stage, before, 10) / tau**p)
    assert learning_rate(given, pipeline, 100, 0.0)(0, 0, 10) == plain(0, 0, 10)


def test_every_size_that_travels_is_profiled() -> None:
    given = replace(recipe(minibatch_size=32), parallelism=ParallelismRecipe(mode="gpipe", microbatches=5))
    data = Blobs(num_train=4000 + 3, num_eval=1000)
    assert travelling_sizes(given, data) == (1, 6, 7, 8, 32)  # 32 = 7+7+6+6+6, 3 = 1+1+1+0+0, evaluation 32 and 8


def test_initial_weights_depend_on_the_seed_alone() -> None:
    given = recipe()
    vgg = {"name": "vgg16", "width": 0.05, "num_classes": 10, "in_channels": 1, "image_size": 32}
    one, same, other = (
        initial_model(replace(given, model=vgg, train=replace(given.train, seed=seed))) for seed in (1, 1, 2)
    )
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(next(one.parameters()), next(other.parameters()))


def test_a_flat_cluster_is_not_the_whole_story() -> None:
    """A transfer knows the level it crosses; bytes are reported by level."""
    given = prepared(recipe(max_epochs=1, target=None))
    level = given.cluster.levels[0]
    cluster = Cluster("two", "unit", None, (replace(level, count=2), replace(level, name="cluster", count=2)))
    result, _, _ = train(replace(given, cluster=cluster, setup=replace(given.setup, cluster=cluster)))
    metrics = result.metrics
    assert metrics["comm_bytes_level_server"] > 0
    assert metrics["comm_bytes_level_cluster"] > 0
    assert metrics["comm_bytes_level_server"] + metrics["comm_bytes_level_cluster"] == metrics["comm_bytes_total"]
    assert math.isclose(metrics["comm_bytes_per_sample"] * 46, metrics["comm_bytes_total"])


def kept(
    given: Job,
    checkpoints: Checkpoints,
    found: Checkpoint | None = None,
    on_point: Callable[[Point], None] = lambda point: None,
) -> tuple[RunResult, Any]:
    """Train with checkpoints; return the result and the engine."""
    engines: list[Any] = []

    def make(*told: Any) -> Any:
        engines.append(on_virtual_clock(given)(*told))
        return engines[-1]

    goes_on = None if found is None else resume_point(found, given)
    result, _ = TrainingLoop(given, make, Silent(), on_point, CheckpointPolicy(checkpoints, goes_on)).run()
    return result, engines[0]


def checkpointed(max_epochs: int = 3) -> Job:
    """A run that drains for checkpoints twice per epoch of 12 minibatches."""
    every = PeriodRecipe(minibatches=5)
    return prepared(recipe(max_epochs=max_epochs, checkpoint_every=every), plan=([4], [2, 1]))


@pytest.mark.parametrize("step", [5, 12, 15, 30])
def test_a_run_that_goes_on_ends_like_one_that_never_stopped(tmp_path: Path, step: int) -> None:
    whole, engine = kept(checkpointed(), Checkpoints(tmp_path / "whole", keep=99))
    assert Checkpoints(tmp_path / "whole").steps() == [5, 10, 12, 15, 20, 25, 30, 35, 36]  # 12 is best
    found = Checkpoints(tmp_path / "whole").at(step)
    told: list[Point] = []
    resumed, again = kept(checkpointed(), Checkpoints(tmp_path / "again"), found, told.append)
    for mine, theirs in zip(again.replicas, engine.replicas, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine.tensors().values(), theirs.tensors().values(), strict=True))
    # All are told of, also those before the checkpoint: whoever queued them may have died before they were recorded.
    assert resumed.points == whole.points == tuple(told)
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


def test_what_a_checkpoint_has_of_the_curves_costs_training_little(tmp_path: Path) -> None:
    """Copying every number of 18,000 points took half a second, and their text of twice the length two seconds more."""
    store = Checkpoints(tmp_path, keep=99)
    kept(checkpointed(), store)
    checkpoint = store.at(36)
    saved = SavedProgress.from_json(checkpoint.progress)
    data = saved.to_json()
    assert data["points"] == saved.points
    assert data["points"] is not saved.points
    assert data["points"][0] is saved.points[0]
    assert "\n" not in (checkpoint.path / "manifest.json").read_text()


def test_checkpoints_may_be_rarer_than_evaluations(tmp_path: Path) -> None:
    """Every evaluation wrote one, whatever the recipe asked for."""
    store = Checkpoints(tmp_path / "whole", keep=99)
    whole, engine = kept(rarely_saved(), store)
    values = [point.metrics["top1"] for point in whole.points]
    best = {4 * (index + 1) for index, value in enumerate(values) if value > max(values[:index], default=-1.0)}
    assert len(values) == 9
    assert {*store.steps()} == {12, 24, 36} | best
    assert len(store.steps()) < 9
    for step in store.steps():
        resumed, again = kept(rarely_saved(), Checkpoints(tmp_path / f"from {step}"), store.at(step))
        assert resumed.points == whole.points
        for mine, theirs in zip(again.replicas, engine.replicas, strict=True):
            pairs = zip(mine.tensors().values(), theirs.tensors().values(), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), step


def test_checkpoint_drains_are_part_of_the_recipe() -> None:
    """They are drains like any other: an evaluation there changes nothing, none there changes the weights."""
    drained, plain = checkpointed(), prepared(recipe())
    results = [train(given)[0].points[-1].metrics["train_loss"] for given in (drained, plain)]
    assert results[0] != results[1]


class Full(Checkpoints):
    """A disk that is full from some step on."""

    def write_part(self, step: int, part: str, state: Any) -> CheckpointFile:
        if step > 10:
            raise OSError(28, "No space left on device")
        return super().write_part(step, part, state)


class Noted(Silent):
    """Progress that keeps notes."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_a_full_disk_costs_checkpoints_but_not_the_run(tmp_path: Path) -> None:
    progress, given = Noted(), checkpointed()
    result, _ = TrainingLoop(
        given, on_virtual_clock(given), progress, lambda point: None, CheckpointPolicy(Full(tmp_path, keep=9))
    ).run()
    assert result.outcome == MISSED
    assert progress.notes[0].startswith("no checkpoint at minibatch 12: [Errno 28] No space left on device; the one")
    assert Checkpoints(tmp_path).latest()[0] is not None
    assert Checkpoints(tmp_path).steps() == [5, 10]


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
        lambda *told: cast("TrainingEngine", Stopped(on_virtual_clock(given)(*told), 8, reason)),
        Silent(),
        lambda point: None,
        CheckpointPolicy(Checkpoints(tmp_path)),
    ).run()
    assert result.outcome == outcome
    assert Checkpoints(tmp_path).steps() == steps
    assert result.sentence == ("interrupted after 32 samples" if outcome == INTERRUPTED else reason)


@pytest.mark.parametrize("step", [12, 36])
def test_a_run_stopped_right_before_an_evaluation_goes_on_with_it(tmp_path: Path, step: int) -> None:
    whole, _ = kept(checkpointed(), Checkpoints(tmp_path / "whole"))
    given, checkpoints = checkpointed(), Checkpoints(tmp_path / "stopped")
    TrainingLoop(
        given,
        lambda *told: cast("TrainingEngine", Stopped(on_virtual_clock(given)(*told), step, "interrupted")),
        Silent(),
        lambda point: None,
        CheckpointPolicy(checkpoints),
    ).run()
    found, _ = checkpoints.latest()
    assert found is not None
    assert (found.step, len(found.progress["points"])) == (step, step // 12 - 1)
    resumed, _ = kept(checkpointed(), Checkpoints(tmp_path / "again"), found)
    assert (resumed.points, resumed.sentence) == (whole.points, whole.sentence)


def test_totals_add_up_over_plans_and_rates_are_of_the_last(tmp_path: Path) -> None:
    """An epoch under one plan, one under another, one under the first again."""
    plans: list[Any] = [([4], [2, 1]), ([2, 4], [1, 1, 1]), ([4], [2, 1])]
    alone = [train(prepared(recipe(max_epochs=1, target=None), plan=plan))[0].metrics for plan in plans]
    store, result = Checkpoints(tmp_path), None
    for index, plan in enumerate(plans):
        given = prepared(recipe(max_epochs=index + 1, target=None), plan=plan)
        result, _ = kept(given, store, store.latest()[0])
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


def test_lost_time_adds_up(tmp_path: Path) -> None:
    store, given = Checkpoints(tmp_path), checkpointed(1)
    kept(given, store)
    for index in range(1, 3):
        given = checkpointed(index + 1)
        found = store.latest()[0]
        assert found is not None
        keeping = CheckpointPolicy(store, resume_point(found, given), lost_s=7.0)
        result, _ = TrainingLoop(given, on_virtual_clock(given), Silent(), lambda point: None, keeping).run()
        assert result.metrics["lost_time_s"] == 7.0 * index
    assert result.metrics["total_time_s"] > 14


def test_a_stop_that_was_asked_for_ends_with_a_checkpoint_where_it_is_to_go(tmp_path: Path) -> None:
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


def test_a_run_without_checkpoints_has_one_once_the_last_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one of the best evaluation only, a kill cost days."""
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


def test_a_run_without_checkpoints_keeps_those_of_its_best_evaluation_and_its_end(tmp_path: Path) -> None:
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
