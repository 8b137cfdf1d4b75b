"""Training to a target: segments between drains, evaluations, checkpoints, and the answer in numbers.

The clock follows MLPerf's habits: it starts after initialisation and profiling, never pauses, and includes
evaluation; the time without evaluation is given too. A run that misses its target has no time to accuracy.

In a distributed run every process goes through this loop alike: what decides its course is exchanged at every drain.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch

from pipebench.checkpoint.progress import CurvePoint, Facts
from pipebench.checkpoint.progress import Progress as Kept
from pipebench.checkpoint.state import CheckpointError, ModelState
from pipebench.checkpoint.store import Checkpoints, Part
from pipebench.engine.gate import StopRequest
from pipebench.engine.virtual import VirtualEngine
from pipebench.errors import DivergedError
from pipebench.recipe.schema import PeriodRecipe
from pipebench.simulate.meter import Measured, Meter
from pipebench.simulate.network import Network
from pipebench.simulate.timeline import Timeline
from pipebench.train.answer import byte_metrics, describe, stage_rows, together
from pipebench.train.prepare import Prepared
from pipebench.train.result import COMPLETED, DIVERGED, INTERRUPTED, MISSED, REACHED, Point, RunResult
from pipebench.train.resume import TakenUp, bytes_before, taken_by

_LOG = logging.getLogger("pipebench.train.loop")
_CUDA_LOSS_EVERY = 50  # reading a loss waits for the GPU: look at it only so often

OnLoss = Callable[[torch.Tensor, int, float, float], None]
OnUnit = Callable[[int, float, float], None]


class Engine(Protocol):
    """What trains: all workers in one process, or one of them."""

    clock_s: float  # at the last drain

    @property
    def now_s(self) -> float:
        """The clock, also between two drains."""

    @property
    def busy_fraction(self) -> float:
        """Share of the time in training that the workers of this process spent computing."""

    @property
    def stop_reason(self) -> str | None:
        """Why the run ends early, as far as this process knows."""

    @property
    def position(self) -> int:
        """This process's place in what `exchange` returns."""

    @property
    def is_first(self) -> bool:
        """Whether this process keeps the run's records."""

    def start_clock(self, clock_s: float = 0.0) -> None:
        """Let the run's clock start, or go on from `clock_s`."""

    def train(self, first_minibatch: int, num_minibatches: int) -> int:
        """Train, then drain; return how many minibatches were trained on."""

    def evaluate(self) -> dict[str, float]:
        """Return `eval_loss` and every metric of the dataset for the newest weights."""

    def exchange(self, value: Any) -> list[Any]:
        """Return what every process gives, in the order of workers; JSON."""

    def parts(self) -> Sequence[tuple[str, ModelState]]:
        """Return what this process contributes to a checkpoint, by name."""

    def restore(self, state: ModelState, facts: Mapping[str, Any] | None, clock_s: float) -> None:
        """Go on from a checkpoint; `facts` are this process's then, None under another plan."""

    def facts(self) -> dict[str, Any]:
        """Return what was counted here: `num_bytes`, and `peak_bytes` and `weight_versions_max` per worker; JSON."""

    def turn_to(self, work: str) -> None:
        """Name what this process does now, for those who wait for it."""

    def settle(self) -> None:
        """Let `clock_s` be the time now: what came since the drain belongs to neither training nor evaluation."""

    def measured(self, training_s: float) -> Measured:
        """Return what all workers measured; all processes call it."""


MakeEngine = Callable[[OnLoss, OnUnit], Engine]


class Progress(Protocol):
    """What a run tells while it goes on."""

    def update(self, samples: int, clock_s: float, loss: float, occupancy: float) -> None:
        """Tell of one minibatch; called often."""

    def evaluation(self, point: Point, epoch: float) -> None:
        """Tell of one evaluation."""

    def note(self, text: str) -> None:
        """Tell of anything else, in a line that stays."""


@dataclass(frozen=True)
class Keeping:
    """Where a run's checkpoints go, and the one it begins with.

    Attributes:
        checkpoints: the run's; None keeps none, but for one where the run is stopped.
        found: where to go on; None begins anew.
        lost_s: seconds by which the clock has run on since that checkpoint (or since the start, without one).
        when_stopped: where the checkpoint of a run goes that is stopped and keeps no others; asked for then.
    """

    checkpoints: Checkpoints | None = None
    found: TakenUp | None = None
    lost_s: float = 0.0
    when_stopped: Callable[[], Checkpoints | None] = lambda: None


@dataclass
class _Run:
    """The state of a training run."""

    prepared: Prepared
    progress: Progress
    on_point: Callable[[Point], None]
    keeping: Keeping
    points: list[Point] = field(default_factory=list)
    done: int = 0  # minibatches
    samples: int = 0
    seen: int = 0
    told: int = 0  # samples told to the progress
    own_loss: float | torch.Tensor = 0.0  # of this process since the drain; a tensor as long as it stays on the GPU
    own_weight: float = 0.0
    loss_sum: float = 0.0  # of all processes since the evaluation
    weight: float = 0.0
    training_s: float = 0.0
    evaluation_s: float = 0.0
    checkpoint_s: float = 0.0
    training_s_at: list[float] = field(default_factory=list)  # of every point
    looks: int = 0  # losses seen since one was read from a GPU
    lost_s: float = 0.0
    counted_from: tuple[int, float] = (0, 0.0)  # samples and training seconds before what the engine has counted
    bytes_before: Counter[tuple[str, str]] = field(default_factory=Counter)  # sent before that
    reached: Point | None = None
    reached_training_s: float = 0.0


class _StoppedError(Exception):
    """All processes have agreed to end here."""


def on_virtual_clock(prepared: Prepared, stop: StopRequest | None = None) -> MakeEngine:
    """Return what makes a virtual engine for a prepared recipe; `stop` may ask it to end early."""

    def make(on_loss: OnLoss, on_unit: OnUnit) -> VirtualEngine:
        meter = Meter(prepared.setup.pipeline)
        network = Network(prepared.setup.cluster, prepared.setup.devices, meter.transfer)
        return VirtualEngine(prepared.setup, network, on_loss=on_loss, on_unit=on_unit, meter=meter, stop=stop)

    return make


def train_to_target(
    prepared: Prepared,
    make_engine: MakeEngine,
    progress: Progress,
    on_point: Callable[[Point], None],
    keeping: Keeping = Keeping(),
) -> tuple[RunResult, Timeline]:
    """Train a prepared recipe until its target, its last epoch, divergence or Ctrl-C.

    Args:
        prepared: the recipe, ready to run.
        make_engine: makes the engine, which tells of every loss and of every unit that is done.
        progress: told of every minibatch and evaluation.
        on_point: takes every point of the curves as soon as it is known.
        keeping: checkpoints.

    Returns:
        The result and the recorded part of the timeline.

    Raises:
        CheckpointError: the checkpoint to go on from doesn't fit.
    """
    run = _Run(prepared, progress, on_point, keeping)
    engine = make_engine(
        lambda loss, samples, weight, clock_s: _take_loss(run, loss, samples, weight),
        lambda samples, loss, clock_s: _tell(run, engine, samples, loss, clock_s),
    )
    _go_on(run, engine)
    started = time.perf_counter()
    ended_s: float | None = None
    try:
        outcome, sentence = _segments(run, engine)
    except DivergedError as diverged:
        outcome, sentence, ended_s = DIVERGED, str(diverged), engine.now_s
    except _StoppedError as stopped:
        reason = str(stopped)
        outcome = DIVERGED if reason.startswith(DIVERGED) else INTERRUPTED
        sentence = reason if outcome == DIVERGED else f"{reason} after {run.samples:,} samples"
    except KeyboardInterrupt:
        outcome, sentence, ended_s = INTERRUPTED, f"interrupted after {run.seen:,} samples", engine.now_s
    total_s = engine.clock_s if ended_s is None else max(ended_s, engine.clock_s)
    if run.seen > run.samples:  # ended between two drains
        run.training_s += total_s - engine.clock_s
        run.samples = run.seen
    facts = together(engine.exchange(engine.facts()))
    measured = engine.measured(run.training_s - run.counted_from[1])
    metrics = _metrics(run, facts, measured)
    metrics |= {"total_time_s": total_s, "wall_time_s": time.perf_counter() - started}
    result = RunResult(
        **describe(prepared), outcome=outcome, sentence=sentence, metrics=metrics, points=tuple(run.points),
        stages=stage_rows(prepared, facts), workers=measured.workers, notes=measured.notes,
    )  # fmt: skip
    return result, measured.timeline


def _go_on(run: _Run, engine: Engine) -> None:
    """Start the clock, from the checkpoint on if there is one."""
    found, clock_s = run.keeping.found, run.keeping.lost_s
    run.lost_s = run.keeping.lost_s
    if found is not None:
        kept = found.progress
        clock_s += kept.clock_s
        goes_on_counting = kept.taken_by == taken_by(run.prepared)
        counted_from = kept.counted_from if goes_on_counting else (kept.samples, kept.training_s)
        run.counted_from = (int(counted_from[0]), float(counted_from[1]))
        run.bytes_before = bytes_before(kept, with_facts=not goes_on_counting)
        engine.restore(found.state, kept.facts[engine.position] if goes_on_counting else None, clock_s)
        run.done, run.samples = found.step, kept.samples
        run.seen = run.told = run.samples
        run.loss_sum, run.weight, run.lost_s = kept.loss_sum, kept.weight, run.lost_s + kept.lost_s
        run.training_s, run.evaluation_s, run.checkpoint_s = kept.training_s, kept.evaluation_s, kept.checkpoint_s
        for point, training_s in zip(kept.points, kept.training_s_at, strict=True):
            _note_point(run, Point(**point), training_s)
            # Again: the record may have died with the process that queued it. It takes no point twice.
            run.on_point(Point(**point))
    engine.start_clock(clock_s)


def _segments(run: _Run, engine: Engine) -> tuple[str, str]:
    train, sampler = run.prepared.recipe.train, run.prepared.setup.sampler
    total = train.max_epochs * sampler.minibatches_per_epoch
    evaluate_every = _period(train.evaluate_every, sampler.minibatches_per_epoch)
    save_every = _period(train.checkpoint_every or train.evaluate_every, sampler.minibatches_per_epoch)
    due = run.done > 0 and (run.done % evaluate_every == 0 or run.done >= total)
    if due and not any(point.samples == run.samples for point in run.points):
        # Stopped right before this evaluation, the run goes on with it.
        _evaluate(run, engine)
        _save(run, engine)
    while run.done < total and run.reached is None:
        until = min(total, *((run.done // period + 1) * period for period in (evaluate_every, save_every)))
        _train(run, engine, until - run.done)
        if run.done % evaluate_every == 0 or run.done == total:
            _evaluate(run, engine)
        _save(run, engine)
    target = train.target
    epochs = run.samples / sampler.num_samples
    if target is None:
        return COMPLETED, f"trained {epochs:g} epochs; no target was set"
    goal = f"{target.metric} {target.value:g}"
    if run.reached is not None:
        value = run.reached.metrics[target.metric]
        reached_after = run.reached.samples / sampler.num_samples
        return REACHED, f"reached {goal} ({target.metric} {value:.4g}) after {reached_after:g} epochs"
    best = _best(run, target.metric)
    return MISSED, f"missed {goal}: the best in {epochs:g} epochs was {target.metric} {best:.4g}"


def segment_length(prepared: Prepared) -> int:
    """Return how many minibatches there are from drain to drain, at most an epoch's."""
    train, per_epoch = prepared.recipe.train, prepared.setup.sampler.minibatches_per_epoch
    return min(
        per_epoch, *(_period(each, per_epoch) for each in (train.evaluate_every, train.checkpoint_every) if each)
    )


def _period(every: PeriodRecipe, minibatches_per_epoch: int) -> int:
    return every.minibatches or (every.epochs or 1) * minibatches_per_epoch


def _train(run: _Run, engine: Engine, num_minibatches: int) -> None:
    """Train on a segment and put together what the processes know; end where a stop was agreed on."""
    before_s = engine.clock_s
    run.done += engine.train(run.done, num_minibatches)
    run.samples = run.seen = run.told = run.prepared.setup.sampler.samples_before(run.done)
    run.training_s += engine.clock_s - before_s
    own = {"loss": float(run.own_loss), "weight": run.own_weight, "stop": engine.stop_reason}
    run.own_loss = run.own_weight = 0.0
    shares = engine.exchange(own)
    run.loss_sum += sum(share["loss"] for share in shares)
    run.weight += sum(share["weight"] for share in shares)
    reasons = [share["stop"] for share in shares if share["stop"]]
    if not math.isfinite(run.loss_sum):  # where a GPU computes, not every loss has been looked at
        reasons.append(_diverged(run, run.loss_sum))
    reason = next((each for each in reasons if each.startswith(DIVERGED)), next(iter(reasons), None))
    if reason is not None:
        if not reason.startswith(DIVERGED):
            _save(run, engine, run.keeping.when_stopped())
        raise _StoppedError(reason)


def _evaluate(run: _Run, engine: Engine) -> None:
    before_s = engine.clock_s
    scores = engine.evaluate()
    run.evaluation_s += engine.clock_s - before_s
    metrics = {"train_loss": run.loss_sum / run.weight, **scores}
    run.loss_sum = run.weight = 0.0
    point = Point(run.samples, engine.clock_s, metrics)
    _note_point(run, point, run.training_s)
    run.on_point(point)
    run.progress.evaluation(point, run.samples / run.prepared.setup.sampler.num_samples)
    _LOG.info("t=%.6g s: %s", point.clock_s, ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()))


def _note_point(run: _Run, point: Point, training_s: float) -> None:
    run.points.append(point)
    run.training_s_at.append(training_s)
    target = run.prepared.recipe.train.target
    if target is not None and run.reached is None:
        value, best = point.metrics[target.metric], run.prepared.setup.dataset.metrics[target.metric]
        if value >= target.value if best == "max" else value <= target.value:
            run.reached, run.reached_training_s = point, training_s


def _save(run: _Run, engine: Engine, otherwise: Checkpoints | None = None) -> None:
    """Write a checkpoint; where that fails, say so and train on: the one before stays.

    Args:
        run: the run; without a place for checkpoints it keeps none.
        engine: drained.
        otherwise: where to, in a run without such a place.
    """
    store = run.keeping.checkpoints or otherwise
    if store is None:
        return
    before_s, parts, problem = engine.clock_s, [], None
    engine.turn_to("checkpoint")
    try:
        parts = [asdict(store.write_part(run.done, name, state)) for name, state in engine.parts()]
    except (OSError, CheckpointError) as error:
        problem = str(error)
    shares = engine.exchange({"parts": parts, "problem": problem, "facts": engine.facts()})
    problem = next((share["problem"] for share in shares if share["problem"]), None)
    if engine.is_first:
        engine.turn_to("checkpoint")
        if problem is None:
            progress = _progress(run, engine.clock_s, [share["facts"] for share in shares])
            try:
                store.commit(run.done, [Part(**part) for share in shares for part in share["parts"]], progress)
            except OSError as error:
                problem = str(error)
        if problem is not None:
            store.abandon(run.done)
            text = f"no checkpoint at minibatch {run.done}: {problem}; the one before stays, training goes on"
            run.progress.note(text)
            _LOG.warning(text)
    engine.settle()
    run.checkpoint_s += engine.clock_s - before_s


def _progress(run: _Run, clock_s: float, facts: list[Facts]) -> dict[str, Any]:
    """Return what a checkpoint keeps of the training loop."""
    return Kept(
        taken_by=taken_by(run.prepared),
        facts=facts,
        samples=run.samples,
        epoch=run.samples / run.prepared.setup.sampler.num_samples,
        points=[CurvePoint(samples=p.samples, clock_s=p.clock_s, metrics=dict(p.metrics)) for p in run.points],
        training_s_at=run.training_s_at,
        counted_from=run.counted_from,
        loss_sum=run.loss_sum,
        weight=run.weight,
        training_s=run.training_s,
        evaluation_s=run.evaluation_s,
        checkpoint_s=run.checkpoint_s,
        clock_s=clock_s,
        saved_at_s=time.time(),
        lost_s=run.lost_s,
        bytes_before=tuple((kind, level, num_bytes) for (kind, level), num_bytes in run.bytes_before.items()),
    ).to_json()


def _take_loss(run: _Run, loss: torch.Tensor, samples: int, weight: float) -> None:
    """Add up a unit's loss; end the run if it is not finite."""
    run.seen += samples
    run.own_weight += weight
    run.own_loss = run.own_loss + loss
    run.looks += 1
    if loss.is_cuda and run.looks % _CUDA_LOSS_EVERY:
        return
    run.own_loss = float(run.own_loss)
    if not math.isfinite(run.own_loss):
        raise DivergedError(_diverged(run, float(loss)))


def _diverged(run: _Run, loss: float) -> str:
    epoch = run.seen / run.prepared.setup.sampler.num_samples
    return (
        f"diverged: the training loss is {loss:g} after {run.seen:,} samples (epoch {epoch:.2f}); "
        f"lower train.optimizer.lr ({run.prepared.recipe.train.optimizer.lr:g}) or set schedule.warmup_epochs"
    )


def _tell(run: _Run, engine: Engine, samples: int, loss: float, clock_s: float) -> None:
    """Tell the progress of a unit."""
    run.told += samples
    run.progress.update(run.told, clock_s, loss, engine.busy_fraction)


def _best(run: _Run, metric: str) -> float:
    values = [point.metrics[metric] for point in run.points]
    return max(values) if run.prepared.setup.dataset.metrics[metric] == "max" else min(values)


def _metrics(run: _Run, facts: Mapping[str, Any], measured: Measured) -> dict[str, float]:
    setup, samples, training_s = run.prepared.setup, run.samples, run.training_s
    metrics: dict[str, float] = {
        "evaluation_time_s": run.evaluation_s,
        "weight_versions_max": max(facts["weight_versions_max"]),
        "peak_memory_bytes_max": max(facts["peak_bytes"]),
        "samples_per_update": setup.pipeline.round_size(0) * setup.sampler.minibatch_size,
        **byte_metrics(run.bytes_before + facts["num_bytes"], samples),
    }
    if run.counted_from[0] > 0:  # workers were others before: what they did with their time can't be added to
        metrics["workers_counted_from_samples"] = run.counted_from[0]
    if run.lost_s > 0:
        metrics["lost_time_s"] = run.lost_s
    if run.keeping.checkpoints is not None:
        metrics["checkpoint_time_s"] = run.checkpoint_s
    if samples > 0 and training_s > 0:
        metrics["throughput_samples_per_s"] = samples / training_s
        metrics["epoch_time_s"] = training_s * setup.sampler.num_samples / samples
        metrics |= measured.metrics
    if run.reached is not None:
        metrics["time_to_accuracy_s"] = run.reached.clock_s
        metrics["time_to_accuracy_without_evaluation_s"] = run.reached_training_s
        metrics["epochs_to_target"] = run.reached.samples / setup.sampler.num_samples
    for name in setup.dataset.metrics:
        if run.points:
            metrics[f"final_{name}"] = run.points[-1].metrics[name]
            metrics[f"best_{name}"] = _best(run, name)
    return metrics
