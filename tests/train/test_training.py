"""Training to a target: outcomes, the clock, short last minibatches, learning rates."""

import math
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from pipebench.cluster import Cluster
from pipebench.engine.engine import TrainingEngine
from pipebench.recipe.schema import (
    ClusterRecipe,
    OptimizerRecipe,
    ParallelismRecipe,
    PeriodRecipe,
    Recipe,
    TargetRecipe,
    TrainRecipe,
)
from pipebench.simulate.timeline import Timeline
from pipebench.train.curves import Curves
from pipebench.train.engines import on_virtual_clock
from pipebench.train.job import Job
from pipebench.train.loop import TrainingLoop
from pipebench.train.profiled_model import initial_model
from pipebench.train.request import travelling_sizes
from pipebench.train.result import COMPLETED, DIVERGED, INTERRUPTED, MISSED, REACHED, Point, RunResult
from pipebench.train.simulated import simulate_epoch
from pipebench.typed_json import read, write
from tests.support import Blobs, Mlp, flat_cluster, make_setup


class Silent:
    """Progress that prints nothing, and may interrupt."""

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


@pytest.mark.parametrize(
    ("evaluate_every", "mean"),
    [
        (PeriodRecipe(epochs=1), None),  # 4 and 4 minibatches
        (PeriodRecipe(minibatches=4), None),
        (PeriodRecipe(minibatches=2), 8),
        (PeriodRecipe(minibatches=5), 11),  # 4 and 1, 3
    ],
)
def test_a_run_that_drains_within_its_updates_says_how_many_samples_they_have(
    evaluate_every: PeriodRecipe, mean: int | None
) -> None:
    """Four replicas would take four minibatches of four samples per update, of eight in an epoch."""
    given = recipe(max_epochs=1)
    given = replace(given, train=replace(given.train, evaluate_every=evaluate_every))
    result, _, _ = train(prepared(given, plan=([], [4]), num_train=32))
    assert result.metrics["samples_per_update"] == 16
    why = "an update takes 4 minibatches, and drains before evaluations and checkpoints cut it short"
    said = [] if mean is None else [f"updates have {mean} samples on average: {why}"]
    assert [note for note in result.notes.values() if "updates have" in note] == said


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_a_run_whose_stages_clip_alone_says_so(clip_norm: float | None) -> None:
    given = prepared(recipe(max_epochs=1))
    result, _, _ = train(replace(given, setup=replace(given.setup, clip_norm=clip_norm)))
    said = "gradients are clipped by each stage's own norm, not by the global one"
    assert [note for note in result.notes.values() if said in note] == [said] * (clip_norm is not None)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_not_finite_is_reported_with_its_epoch_and_a_finite_best(
    value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An infinite one was the best, and reached every target."""
    scores = iter([0.5, value, value])
    evaluate = TrainingEngine.evaluate
    monkeypatch.setattr(TrainingEngine, "evaluate", lambda engine: evaluate(engine) | {"top1": next(scores)})
    result, _, _ = train(prepared(recipe()))
    since = "top1 is not a finite number from the evaluation after 2 epochs on"
    assert result.sentence == f"missed top1 2: the best in 3 epochs was top1 0.5; {since}"
    assert result.metrics["best_top1"] == 0.5


def test_an_evaluation_without_a_loss_neither_reaches_a_target_nor_is_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest of outputs that are all NaN is the first, so 0.2.0 scored the share of the first class."""
    scores = iter([(1.0, 0.5), (math.nan, 0.9), (math.nan, 0.9)])
    values = ({"eval_loss": loss, "top1": top1} for loss, top1 in scores)
    monkeypatch.setattr(TrainingEngine, "evaluate", lambda engine: next(values))
    result, _, _ = train(prepared(recipe(target=TargetRecipe("top1", 0.9))))
    since = "eval_loss is not a finite number from the evaluation after 2 epochs on; without a loss no score counts"
    assert result.sentence == f"missed top1 0.9: the best in 3 epochs was top1 0.5; {since}"
    assert result.metrics["best_top1"] == 0.5


def test_a_best_value_that_was_nearly_the_target_is_given_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = TrainingEngine.evaluate
    monkeypatch.setattr(TrainingEngine, "evaluate", lambda engine: evaluate(engine) | {"top1": 0.94996})
    result, _, _ = train(prepared(recipe(target=TargetRecipe("top1", 0.95), max_epochs=1)))
    assert result.sentence == "missed top1 0.95: the best in 1 epoch was top1 0.94996"


def test_a_point_without_a_number_is_not_the_best() -> None:
    curves = Curves(TargetRecipe("top1", 2.0), {"top1": "max"})
    for samples, top1 in enumerate((math.nan, 0.25, 0.5, 0.25)):
        curves.add(Point(samples, 0.0, {"top1": top1}), 0.0, 0.0)
    assert curves.best_point == curves.points[2]
    assert not [*curves.metrics_without_value()], "the last evaluation gave a number"


def test_scores_beside_an_infinite_loss_count() -> None:
    curves = Curves(TargetRecipe("top1", 0.5), {"top1": "max"})
    curves.add(Point(1, 0.0, {"eval_loss": math.inf, "top1": 0.5}), 0.0, 0.0)
    assert curves.reached == curves.points[0]
    assert not [*curves.metrics_without_value()]


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


def test_a_process_counts_as_if_all_replicas_were_as_far() -> None:
    """0.2.0 named the samples of one replica since the last drain."""
    given = prepared(recipe(), plan=([], [2]))
    given = replace(given, recipe=replace(given.recipe, engine=replace(given.recipe.engine, kind="distributed")))
    cast(Blobs, given.setup.dataset)._x.fill_(math.nan)
    result, _, _ = train(given)
    assert "nan after 8 samples (epoch 0.17); that is the first minibatch, before any update" in result.sentence


def test_ctrl_c_keeps_the_finished_epochs() -> None:
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


def test_the_training_loss_weighs_a_short_minibatch_by_its_samples() -> None:
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


def test_every_unit_size_is_profiled() -> None:
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


def test_transfers_and_bytes_are_reported_by_level() -> None:
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
