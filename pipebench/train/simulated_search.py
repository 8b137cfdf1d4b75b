"""A trace of architectures on the simulated engine: how fast training is between one change and the next.

Every change is at a drain, under the cuts there are: what the work in a stage comes to changes with its cells, the cuts
don't. With vPipe every stage then decides anew what its layers do so that they fit in memory; where it repartitions,
Algorithm 1 moves layers while the next phase goes on, or at drains of their own, as in any simulated run. Memory is
predicted of every architecture, under the cuts that it begins and ends with.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from pipebench.engine.setup import Setup
from pipebench.engine.simulated_moves import SimulatedEngine
from pipebench.formats import seconds
from pipebench.recipe.search_trace import VERSION, SearchFile, Trained
from pipebench.schedule.notation import STRAIGHT
from pipebench.search.architectures import Cells
from pipebench.search.setup import SearchSetup
from pipebench.search.trace import Step
from pipebench.simulate.meter import MEMORY, Meter
from pipebench.simulate.steady import simulate_segment
from pipebench.simulate.throughput import Finishes, throughput
from pipebench.simulate.timeline import Timeline
from pipebench.train.job import Job
from pipebench.train.largest import most_within
from pipebench.train.memory_forecast import MemoryForecast
from pipebench.train.metrics import describe, describe_stages, move_metrics, recipe_notes
from pipebench.train.moves import cuts_of
from pipebench.train.periods import Periods
from pipebench.train.plan import choose_plan
from pipebench.train.repartitioning import Repartitioning
from pipebench.train.result import COMPLETED, Point, RunResult
from pipebench.train.simulated import totalled

_WINDOW_S = 10.0  # while layers may move, how often throughput is told
_RATE, _IDEAL = "throughput_samples_per_s", "ideal_throughput_samples_per_s"


class ArchitecturePeriod(NamedTuple):
    """What is simulated between two changes.

    Attributes:
        cells: the architecture.
        setups: what is run in the beginning, and in the end.
        begins_s: on the run's clock.
        ends_s: likewise.
        first: minibatches of the run before it.
        num_minibatches: of it.
        windows: samples per second while layers may move, in parts of ten seconds; nothing where they can't.
    """

    cells: Cells
    setups: tuple[Setup, Setup]
    begins_s: float
    ends_s: float
    first: int
    num_minibatches: int
    windows: Sequence[float]


def simulate_search(job: Job, watch: MemoryForecast | None = None) -> tuple[RunResult, Timeline]:
    """Simulate a recipe's trace from its first change to the end of the run.

    Args:
        job: has a search with a trace.
        watch: watches a segment of the first architecture; then memory is predicted of all.
    """
    search, sampler = job.search, job.setup.sampler
    assert search is not None
    finishes = Finishes(job.setup.pipeline)
    meter = Meter(job.setup.pipeline, finishes)
    engine = SimulatedEngine(job.setup, meter)
    moves = Repartitioning(job, engine)
    phases = [*_phases(job, search, engine, moves, finishes)]
    samples = [sampler.samples_before(phase.first + phase.num_minibatches) for phase in phases]
    before = [0, *samples[:-1]]
    rates = [(b - a) / (phase.ends_s - phase.begins_s) for phase, a, b in zip(phases, before, samples, strict=True)]
    layers = [search.architectures.num_layers(phase.cells) for phase in phases]
    ideals = [_ideal_samples_per_s(phase.setups[0]) for phase in phases]
    points = [
        point
        for phase, seen, count, rate, ideal in zip(phases, before, layers, rates, ideals, strict=True)
        for point in _points(phase, seen, rate, {"active_layers": count, _IDEAL: ideal})
    ]
    result = RunResult(
        **describe(job),
        outcome=COMPLETED,
        sentence=f"simulated {len(phases)} architectures, one after the other; nothing was trained or scored",
        metrics=totalled(job.setup, samples[-1], engine.totals)
        | {
            "slowest_throughput_samples_per_s": min(rates),
            "least_throughput_samples_per_s": min(point.metrics[_RATE] for point in points),
            _IDEAL: sum(each * (p.ends_s - p.begins_s) for each, p in zip(ideals, phases, strict=True))
            / engine.clock_s,
        }
        | ({} if job.recipe.parallelism.vpipe is None else move_metrics(moves.made, engine.totals.num_bytes)),
        points=tuple(points),
        stages=tuple(describe_stages(job)),
        moves=tuple(moves.made),
        notes=recipe_notes(job),
        search=_file(search, phases, before, layers),
    )
    return _with_peaks(job, watch, phases, layers, result) if watch else result, meter.timeline()


def architectures_of(job: Job) -> Iterator[Job]:
    """Yield a job as it is under each architecture of its trace, under its first cuts, the first one first."""
    assert job.search is not None
    assert job.search.steps is not None
    yield job
    for step in job.search.steps:
        job = replace(job, setup=_chosen(job, job.search.architectures.setup(job.setup, step.cells)))
        yield job


def _phases(
    job: Job, search: SearchSetup, engine: SimulatedEngine, moves: Repartitioning, finishes: Finishes
) -> Iterator[ArchitecturePeriod]:
    """Yield the phases of a run."""
    assert search.steps is not None
    total = Periods.of(job.recipe.train, job.setup.sampler.minibatches_per_epoch).total
    steps = [step for step in search.steps if step.minibatch or step.second]
    cells, done = search.first, 0
    for step in [*steps, Step(None if search.end_second else total, search.end_second, search.first)]:
        begins_s, first, setup, before = engine.clock_s, done, engine.setup, len(finishes.units)
        count = min(total - done, _minibatches_until(step, job, engine, done))
        if count > 0:
            done = _train(job, moves, first, first + count)
            played = [unit._replace(end_s=unit.end_s - begins_s) for unit in finishes.units[before:]]
            length_s = played[-1].end_s if setup.balances and played else 0.0
            windows = throughput(played, _WINDOW_S, length_s)
            yield ArchitecturePeriod(
                cells, (setup, engine.setup), begins_s, engine.clock_s, first, done - first, windows
            )
        if done < total:
            cells = step.cells
            engine.switch_setup(_chosen(job, search.architectures.setup(engine.setup, cells)))


def _train(job: Job, moves: Repartitioning, done: int, stop: int) -> int:
    """Go through the drains of a run up to one after so many minibatches, which are returned."""
    periods = Periods.of(job.recipe.train, job.setup.sampler.minibatches_per_epoch)
    while done < stop:
        done = moves.train(done, min(stop, periods.next_drain(done)))
        if done < stop:
            moves.replan(done)
    return done


def _chosen(job: Job, setup: Setup) -> Setup:
    """Return the setup of a new architecture with what vPipe's stages choose that their layers do, under their cuts.

    Raises:
        PlanError: a stage doesn't fit in memory any more, whatever its layers do.
    """
    vpipe, asked = job.recipe.parallelism.vpipe, job.recipe.parallelism
    if vpipe is None or not vpipe.policies:
        return setup
    asked = replace(asked, plan=STRAIGHT, cuts=[*cuts_of(setup.graph, setup.plan)])
    plan = choose_plan(replace(job.recipe, parallelism=asked), job.cluster, setup.graph, setup.profile, setup.dataset)
    return setup.under(replace(plan, depth=setup.plan.depth).on(setup.devices))


def _minibatches_until(step: Step, job: Job, engine: SimulatedEngine, first: int) -> int:
    """Return how many minibatches are trained on until a change: whole ones, the last of which ends after it.

    Where layers may move it is tried out how: from the last move on the time grows as under the last cuts alone.
    """
    if step.minibatch is not None:
        return step.minibatch - first
    assert step.second is not None
    left_s, setup, later_s = step.second - engine.clock_s, engine.setup, 0.0
    guess = max(1, int(left_s / _pace_s(setup)))
    if setup.balances:
        trial = SimulatedEngine(setup, known=engine.known)
        _train(job, Repartitioning(job, trial), first, first + guess)
        setup = replace(trial.setup, balances=False)
        later_s = trial.clock_s - _takes_s(job, setup, first, guess)
        guess = max(1, int((left_s - later_s) / _pace_s(setup)))
    return 1 + most_within(left_s - later_s, lambda count: _takes_s(job, setup, first, count), 2 * guess)


def _pace_s(setup: Setup) -> float:
    """Return about what a minibatch takes, filling and emptying aside."""
    per_epoch = setup.sampler.minibatches_per_epoch
    return simulate_segment(setup, per_epoch).end_s / per_epoch


def _takes_s(job: Job, setup: Setup, first: int, count: int) -> float:
    """Return how long so many minibatches take if nothing moves."""
    engine = SimulatedEngine(setup)
    _train(job, Repartitioning(job, engine), first, first + count)
    return engine.clock_s


def _ideal_samples_per_s(setup: Setup) -> float:
    """Return the throughput with any amount of memory and stages that are always balanced: nobody ever waits.

    What every sample takes is computed once, by all workers together.
    """
    pipeline, size = setup.pipeline, setup.costs.most_samples
    sample_s = sum(row.forward_s + row.backward_s for row in setup.profile.by_size[size]) / size
    for index, stage in enumerate(setup.costs.stages):
        per_update = pipeline.round_size(index) * setup.sampler.minibatch_size
        sample_s += stage.update_s * pipeline.replicas[index] / per_update
    return pipeline.num_workers / sample_s


def _points(phase: ArchitecturePeriod, seen: int, rate: float, known: Mapping[str, float]) -> Iterator[Point]:
    """Yield what there is to tell of a phase: its pace while layers may move, and then.

    Args:
        phase: that.
        seen: samples of the run before it.
        rate: samples per second of all of it.
        known: what else is told of it.
    """
    samples, clock_s = float(seen), phase.begins_s
    for window in phase.windows:
        samples, clock_s = samples + window * _WINDOW_S, clock_s + _WINDOW_S
        yield Point(round(samples), clock_s, {_RATE: window, **known})
    last = seen + rate * (phase.ends_s - phase.begins_s)
    yield Point(round(last), phase.ends_s, {_RATE: (last - samples) / (phase.ends_s - clock_s), **known})


def _with_peaks(
    job: Job, watch: MemoryForecast, phases: Sequence[ArchitecturePeriod], layers: Sequence[int], result: RunResult
) -> RunResult:
    """Return a result with the peaks that are predicted of all architectures, and from when on there is no room."""
    simulate_segment(job.setup, phases[0].num_minibatches, Meter(job.setup.pipeline, *watch.listeners))
    for phase, count in zip(phases, layers, strict=True):
        begins, ends = phase.setups
        for setup in (begins, ends) if ends is not begins else (begins,):
            found = MemoryForecast.over(replace(job, setup=setup))
            result = found.with_peaks(result)
            if found.out_of_memory and MEMORY not in result.notes:
                where = f"with the {count} layers that there are from {seconds(phase.begins_s)} on"
                result = replace(result, notes={**result.notes, MEMORY: f"{where}: {found.out_of_memory}"})
    return result


def _file(
    search: SearchSetup, phases: Sequence[ArchitecturePeriod], samples: Sequence[int], layers: Sequence[int]
) -> SearchFile:
    """Return the phases as a history without scores."""
    names = search.architectures.names
    before = [phases[0].cells, *(phase.cells for phase in phases)]
    rows = [
        Trained(
            number=number, parent=None, minibatch=phase.first, second=phase.begins_s, samples=seen,
            cells=names(phase.cells), changed=names(phase.cells ^ was), layers=count, scores=[],
        )
        for number, (phase, seen, count, was) in enumerate(zip(phases, samples, layers, before, strict=False))
    ]  # fmt: skip
    return SearchFile(VERSION, individuals=rows)
