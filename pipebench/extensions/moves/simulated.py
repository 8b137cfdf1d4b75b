"""A simulated run whose layers move: all epochs, with the recipe's drains.

Between two drains only the part in which layers move is simulated. The rest has the costs of its cuts' steady state, so
that a simulation of many epochs takes hardly longer than one of few.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from pipebench.engine.setup import Setup
from pipebench.extensions.moves.engine import moving
from pipebench.extensions.moves.planned import MovesPlanned, PlannedMove, plan_after
from pipebench.extensions.moves.repartitioning import Repartitioning, move_metrics
from pipebench.extensions.moves.settings import MOVES
from pipebench.extensions.moves.simulated_engine import SimulatedEngine, highest
from pipebench.extensions.moves.throughput import Mark
from pipebench.formats import a_or_an, num_bytes
from pipebench.model.plan import Plan
from pipebench.schedule.operations import MIGRATION
from pipebench.schedule.repartitions import RepartitionRecord
from pipebench.simulate.memory_meter import MemoryPeak
from pipebench.simulate.meter import MEMORY, sum_by
from pipebench.simulate.steady import simulate_segment
from pipebench.simulate.timeline import TRAINING_KINDS, Timeline
from pipebench.train.job import Job
from pipebench.train.memory_forecast import MemoryForecast, Moved, with_peaks
from pipebench.train.metrics import describe, describe_stages, recipe_notes
from pipebench.train.periods import Periods
from pipebench.train.profiled_model import input_bytes
from pipebench.train.result import COMPLETED, Point, RunResult
from pipebench.train.simulated import epoch_notes, planned_metrics, shares, totalled

_MOVED = "migration_bytes_per_s"


def simulate_moving(job: Job, forecast: MemoryForecast | None = None) -> tuple[RunResult, Timeline]:
    """Simulate all epochs of a job whose layers may move.

    Evaluations and checkpoints drain the pipeline, but take no time.

    Args:
        job: the job.
        forecast: predicted memory under the initial cuts; None: the result has no peak memory.

    Returns:
        The result, and the timeline of the recorded events.
    """
    setup = job.setup
    engine = SimulatedEngine(setup, inputs=input_bytes(setup.graph, setup.dataset, setup.profile.by_size))
    moves = Repartitioning(job, engine)
    periods = job.periods
    points = tuple(_trained(periods, engine, moves))
    made = tuple(replace(move, clock_s=engine.began_s.get(move.minibatch, move.clock_s)) for move in moves.made)
    per_epoch, samples = setup.sampler.minibatches_per_epoch, setup.sampler.samples_before(periods.total)
    last = replace(job, setup=engine.setup)
    epoch = simulate_segment(engine.setup, per_epoch)
    result = RunResult(
        **describe(job),
        outcome=COMPLETED,
        sentence=_sentence(samples / setup.sampler.num_samples, len(made)),
        metrics=totalled(setup, samples, engine.totals)
        | {"steady_throughput_samples_per_s": setup.sampler.num_samples / epoch.end_s}
        | ({} if made else planned_metrics(job))
        | move_metrics(made, engine.totals.num_bytes)
        | {"migration_peak_bytes_per_s": max(point.metrics[_MOVED] for point in points)},
        points=points,
        stages=tuple(
            row | each for row, each in zip(describe_stages(last), shares(last, epoch.end_s, [per_epoch]), strict=True)
        ),
        moves=made,
        notes=recipe_notes(job) | epoch_notes(last, epoch, per_epoch),
    )
    return _with_peaks(job, forecast, result, engine.peaks) if forecast else result, engine.timeline()


def _sentence(epochs: float, num_moves: int) -> str:
    """Return what was simulated, as a sentence."""
    moved = f"layers moved {num_moves} time{'s' * (num_moves > 1)}" if num_moves else "layers stayed where they were"
    what = f"simulated {epochs:g} epoch{'s' * (epochs > 1)}"
    return f"{what}: {moved}; nothing was trained, so there is no accuracy"


def _trained(periods: Periods, engine: SimulatedEngine, moves: Repartitioning) -> Iterator[Point]:
    """Run from drain to drain; yield points of rates: several while layers move, else one per drain."""
    done, sampler = 0, engine.setup.sampler
    before = Mark(0.0, 0, Counter())
    while done < periods.total:
        samples, last = sampler.samples_before(done), before
        done = moves.train(done, periods.next_drain(done))
        for mark in engine.marks:
            yield Point(samples + mark.samples, mark.clock_s, _rates(last, mark, engine.setup.pipeline.num_workers))
            last = mark
        before, sent = Mark(engine.clock_s, 0, Counter()), Counter(engine.totals.num_bytes)
        if done < periods.total:
            moves.drained(done)
            for key, count in engine.totals.num_bytes.items():  # moves at a drain count with the next segment
                before.num_bytes[key] = sent[key] - count


def _rates(before: Mark, mark: Mark, num_workers: int) -> dict[str, float]:
    """Return rates per second between two marks, and the share of that time in which workers computed."""
    took_s = mark.clock_s - before.clock_s
    sent = sum_by(mark.num_bytes - before.num_bytes, 0, (*TRAINING_KINDS, MIGRATION))
    moved = sent.pop(MIGRATION, 0)
    return {
        "throughput_samples_per_s": (mark.samples - before.samples) / took_s,
        "comm_bytes_per_s": sum(sent.values()) / took_s,
        _MOVED: moved / took_s,
        "busy_fraction": (mark.busy_s - before.busy_s) / (num_workers * took_s),
    }


def forecast_of(job: Job, moves: Sequence[RepartitionRecord]) -> MemoryForecast:
    """Return the memory forecast of a job that has run on any engine, with the moves that it has made."""
    if not moves or job.extensions.keys() - {MOVES}:  # other extensions change more than cuts: forecast the start only
        return MemoryForecast(job)
    planned = (PlannedMove(m.minibatch, s.plan) for m, s in zip(moves, _setups(job.setup, moves), strict=True))
    forecast = MemoryForecast(job)
    extensions = {MOVES: MovesPlanned(job.recipe, tuple(planned))}
    simulate_moving(replace(job, extensions=extensions, setup=moving(job.setup, balances=False)), forecast)
    return forecast


def _with_peaks(job: Job, forecast: MemoryForecast, result: RunResult, moving: Sequence[MemoryPeak]) -> RunResult:
    """Return a result with predicted peaks under all cuts of a run, and while layers move.

    Args:
        job: the job.
        forecast: predicted memory under the initial cuts.
        result: has the run's moves.
        moving: workers' peaks while layers move; empty if none do.
    """
    found = [forecast, *(MemoryForecast(replace(job, setup=setup)) for setup in _setups(job.setup, result.moves))]
    if result.moves:
        between = [moving, *(each.memory.peaks for each in found[1:-1])]
        forecast.moved = Moved(tuple(highest(*between)), found[-1].memory)
    for each in found:
        result = each.with_peaks(result)
    if moving:
        result = with_peaks(result, job.setup.pipeline, moving)
    limit, notes = job.cluster.memory_bytes, {**result.notes}
    sentences = (
        f"after minibatch {move.minibatch}: {each.out_of_memory}"
        for move, each in zip(result.moves, found[1:], strict=True)
        if each.out_of_memory
    )
    fullest = max(moving, key=lambda peak: peak.num_bytes, default=None)
    if sentence := next(sentences, ""):
        notes[MEMORY] = sentence
    elif limit is not None and fullest is not None and fullest.num_bytes > limit:
        stage = job.setup.pipeline.stages_of(fullest.worker)[0]
        what = f"stage {stage} holds {num_bytes(fullest.num_bytes)} while layers move"
        notes[MEMORY] = f"out of memory: {what}, more than the {num_bytes(limit)} of {a_or_an(job.cluster.device)}"
    return replace(result, notes=notes)


def _setups(setup: Setup, moves: Iterable[RepartitionRecord]) -> Iterable[Setup]:
    """Yield the setup after each move."""
    plan: Plan = setup.plan
    for move in moves:
        plan = plan_after(setup.graph, plan, move.cuts, move.memory)
        yield setup.under(plan)
