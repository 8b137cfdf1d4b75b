"""Simulation of a trace of architectures: throughput between changes.

Paper: vPipe (TPDS'21), section 6.3 and figures 13 and 14. Every change is at a drain and keeps the cuts, so the work
of stages becomes unequal. With vPipe, every stage then chooses memory policies anew. With repartitioning, Algorithm 1
moves layers during the period that follows, or at drains. Memory is predicted for every architecture, under its first
and its last cuts.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from pipebench.engine.setup import Setup
from pipebench.extensions.moves.engine import moving
from pipebench.extensions.moves.repartitioning import Repartitioning, move_metrics
from pipebench.extensions.moves.settings import settings_of
from pipebench.extensions.moves.simulated_engine import SimulatedEngine
from pipebench.extensions.moves.throughput import Finishes, throughput
from pipebench.extensions.search.architectures import Cells
from pipebench.extensions.search.setup import SearchSetup, chosen, search_of
from pipebench.extensions.search.strategy import Step
from pipebench.extensions.search.trace_file import VERSION, SearchFile, Trained
from pipebench.formats import seconds
from pipebench.simulate.meter import MEMORY, Meter
from pipebench.simulate.steady import simulate_segment
from pipebench.simulate.timeline import Timeline
from pipebench.train.job import Job
from pipebench.train.largest import most_within
from pipebench.train.memory_forecast import MemoryForecast, with_peaks
from pipebench.train.metrics import describe, describe_stages, recipe_notes
from pipebench.train.result import COMPLETED, Point, RunResult
from pipebench.train.simulated import totalled

_WINDOW_S = 10.0  # length of the periods of throughput while layers may move
_RATE, _IDEAL = "throughput_samples_per_s", "ideal_throughput_samples_per_s"


class ArchitecturePeriod(NamedTuple):
    """A simulated period between two changes of architecture."""

    cells: Cells
    num_layers: int  # that are active
    setups: tuple[Setup, Setup]  # at its start and at its end
    begins_s: float  # on the run's clock
    ends_s: float
    first: int  # minibatches of the run before it
    samples: tuple[int, int]  # of the run, before it and at its end
    windows: Sequence[float]  # samples per second in every `_WINDOW_S` while layers may move; empty if they can't

    @property
    def length_s(self) -> float:
        """Seconds from its start to its end."""
        return self.ends_s - self.begins_s

    @property
    def samples_per_s(self) -> float:
        """Mean throughput."""
        return (self.samples[1] - self.samples[0]) / self.length_s

    @property
    def ideal_samples_per_s(self) -> float:
        """Throughput if all workers shared the computation of every sample equally.

        This needs unlimited memory and stages that are always balanced and never wait.
        """
        setup = self.setups[0]
        pipeline, size = setup.pipeline, setup.costs.most_samples
        sample_s = sum(row.forward_s + row.backward_s for row in setup.profile.by_size[size]) / size
        for index, stage in enumerate(setup.costs.stages):
            per_update = pipeline.round_size(index) * setup.sampler.minibatch_size
            sample_s += stage.update_s * pipeline.replicas[index] / per_update
        return pipeline.num_workers / sample_s


def simulate_search(job: Job, forecast: MemoryForecast | None = None) -> tuple[RunResult, Timeline]:
    """Simulate a recipe's trace to the run's end; with a `forecast`, predict the memory of all architectures."""
    search, finishes = search_of(job), Finishes()
    meter = Meter(job.setup.pipeline, finishes)
    engine = SimulatedEngine(job.setup, meter)
    moves = Repartitioning(job, engine)
    periods = [*_periods(job, search, engine, moves, finishes)]
    points = [point for period in periods for point in _points(period)]
    ideal_samples = sum(period.ideal_samples_per_s * period.length_s for period in periods)
    result = RunResult(
        **describe(job),
        outcome=COMPLETED,
        sentence=f"simulated {len(periods)} architectures, one after the other; nothing was trained or scored",
        metrics=totalled(job.setup, periods[-1].samples[1], engine.totals)
        | {
            "slowest_throughput_samples_per_s": min(period.samples_per_s for period in periods),
            "least_throughput_samples_per_s": min(point.metrics[_RATE] for point in points),
            _IDEAL: ideal_samples / engine.clock_s,
        }
        | ({} if job.recipe.parallelism.vpipe is None else move_metrics(moves.made, engine.totals.num_bytes)),
        points=tuple(points),
        stages=tuple(describe_stages(job)),
        moves=tuple(moves.made),
        notes=recipe_notes(job),
        search=_file(search, periods),
    )
    if forecast:
        result = _with_peaks(job, periods, result)
        result = with_peaks(result, job.setup.pipeline, engine.peaks) if engine.peaks else result
    return result, meter.timeline()


def _periods(
    job: Job, search: SearchSetup, engine: SimulatedEngine, moves: Repartitioning, finishes: Finishes
) -> Iterator[ArchitecturePeriod]:
    """Simulate the run; yield its periods."""
    assert search.steps is not None
    total = job.periods.total
    steps = [step for step in search.steps if step.minibatch or step.second]
    cells, done, samples = search.first, 0, 0
    for step in [*steps, Step(None if search.end_second else total, search.end_second, search.first)]:
        begins_s, first, setup, finished = engine.clock_s, done, engine.setup, len(finishes.units)
        count = min(total - done, _minibatches_until(step, job, engine, done))
        if count > 0:
            done = _train(job, moves, first, first + count)
            played = [unit._replace(end_s=unit.end_s - begins_s) for unit in finishes.units[finished:]]
            length_s = played[-1].end_s if settings_of(setup.pipeline).balances and played else 0.0
            before, samples = samples, setup.sampler.samples_before(done)
            yield ArchitecturePeriod(
                cells, search.architectures.num_layers(cells), (setup, engine.setup), begins_s, engine.clock_s, first,
                (before, samples), throughput(played, _WINDOW_S, length_s),
            )  # fmt: skip
        if done < total:
            cells = step.cells
            engine.switch_setup(chosen(job, search.architectures.setup(engine.setup, cells)))


def _train(job: Job, moves: Repartitioning, done: int, stop: int) -> int:
    """Simulate from drain to drain until the run has `stop` minibatches; return their number.

    `done` are those of the run so far.
    """
    while done < stop:
        done = moves.train(done, min(stop, job.periods.next_drain(done)))
        if done < stop:
            moves.drained(done)
    return done


def _minibatches_until(step: Step, job: Job, engine: SimulatedEngine, first: int) -> int:
    """Return the number of minibatches until a change: those that have begun by then.

    If layers may move, a trial simulation finds the moves. After the last move, time grows as under the last cuts.
    `first` are the minibatches of the run so far.
    """
    if step.minibatch is not None:
        return step.minibatch - first
    assert step.second is not None
    left_s, setup = step.second - engine.clock_s, engine.setup
    later_s = 0.0  # by how much longer the minibatches take than under the last cuts from the start on
    guess = max(1, int(left_s / _pace_s(setup)))
    if settings_of(setup.pipeline).balances:
        trial = SimulatedEngine(setup, known=engine.known)
        _train(job, Repartitioning(job, trial), first, first + guess)
        setup = moving(trial.setup, balances=False)
        later_s = trial.clock_s - _takes_s(job, setup, first, guess)
        guess = max(1, int((left_s - later_s) / _pace_s(setup)))
    return 1 + most_within(left_s - later_s, lambda count: _takes_s(job, setup, first, count), 2 * guess)


def _pace_s(setup: Setup) -> float:
    """Estimate the seconds per minibatch, without fill and drain."""
    per_epoch = setup.sampler.minibatches_per_epoch
    return simulate_segment(setup, per_epoch).end_s / per_epoch


def _takes_s(job: Job, setup: Setup, first: int, count: int) -> float:
    """Return the seconds of `count` minibatches without moves."""
    engine = SimulatedEngine(setup)
    _train(job, Repartitioning(job, engine), first, first + count)
    return engine.clock_s


def _points(period: ArchitecturePeriod) -> Iterator[Point]:
    """Yield points of a period's throughput: one per window, and one at its end."""
    known = {"active_layers": period.num_layers, _IDEAL: period.ideal_samples_per_s}
    samples, clock_s = float(period.samples[0]), period.begins_s
    for window in period.windows:
        samples, clock_s = samples + window * _WINDOW_S, clock_s + _WINDOW_S
        yield Point(round(samples), clock_s, {_RATE: window, **known})
    last = period.samples[1]
    yield Point(last, period.ends_s, {_RATE: (last - samples) / (period.ends_s - clock_s), **known})


def _with_peaks(job: Job, periods: Sequence[ArchitecturePeriod], result: RunResult) -> RunResult:
    """Return a result with predicted peaks over all architectures, and a note on the first that doesn't fit."""
    for period in periods:
        begins, ends = period.setups
        for setup in (begins, ends) if ends is not begins else (begins,):
            found = MemoryForecast(replace(job, setup=setup))
            result = found.with_peaks(result)
            if found.out_of_memory and MEMORY not in result.notes:
                where = f"with the {period.num_layers} layers that there are from {seconds(period.begins_s)} on"
                result = replace(result, notes={**result.notes, MEMORY: f"{where}: {found.out_of_memory}"})
    return result


def _file(search: SearchSetup, periods: Sequence[ArchitecturePeriod]) -> SearchFile:
    """Return the periods as a search's history, without scores."""
    names = search.architectures.names
    rows = [
        Trained(
            number=number, parent=None, minibatch=period.first, second=period.begins_s, samples=period.samples[0],
            cells=names(period.cells), changed=names(period.cells ^ before.cells), layers=period.num_layers, scores=[],
        )
        for number, (before, period) in enumerate(itertools.pairwise([periods[0], *periods]))
    ]  # fmt: skip
    return SearchFile(VERSION, individuals=rows)
