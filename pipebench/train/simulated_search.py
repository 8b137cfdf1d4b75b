"""A trace of architectures on the simulated engine: how fast training is between one change and the next.

Every change is at a drain. Each phase between two is simulated as a segment of its own, fill and drain included, under
the cuts there are: what the work in a stage comes to changes with its cells, the cuts don't.

With vPipe every stage decides anew what its layers do so that they fit in memory; and where it repartitions, layers
move to the cuts that its algorithms come to for the times that there are now. They move at the drain, and take the time
that their weights and the optimizer's state take on the links; what Algorithm 1 needs to find out isn't simulated.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from pipebench.engine.setup import Setup
from pipebench.model.plan import stage_of_layers
from pipebench.recipe.search_trace import VERSION, SearchFile, Trained
from pipebench.schedule.modes import AUTO
from pipebench.schedule.notation import STRAIGHT
from pipebench.search.architectures import Cells
from pipebench.search.search import SearchSetup
from pipebench.search.trace import Step
from pipebench.simulate.meter import Meter, fractions
from pipebench.simulate.steady import Totals, simulate_segment
from pipebench.simulate.timeline import Timeline
from pipebench.train.job import Job
from pipebench.train.metrics import byte_metrics, describe, describe_stages, recipe_notes
from pipebench.train.periods import Periods
from pipebench.train.plan import choose_plan
from pipebench.train.result import COMPLETED, Point, RunResult
from pipebench.train.watch import Watch


class Phase(NamedTuple):
    """What is simulated between two changes.

    Attributes:
        cells: the architecture.
        setup: what is run.
        begins_s: on the run's clock.
        first: minibatches of the run before it.
        num_minibatches: of it.
        totals: what it comes to.
        moved_bytes: what moved to other stages before it.
        moving_s: how long that took.
    """

    cells: Cells
    setup: Setup
    begins_s: float
    first: int
    num_minibatches: int
    totals: Totals
    moved_bytes: int = 0
    moving_s: float = 0.0


def simulate_search(job: Job, watch: Watch | None = None) -> tuple[RunResult, Timeline]:
    """Simulate a recipe's trace from its first change to the end of the run.

    Args:
        job: has a search with a trace.
        watch: foretells the peaks of memory of the first architecture.
    """
    search, setup = job.search, job.setup
    assert search is not None
    meter = Meter(setup.pipeline, *(watch.listeners if watch else ()))
    phases = [*_phases(job, search, meter)]
    end_s = phases[-1].begins_s + phases[-1].totals.end_s
    samples = [setup.sampler.samples_before(phase.first + phase.num_minibatches) for phase in phases]
    rates = [
        (after - before) / phase.totals.end_s
        for phase, before, after in zip(phases, [0, *samples], samples, strict=False)
    ]
    layers = [search.architectures.num_layers(phase.cells) for phase in phases]
    points = tuple(
        Point(
            after,
            phase.begins_s + phase.totals.end_s,
            {"throughput_samples_per_s": rate, "active_layers": count},
        )
        for phase, after, rate, count in zip(phases, samples, rates, layers, strict=True)
    )
    busy_s, stall_s, again_s = (
        sum(getattr(p.totals, name) for p in phases) for name in ("busy_s", "stall_s", "again_s")
    )
    num_bytes: Counter[tuple[str, str]] = sum((phase.totals.num_bytes for phase in phases), Counter())
    result = RunResult(
        **describe(job),
        outcome=COMPLETED,
        sentence=f"simulated {len(phases)} architectures, one after the other; nothing was trained or scored",
        metrics={
            "total_time_s": end_s,
            "throughput_samples_per_s": samples[-1] / end_s,
            "slowest_throughput_samples_per_s": min(rates),
            "samples_per_update": setup.pipeline.round_size(0) * setup.sampler.minibatch_size,
            "num_workers": setup.pipeline.num_workers,
            **byte_metrics(num_bytes, samples[-1]),
            **({} if job.recipe.parallelism.vpipe is None else _moves(phases)),
            **fractions(busy_s, stall_s, setup.pipeline.num_workers, end_s, again_s=again_s),
        },
        points=points,
        stages=tuple(describe_stages(job)),
        notes=recipe_notes(job),
        search=_file(search, phases, [0, *samples], layers),
    )
    return watch.with_peaks(result) if watch else result, meter.timeline()


def _moves(phases: Sequence[Phase]) -> dict[str, float]:
    """Return metrics of what moved."""
    moving = [phase for phase in phases if phase.moved_bytes]
    return {
        "repartitions": len(moving),
        "migration_bytes": sum(phase.moved_bytes for phase in moving),
        "migration_stall_s": sum(phase.moving_s for phase in moving),
    }


def _phases(job: Job, search: SearchSetup, meter: Meter) -> Iterator[Phase]:
    """Yield the phases of a run."""
    assert search.steps is not None
    total = Periods.of(job.recipe.train, job.setup.sampler.minibatches_per_epoch).total
    steps = [step for step in search.steps if step.minibatch or step.second]
    cells, setup, clock_s, first, moved_bytes, moving_s = search.first, job.setup, 0.0, 0, 0, 0.0
    for step in [*steps, Step(None if search.end_second else total, search.end_second, search.first)]:
        listener = meter if first == 0 else None
        count = min(total - first, _minibatches_until(step, setup, first, clock_s))
        if count > 0:
            totals = _simulated(setup, count, listener)
            yield Phase(cells, setup, clock_s, first, count, totals, moved_bytes, moving_s)
            first, clock_s = first + count, clock_s + totals.end_s
        before = search.architectures.setup(setup, step.cells)
        cells, setup = step.cells, _replanned(job, before)
        moved_bytes, moving_s = _moved(before, setup)
        clock_s += moving_s


def _replanned(job: Job, setup: Setup) -> Setup:
    """Return the setup of a new architecture as vPipe would have it; without vPipe, as it is.

    Raises:
        PlanError: a stage doesn't fit in memory any more, whatever its layers do.
    """
    vpipe, asked = job.recipe.parallelism.vpipe, job.recipe.parallelism
    if vpipe is None:
        return setup
    if vpipe.balances:
        # Cut for the times that the chosen policies make; where nothing is chosen, auto needn't be a straight pipeline.
        asked = replace(asked, plan=AUTO if vpipe.policies else STRAIGHT, cuts=None)
    else:
        names = [layer.name for layer in setup.graph.layers]
        asked = replace(asked, plan=STRAIGHT, cuts=[names[stage.start] for stage in setup.plan.stages[1:]])
    recipe = replace(job.recipe, parallelism=asked)
    plan = choose_plan(recipe, job.cluster, setup.graph, setup.profile, setup.dataset)
    return setup.under(replace(plan, depth=setup.plan.depth).on(setup.devices))


def _moved(before: Setup, after: Setup) -> tuple[int, float]:
    """Return the bytes that move to other stages with their layers, and how long all links together take for it."""
    rows = next(iter(after.profile.layers.values()))
    old, new = stage_of_layers(before.plan.stages), stage_of_layers(after.plan.stages)
    sent: Counter[tuple[int, int]] = Counter()
    for index, (source, target) in enumerate(zip(old, new, strict=True)):
        if source != target:
            per_byte = 1 + after.profile.state_bytes_per_byte
            sent[source, target] += sum(rows[index].parameter_sizes.values()) * per_byte
    firsts = after.pipeline.first_workers
    links = {edge: after.level_between(firsts[edge[0]], firsts[edge[1]]) for edge in sent}
    times = (links[edge].latency_s + count / links[edge].goodput_bytes_per_s for edge, count in sent.items())
    return sum(sent.values()), max(times, default=0.0)


def _minibatches_until(step: Step, setup: Setup, first: int, clock_s: float) -> int:
    """Return how many minibatches are trained on until a change: whole ones, the last of which ends after it."""
    if step.minibatch is not None:
        return step.minibatch - first
    assert step.second is not None
    per_epoch = setup.sampler.minibatches_per_epoch
    counts = range(1, per_epoch + 1)
    epochs, rest_s = divmod(step.second - clock_s, simulate_segment(setup, per_epoch).end_s)
    rest = counts[bisect_left(counts, rest_s, key=lambda count: simulate_segment(setup, count).end_s)]
    return max(1, int(epochs) * per_epoch + rest)


def _simulated(setup: Setup, num_minibatches: int, meter: Meter | None) -> Totals:
    """Return what a phase comes to, epoch by epoch where it is longer than one."""
    per_epoch = setup.sampler.minibatches_per_epoch
    epochs, rest = divmod(num_minibatches, per_epoch)
    parts = [simulate_segment(setup, per_epoch, meter)] * epochs if epochs else []
    if rest:
        parts.append(simulate_segment(setup, rest, None if parts else meter))
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.extended(part, 1)
    return whole


def _file(search: SearchSetup, phases: Sequence[Phase], samples: Sequence[int], layers: Sequence[int]) -> SearchFile:
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
