"""Training to a target: segments between drains, evaluations, and the answer in numbers.

The clock follows MLPerf's habits: it starts after initialisation and profiling, never pauses, and includes
evaluation; the time without evaluation is given too. A run that misses its target has no time to accuracy.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pipebench.engine.virtual import VirtualEngine
from pipebench.meter import Meter, fractions, sum_by
from pipebench.network import Network
from pipebench.prepare import Prepared
from pipebench.recipe.schema import PeriodRecipe
from pipebench.result import COMPLETED, DIVERGED, INTERRUPTED, MISSED, REACHED, Point, RunResult
from pipebench.timeline import ACTIVATION, ALL_REDUCE, BUFFERS, EVALUATION, GRADIENT, Timeline

_LOG = logging.getLogger("pipebench.training")
_CUDA_LOSS_EVERY = 50  # reading a loss waits for the GPU: look at it only so often


class Progress(Protocol):
    """What a run tells while it goes on."""

    def update(self, samples: int, clock_s: float, loss: float, occupancy: float) -> None:
        """Tell of one minibatch; called often."""

    def evaluation(self, point: Point, epoch: float) -> None:
        """Tell of one evaluation."""


class _DivergedError(Exception):
    """A loss is not finite."""


@dataclass
class _Run:
    """The state of a training run."""

    prepared: Prepared
    progress: Progress
    on_point: Callable[[Point], None]
    points: list[Point]
    samples: int = 0
    seen: int = 0
    loss_sum: float | torch.Tensor = 0.0  # a tensor as long as it stays on the GPU
    weight: float = 0.0
    training_s: float = 0.0
    evaluation_s: float = 0.0
    reached: Point | None = None
    reached_training_s: float = 0.0


def train_to_target(
    prepared: Prepared, progress: Progress, on_point: Callable[[Point], None]
) -> tuple[RunResult, Timeline]:
    """Train a prepared recipe until its target, its last epoch, divergence or Ctrl-C.

    Args:
        prepared: the recipe, ready to run.
        progress: told of every minibatch and evaluation.
        on_point: takes every point of the curves as soon as it is known.

    Returns:
        The result and the recorded part of the timeline.
    """
    meter = Meter(prepared.setup.pipeline)
    run = _Run(prepared, progress, on_point, [])
    started = time.perf_counter()
    engine = VirtualEngine(
        prepared.setup,
        Network(prepared.cluster, meter.transfer),
        meter.event,
        lambda loss, samples, weight, clock_s: _take_loss(run, meter, loss, samples, weight, clock_s),
    )
    try:
        outcome, sentence = _segments(run, engine, meter)
    except _DivergedError as diverged:
        outcome, sentence = DIVERGED, str(diverged)
    except KeyboardInterrupt:
        outcome, sentence = INTERRUPTED, f"interrupted after {run.seen:,} samples"
    if run.seen > run.samples:  # ended between two drains
        run.training_s += engine.now_s - engine.clock_s
        run.samples = run.seen
    metrics = _metrics(run, engine, meter) | {"wall_time_s": time.perf_counter() - started}
    result = RunResult(
        **describe(prepared), outcome=outcome, sentence=sentence, metrics=metrics, points=tuple(run.points),
        stages=_stages(prepared, engine),
    )  # fmt: skip
    return result, meter.timeline()


def describe(prepared: Prepared) -> dict[str, Any]:
    """Return the part of a result that is known before the run."""
    recipe = prepared.recipe
    return {
        "name": recipe.name,
        "mode": recipe.parallelism.mode,
        "plan": str(prepared.setup.plan),
        "engine": recipe.engine.kind,
        "clock": "virtual",
        "timing": prepared.profile.note,
        "seed": recipe.train.seed,
    }


def _segments(run: _Run, engine: VirtualEngine, meter: Meter) -> tuple[str, str]:
    recipe, sampler = run.prepared.recipe, run.prepared.setup.sampler
    target = recipe.train.target
    total = recipe.train.max_epochs * sampler.minibatches_per_epoch
    period = _period(recipe.train.evaluate_every, sampler.minibatches_per_epoch)
    done = 0
    while done < total and run.reached is None:
        count = min(period, total - done)
        before_s = engine.clock_s
        engine.train(done, count)
        done += count
        run.samples = run.seen = sampler.samples_before(done)
        run.training_s += engine.clock_s - before_s
        before_s, meter.evaluating = engine.clock_s, True
        scores = engine.evaluate()
        meter.evaluating = False
        run.evaluation_s += engine.clock_s - before_s
        _take_point(run, engine.clock_s, scores)
    if target is None:
        return COMPLETED, f"trained {recipe.train.max_epochs} epochs; no target was set"
    goal = f"{target.metric} {target.value:g}"
    if run.reached is not None:
        value = run.reached.metrics[target.metric]
        epochs = run.reached.samples / sampler.num_samples
        return REACHED, f"reached {goal} ({target.metric} {value:.4g}) after {epochs:g} epochs"
    best = _best(run, target.metric)
    return MISSED, f"missed {goal}: the best in {recipe.train.max_epochs} epochs was {target.metric} {best:.4g}"


def _period(every: PeriodRecipe, minibatches_per_epoch: int) -> int:
    return every.minibatches or (every.epochs or 1) * minibatches_per_epoch


def _take_loss(run: _Run, meter: Meter, loss: torch.Tensor, samples: int, weight: float, clock_s: float) -> None:
    """Add up a unit's loss; end the run if it is not finite."""
    run.seen += samples
    run.weight += weight
    run.loss_sum = run.loss_sum + loss
    if loss.is_cuda and run.seen // samples % _CUDA_LOSS_EVERY:
        return
    run.loss_sum = float(run.loss_sum)
    if not math.isfinite(run.loss_sum):
        epoch = run.seen / run.prepared.setup.sampler.num_samples
        raise _DivergedError(
            f"diverged: the training loss is {float(loss):g} after {run.seen:,} samples (epoch {epoch:.2f}); "
            f"lower train.optimizer.lr ({run.prepared.recipe.train.optimizer.lr:g}) or set schedule.warmup_epochs"
        )
    workers = run.prepared.setup.pipeline.num_workers
    elapsed_s = clock_s - run.evaluation_s
    occupancy = min(1.0, meter.busy_s / (workers * elapsed_s)) if elapsed_s > 0 else 0.0
    run.progress.update(run.seen, clock_s, float(loss) / weight, occupancy)


def _take_point(run: _Run, clock_s: float, scores: Mapping[str, float]) -> None:
    metrics = {"train_loss": float(run.loss_sum) / run.weight, **scores}
    run.loss_sum = run.weight = 0.0
    point = Point(run.samples, clock_s, metrics)
    run.points.append(point)
    run.on_point(point)
    run.progress.evaluation(point, run.samples / run.prepared.setup.sampler.num_samples)
    _LOG.info("t=%.6g s: %s", clock_s, ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()))
    target = run.prepared.recipe.train.target
    if target is not None and run.reached is None:
        value, best = scores[target.metric], run.prepared.setup.dataset.metrics[target.metric]
        if value >= target.value if best == "max" else value <= target.value:
            run.reached, run.reached_training_s = point, run.training_s


def _best(run: _Run, metric: str) -> float:
    values = [point.metrics[metric] for point in run.points]
    return max(values) if run.prepared.setup.dataset.metrics[metric] == "max" else min(values)


def _metrics(run: _Run, engine: VirtualEngine, meter: Meter) -> dict[str, float]:
    setup = run.prepared.setup
    training_s, samples = run.training_s, run.samples
    metrics: dict[str, float] = {
        "total_time_s": max(engine.clock_s, engine.now_s),
        "evaluation_time_s": run.evaluation_s,
        "weight_versions_max": max(replica.weights.most_alive for replica in engine.replicas),
        "peak_memory_bytes_max": max(engine.peak_bytes),
        "samples_per_update": setup.pipeline.round_size(0) * setup.sampler.minibatch_size,
        **byte_metrics(engine.num_bytes, samples),
    }
    if samples > 0 and training_s > 0:
        metrics["throughput_samples_per_s"] = samples / training_s
        metrics["epoch_time_s"] = training_s * setup.sampler.num_samples / samples
        metrics |= fractions(meter.busy_s, meter.stall_s, setup.pipeline.num_workers, training_s)
    if run.reached is not None:
        metrics["time_to_accuracy_s"] = run.reached.clock_s
        metrics["time_to_accuracy_without_evaluation_s"] = run.reached_training_s
        metrics["epochs_to_target"] = run.reached.samples / setup.sampler.num_samples
    for name in setup.dataset.metrics:
        if run.points:
            metrics[f"final_{name}"] = run.points[-1].metrics[name]
            metrics[f"best_{name}"] = _best(run, name)
    return metrics


def byte_metrics(num_bytes: Mapping[tuple[str, str], int], samples: int) -> dict[str, float]:
    """Return communication metrics from bytes by (kind, level).

    The total is activations, gradients and all-reduces; buffers and evaluation are given apart.
    """
    counts = dict(num_bytes)
    training = (ACTIVATION, GRADIENT, ALL_REDUCE)
    kinds = sum_by(counts, 0, (*training, BUFFERS, EVALUATION))
    levels = sum_by(counts, 1, training)
    total = sum(kinds.get(kind, 0) for kind in training)
    metrics: dict[str, float] = {"comm_bytes_total": total}
    metrics |= {f"comm_bytes_{kind.replace('-', '_')}": value for kind, value in kinds.items()}
    metrics |= {f"comm_bytes_level_{level}": value for level, value in levels.items()}
    if samples > 0:
        metrics["comm_bytes_per_sample"] = total / samples
        for kind in training:
            if kind in kinds:
                metrics[f"comm_bytes_per_sample_{kind.replace('-', '_')}"] = kinds[kind] / samples
    return metrics


def describe_stages(prepared: Prepared) -> list[dict[str, Any]]:
    """Return what is known of every stage before the run."""
    setup = prepared.setup
    travels = max(setup.costs.stages[0].forward_s)
    names = [layer.name for layer in setup.graph.layers]
    return [
        {
            "index": index,
            "replicas": stage.replicas,
            "first_layer": names[stage.start],
            "last_layer": names[stage.stop - 1],
            "num_layers": stage.stop - stage.start,
            "depth": setup.pipeline.warmups[index],
            "forward_s": costs.forward_s[travels],
            "backward_s": costs.backward_s[travels],
            "update_s": costs.update_s,
            "samples_per_update": setup.pipeline.round_size(index) * setup.sampler.minibatch_size,
            "parameter_bytes": sum(bucket.num_bytes for bucket in costs.buckets),
        }
        for index, (stage, costs) in enumerate(zip(setup.plan.stages, setup.costs.stages, strict=True))
    ]


def _stages(prepared: Prepared, engine: VirtualEngine) -> tuple[dict[str, Any], ...]:
    rows = describe_stages(prepared)
    for (stage, _), replica, peak in zip(
        prepared.setup.pipeline.places, engine.replicas, engine.peak_bytes, strict=True
    ):
        row = rows[stage]
        row["weight_versions_max"] = max(row.get("weight_versions_max", 0), replica.weights.most_alive)
        row["peak_memory_bytes"] = max(row.get("peak_memory_bytes", 0), peak)
    return tuple(rows)
