"""The simulated engine's result: an epoch's time, bytes and bubble from durations only, without accuracy."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from pipebench.engine.setup import Setup
from pipebench.errors import PlanError
from pipebench.formats import num_epochs
from pipebench.planner.planner import Planner
from pipebench.schedule.syncs import SYNCS
from pipebench.simulate.meter import EPOCHS, Meter, fractions, pcie_fractions
from pipebench.simulate.segments import Segments
from pipebench.simulate.steady import NOTHING, SegmentTotals
from pipebench.simulate.timeline import Timeline
from pipebench.train.job import Job
from pipebench.train.memory_forecast import MemoryForecast
from pipebench.train.metrics import byte_metrics, byte_rates, describe, describe_stages, recipe_notes
from pipebench.train.periods import Periods
from pipebench.train.profiled_model import left_over_note
from pipebench.train.request import plan_request
from pipebench.train.result import COMPLETED, RunResult


def simulate_epoch(job: Job, forecast: MemoryForecast | None = None) -> tuple[RunResult, Timeline]:
    """Simulate a run up to the drain at the end of its first epoch, or the next one.

    Returns:
        The result, with the peak memory of `forecast`, and the timeline of the first segment.
    """
    setup = job.setup
    meter = Meter(setup.pipeline)
    totals, lengths = _first_epoch(setup, job.periods, meter)
    done = sum(lengths)
    samples = setup.sampler.samples_before(done)
    metrics, epochs = totalled(setup, samples, totals), num_epochs(round(samples / setup.sampler.num_samples, 3))
    rows = zip(describe_stages(job), shares(job, metrics["epoch_time_s"], lengths), strict=True)
    result = RunResult(
        **describe(job),
        outcome=COMPLETED,
        sentence=f"simulated {epochs}; nothing was trained, so there is no accuracy",
        metrics=metrics | planned_metrics(job),
        stages=tuple(row | busy for row, busy in rows),
        notes=recipe_notes(job) | epoch_notes(job, totals, done),
    )
    return forecast.with_peaks(result) if forecast else result, meter.timeline()


def shares(job: Job, epoch_s: float, segments: Sequence[int]) -> list[dict[str, float]]:
    """Return each stage's busy share of its workers' time in an epoch, with recomputation apart.

    Args:
        job: what is simulated.
        epoch_s: an epoch's seconds.
        segments: the minibatches between drains, in some part of the run. Each segment ends with an update, which may
            have fewer minibatches than others.

    Returns:
        `effective_fraction` and `recompute_fraction` per stage; none if the samples' lengths vary.
    """
    setup = job.setup
    sampler, pipeline, costs = setup.sampler, setup.pipeline, setup.costs
    if sampler.varies:
        return [{} for _ in costs.stages]
    last = sampler.minibatches_per_epoch - 1  # which may be short
    units = Counter(sampler.sizes(last, pipeline.microbatches))  # of an epoch, by size
    for size, count in Counter(sampler.sizes(0, pipeline.microbatches)).items():
        units[size] += last * count
    updates = SYNCS[pipeline.sync].waits  # whether workers make the updates, and not a server beside them
    found = []
    for stage, each in enumerate(costs.stages):
        replicas = pipeline.replicas[stage]
        num_updates = sum(math.ceil(length / pipeline.round_size(stage)) for length in segments) * updates
        per_epoch = num_updates * (last + 1) / sum(segments)
        again_s = sum(each.again_s[size] * count for size, count in units.items()) / replicas
        passes_s = sum((each.forward_s[size] + each.backward_s[size]) * count for size, count in units.items())
        busy_s = passes_s / replicas + each.update_s * per_epoch
        found.append({"effective_fraction": (busy_s - again_s) / epoch_s, "recompute_fraction": again_s / epoch_s})
    return found


def planned_metrics(job: Job) -> dict[str, float]:
    """Return the plan's throughput by the recipe's cost model: what a paper's optimizer predicts.

    The slowest stage determines it (PipeDream, section 3.1). Empty for flushing pipelines, which the model doesn't
    cover, and for plans that are cut at other places than the cost model's.
    """
    recipe, setup = job.recipe, job.setup
    if setup.pipeline.flushes and len(setup.plan.stages) > 1:
        return {}
    planner = Planner(plan_request(recipe, job.cluster, job.profile, setup.dataset), recipe.parallelism.mode)
    try:
        bottleneck_s = planner.bottleneck_of(setup.plan)
    except PlanError:
        return {}
    return {"planned_throughput_samples_per_s": setup.sampler.size(0) / bottleneck_s}


def predicted_metrics(setup: Setup, periods: Periods) -> dict[str, float]:
    """Return a simulated first epoch's metrics, under the names of a trained run's."""
    totals, lengths = _first_epoch(setup, periods)
    return totalled(setup, setup.sampler.samples_before(sum(lengths)), totals)


def _first_epoch(setup: Setup, periods: Periods, meter: Meter | None = None) -> tuple[SegmentTotals, list[int]]:
    """Return totals up to the drain at the end of a run's first epoch, or the next one, and each segment's minibatches.

    The pipeline drains before every evaluation and checkpoint. `meter` records the first segment.
    """
    segments, per_epoch = Segments(setup), setup.sampler.minibatches_per_epoch
    totals, lengths, error_s, num_simulated, is_estimate = NOTHING, list[int](), 0.0, 0, False
    while (done := sum(lengths)) < per_epoch:
        length = periods.next_drain(done) - done
        segment = segments.totals(done, length, None if done else meter)
        totals = totals.extended(segment, 1).extended(segments.drain, 1)
        error_s += segment.error_s  # added, since equal segments have the same error
        num_simulated += segment.num_simulated or length
        is_estimate |= segment.num_simulated > 0
        lengths.append(length)
    return replace(totals, error_s=error_s, num_simulated=num_simulated if is_estimate else 0), lengths


def totalled(setup: Setup, samples: int, totals: SegmentTotals) -> dict[str, float]:
    """Return the metrics of a simulation, under the names of a trained run's."""
    sampler, num_workers = setup.sampler, setup.pipeline.num_workers
    num_bytes = setup.costs.of_all_devices(totals.num_bytes, samples, setup.cluster.levels[0].name)
    return {
        "total_time_s": totals.end_s,
        "epoch_time_s": totals.end_s * sampler.num_samples / samples,
        "throughput_samples_per_s": samples / totals.end_s,
        "samples_per_update": setup.pipeline.round_size(0) * sampler.minibatch_size,
        "num_workers": num_workers,
        "num_devices": num_workers * setup.costs.slices,
        **byte_metrics(num_bytes),
        **byte_rates(num_bytes, samples),
        **fractions(
            totals.busy_s, totals.stall_s, num_workers, totals.end_s,
            again_s=totals.again_s, swap_stall_s=totals.swap_stall_s if setup.pipeline.swaps else None,
        ),
        **pcie_fractions(setup.cluster, num_bytes, num_workers * setup.costs.slices, totals.end_s),
    }  # fmt: skip


def epoch_notes(job: Job, totals: SegmentTotals, num_minibatches: int) -> dict[str, str]:
    """Return notes on the minibatches and precision behind an epoch's time, and on what it leaves out."""
    remarks = [left_over_note(job.left_over)] if job.left_over else []
    if totals.num_simulated:
        remarks.append(_estimated(job.setup, totals, num_minibatches))
    return {EPOCHS: "; ".join(remarks)} if remarks else {}


def _estimated(setup: Setup, totals: SegmentTotals, num_minibatches: int) -> str:
    why = "lengths vary" if setup.sampler.varies else "no state repeats itself"
    return (
        f"{why}: {totals.num_simulated:,} of {num_minibatches:,} minibatches simulated, the mean of their kind "
        f"taken for the others; standard error {totals.error_s / totals.end_s:.2%}"
    )
