"""A run whose layers move, on the simulated engine: all its epochs, with the drains that the recipe asks for.

Between two drains only as much is simulated as anything changes in. Then every segment costs what it costs under the
last cuts, found as for a run whose layers stay; so a run's time hardly depends on how many epochs it has.
"""

from collections.abc import Iterable
from dataclasses import replace

from pipebench.engine.setup import Setup
from pipebench.engine.simulated_moves import SimulatedEngine
from pipebench.model.plan import Plan
from pipebench.schedule.repartitions import Repartition
from pipebench.simulate.meter import Meter
from pipebench.simulate.steady import simulate_segment
from pipebench.simulate.timeline import Timeline
from pipebench.train.job import Job
from pipebench.train.metrics import describe, describe_stages, move_metrics, recipe_notes
from pipebench.train.moves import plan_after
from pipebench.train.periods import Periods
from pipebench.train.repartitioning import Repartitioning
from pipebench.train.result import COMPLETED, Point, RunResult
from pipebench.train.simulated import epoch_notes, planned_metrics, shares, totalled
from pipebench.train.watch import Watch


def simulate_moving(job: Job, watch: Watch | None = None) -> tuple[RunResult, Timeline]:
    """Simulate all epochs of a job whose layers move, or may; evaluations and checkpoints drain, and take no time.

    Args:
        job: what is simulated.
        watch: watches a segment under the cuts that the run begins with, and foretells the peaks of memory.
    """
    setup, meter = job.setup, Meter(job.setup.pipeline)
    engine = SimulatedEngine(setup, meter)
    moves = Repartitioning(job, engine, lambda sentence: None)
    periods = Periods.of(job.recipe.train, setup.sampler.minibatches_per_epoch)
    points = tuple(_trained(periods, engine, moves))
    per_epoch, samples = setup.sampler.minibatches_per_epoch, setup.sampler.samples_before(periods.total)
    last = replace(job, setup=engine.setup)
    epoch = simulate_segment(engine.setup, per_epoch)
    epochs, times = samples / setup.sampler.num_samples, len(moves.made)
    told = f"simulated {epochs:g} epoch{'s' * (epochs > 1)}"
    moved = "layers stayed where they were" if not times else f"layers moved {times} time{'s' * (times > 1)}"
    result = RunResult(
        **describe(job),
        outcome=COMPLETED,
        sentence=f"{told}: {moved}; nothing was trained, so there is no accuracy",
        metrics=totalled(setup, samples, engine.totals)
        | {"steady_throughput_samples_per_s": setup.sampler.num_samples / epoch.end_s}
        | ({} if times else planned_metrics(job))
        | move_metrics(moves.made, engine.totals.num_bytes),
        points=points,
        stages=tuple(row | each for row, each in zip(describe_stages(last), shares(last, epoch), strict=True)),
        moves=tuple(moves.made),
        notes=recipe_notes(job) | epoch_notes(last, epoch, per_epoch),
    )
    return _with_peaks(job, watch, result) if watch else result, meter.timeline()


def _trained(periods: Periods, engine: SimulatedEngine, moves: Repartitioning) -> Iterable[Point]:
    """Go through the drains of a run; yield what each evaluation would come after."""
    done, sampler = 0, engine.setup.sampler
    clock_s, samples = 0.0, 0
    while done < periods.total:
        first, drain = done, moves.next_drain(done, periods.next_drain(done))
        moves.announce(first, drain)
        done += engine.train(first, drain - first)
        moves.note(first, done)
        if periods.evaluates_at(done):
            before, samples = samples, sampler.samples_before(done)
            rate = (samples - before) / (engine.clock_s - clock_s)
            clock_s = engine.clock_s
            yield Point(samples, clock_s, {"throughput_samples_per_s": rate})
        if done < periods.total:
            moves.replan(done)


def _with_peaks(job: Job, watch: Watch, result: RunResult) -> RunResult:
    """Return a result with the peaks that are foretold of all cuts that a run goes through, moves themselves aside."""
    per_epoch, found = job.setup.sampler.minibatches_per_epoch, [watch]
    simulate_segment(job.setup, per_epoch, Meter(job.setup.pipeline, *watch.listeners))
    for setup in _setups(job.setup, result.moves):
        found.append(Watch(replace(job, setup=setup), per_epoch))
        simulate_segment(setup, per_epoch, Meter(setup.pipeline, *found[-1].listeners))
    peaks = [each.with_peaks(result) for each in found]
    most = max(peaks, key=lambda each: each.metrics["peak_memory_bytes_max"])
    stages = tuple(
        max(rows, key=lambda row: float(row["peak_memory_bytes"]))
        for rows in zip(*(p.stages for p in peaks), strict=True)
    )
    return replace(most, stages=stages)


def _setups(setup: Setup, moves: Iterable[Repartition]) -> Iterable[Setup]:
    """Yield what a run is after each of its moves."""
    plan: Plan = setup.plan
    for move in moves:
        plan = plan_after(setup.graph, plan, move.cuts, move.memory)
        yield setup.under(plan)
