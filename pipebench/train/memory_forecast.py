"""Predicted memory of a job over time, on the simulator's clock for every engine, with advice if it is too much.

Of a segment between two drains only fill, a few periods and drain are simulated, which have the peaks of the whole. The
first update makes the optimizer's state. If segments are so short that the pipeline isn't full again after it in the
first one, the peak comes later: then the segment is simulated with that state from its start, or, if all later segments
are shorter than the first, so is the longest of these besides the first one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from pipebench.formats import a_or_an, num_bytes, percent, seconds
from pipebench.model.allocator import allocator_of
from pipebench.schedule.modes import RECOMPUTE, SWAP
from pipebench.schedule.orders import ALL_FORWARDS
from pipebench.schedule.pipeline import SPLIT, Pipeline
from pipebench.schedule.weights import update_costs
from pipebench.simulate.costs import stage_costs
from pipebench.simulate.kinds import WHATEVER_SIZE
from pipebench.simulate.memory import stage_memories
from pipebench.simulate.memory_meter import MemoryMeter, MemoryPeak, MemoryTimeline
from pipebench.simulate.meter import Listener, Meter
from pipebench.simulate.occupancy import Occupancy, OccupancyMeter
from pipebench.simulate.steady import simulate_segment
from pipebench.train.job import Job
from pipebench.train.largest import most_within
from pipebench.train.profiled_model import input_bytes
from pipebench.train.result import RunResult

# What is advised after a worker ran out of memory needs at most this fraction of the predicted peak of the run that
# did: predictions are about that exact.
_LESS = 0.9
_MOST_MINIBATCHES = 32  # simulated for that advice
_NUM_KINDS = 4  # the largest, named in an out-of-memory message


@dataclass(frozen=True)
class Moved:
    """Workers' memory after the first cuts, in a run whose layers move."""

    between: Sequence[MemoryPeak]  # peaks while layers move, and between the first move and the last
    last: MemoryTimeline  # under the last cuts


class MemoryForecast:
    """The memory and occupancy of a job's workers over its longest segment between two drains, simulated."""

    moved: Moved | None = None  # None if layers stay

    def __init__(self, job: Job) -> None:
        self._job = job
        self._num_minibatches = job.periods.longest_segment
        self._occupancy = OccupancyMeter(job.setup.pipeline)
        self.memory = _memory(job, self._num_minibatches, self._occupancy)

    def occupancy(self, num_parts: int) -> Occupancy:
        """Return the use of the workers' time, in `num_parts` parts."""
        return self._occupancy.occupancy(num_parts)

    @property
    def sentence(self) -> str:
        """The workers' peak memory, in one sentence."""
        if self.out_of_memory:
            return self.out_of_memory
        fullest, limit = self.memory.fullest, self.memory.limit_bytes
        of = "" if limit is None else f", {percent(fullest.num_bytes / limit)} of the {num_bytes(limit)} of a device"
        where = f"worker {fullest.worker} ({self.memory.worker_names[fullest.worker]})"
        return f"{num_bytes(fullest.num_bytes)} at most on {where}, {fullest.when}{of}"

    @cached_property
    def out_of_memory(self) -> str:
        """Where, when and by how much memory doesn't suffice, and what would fit, in one sentence; "" if it does."""
        found, limit = self.memory.overflow, self.memory.limit_bytes
        if found is None or limit is None:
            return self._out_of_host_memory
        kinds = sorted(found.by_kind.items(), key=lambda pair: -pair[1])
        named = ", ".join(f"{kind} {num_bytes(size)}" for kind, size in kinds[:_NUM_KINDS])
        more = f" and {len(kinds) - _NUM_KINDS} more kinds" if len(kinds) > _NUM_KINDS else ""
        fullest, later = self.memory.fullest, ""
        if fullest.num_bytes > found.num_bytes:
            whose = "it" if fullest.worker == found.worker else f"worker {fullest.worker}"
            later = f", and later {whose} needs {num_bytes(fullest.num_bytes)}"
        fitting = [*_what_would_fit(self._job, limit, self._num_minibatches)]
        help_ = ", or ".join([*_smaller_minibatches(self._job, self.memory.peaks, limit), "more stages"])
        advice = f"would fit: {', or '.join(fitting)}" if fitting else f"would help: {help_}"
        when = (
            "after the first update" if _is_later(self._job, self._num_minibatches) else f"at {seconds(found.time_s)}"
        )
        return (
            f"out of memory {when}, {found.when}: worker {found.worker} "
            f"({self.memory.worker_names[found.worker]}) needs {num_bytes(found.num_bytes)} of the {num_bytes(limit)} "
            f"of {a_or_an(self._job.cluster.device)} ({named}{more}){later}; what {advice}"
        )

    @property
    def _out_of_host_memory(self) -> str:
        """A sentence if a host has too little memory for the peaks of its workers' swapped activations, else "".

        Their sum is an upper bound, since the peaks needn't coincide.
        """
        cluster, outermost = self._job.cluster, len(self._job.cluster.levels) - 1
        on_host: dict[int, int] = {}
        for device, peak in zip(self._job.setup.devices, self.memory.host_peaks, strict=True):
            host = cluster.component(device, outermost)
            on_host[host] = on_host.get(host, 0) + peak
        fullest = max(on_host, key=on_host.__getitem__)
        if cluster.host_memory_bytes is None or on_host[fullest] <= cluster.host_memory_bytes:
            return ""
        return (
            f"out of memory on host {fullest}: its workers swap {num_bytes(on_host[fullest])}, and it has "
            f"{num_bytes(cluster.host_memory_bytes)}; what would help: fewer layers that swap, smaller minibatches"
        )

    def with_peaks(self, result: RunResult) -> RunResult:
        """Return the result of an untrained run with the predicted peaks, or its own where they are higher."""
        pipeline = self._job.setup.pipeline
        result = with_peaks(result, pipeline, self.memory.peaks)
        swaps = pipeline.swaps
        return _with_highest(result, pipeline, "host_peak_bytes", self.memory.host_peaks, swaps) if swaps else result


def with_peaks(result: RunResult, pipeline: Pipeline, peaks: Sequence[MemoryPeak]) -> RunResult:
    """Return a result with the peaks of all workers, or its own where they are higher."""
    held = [peak.num_bytes for peak in peaks]
    return _with_highest(result, pipeline, "peak_memory_bytes", held, range(pipeline.num_stages))


def _with_highest(
    result: RunResult, pipeline: Pipeline, name: str, held: Sequence[int], stages: Sequence[int]
) -> RunResult:
    """Return a result in which metric `name` of some stages, and its maximum, are raised to what workers `held`."""
    most = {stage: max(held[worker] for worker in pipeline.places[stage]) for stage in stages}
    rows = tuple(
        {**row, name: max(row.get(name, 0), most[row["index"]])} if row["index"] in most else row
        for row in result.stages
    )
    largest = max(result.metrics.get(f"{name}_max", 0), *held)
    return replace(result, stages=rows, metrics={**result.metrics, f"{name}_max": largest})


def _memory(job: Job, num_minibatches: int, *listeners: Listener) -> MemoryTimeline:
    """Return workers' memory over a simulated segment, followed by a later one if that may take more."""
    later = job.periods.longest_later_segment
    found = _segment_memory(job, num_minibatches, listeners, has_state=_is_later(job, num_minibatches))
    if _is_short(job, num_minibatches) and 0 < later < num_minibatches:
        found = found.followed_by(_segment_memory(job, later, (), has_state=True))
    return found


def _is_later(job: Job, num_minibatches: int) -> bool:
    """Return whether a segment is simulated with the optimizer's state from its start, as a later one has it.

    So it is if the segment is short and a later one is as long.
    """
    return _is_short(job, num_minibatches) and num_minibatches <= job.periods.longest_later_segment


def _is_short(job: Job, num_minibatches: int) -> bool:
    """Return whether a segment may end before every stage is full again after its first update."""
    p = job.setup.pipeline
    return num_minibatches < 2 * max(map(p.round_size, range(p.num_stages))) + p.depth * p.replicas[0]


def _segment_memory(
    job: Job, num_minibatches: int, listeners: Sequence[Listener], *, has_state: bool
) -> MemoryTimeline:
    setup, pipeline = job.setup, job.setup.pipeline
    inputs = input_bytes(setup.graph, setup.dataset, job.profile.by_size)
    memories = stage_memories(job.profile, setup.plan, pipeline, inputs)
    meter = MemoryMeter(pipeline, memories, setup.costs, job.cluster.memory_bytes)
    if has_state:
        meter.have_state()
    simulate_segment(setup, num_minibatches, Meter(pipeline, meter, *listeners))
    return meter.timeline()


def _with_policy(job: Job, policy: str) -> Job:
    """Return a job with one memory policy for all layers."""
    setup, pipeline = job.setup, job.setup.pipeline
    stages = (replace(stage, memory=(policy,) * len(stage.memory)) for stage in setup.plan.stages)
    plan = replace(setup.plan, stages=tuple(stages))
    costs = stage_costs(job.profile, plan, update_costs(pipeline), sharded=pipeline.is_sharded)
    swapping = replace(pipeline, swaps=tuple(range(pipeline.num_stages)) if policy == SWAP else ())
    return replace(job, setup=replace(setup, plan=plan, pipeline=swapping, costs=costs))


def _at_depth(job: Job, depth: int) -> Job:
    setup = job.setup
    plan, pipeline = replace(setup.plan, depth=depth), replace(setup.pipeline, depth=depth)
    return replace(job, setup=replace(setup, plan=plan, pipeline=pipeline))


def what_would_help(job: Job) -> str:
    """Return a sentence on what would help after a worker ran out of memory, by the memory model."""
    count = min(job.setup.sampler.minibatches_per_epoch, _MOST_MINIBATCHES)
    allocator = allocator_of(job.setup.device)
    total = None if allocator is None else allocator.total_bytes
    now = _memory(job, count)
    less = round(_LESS * now.fullest.num_bytes)
    limit = min(size for size in (job.cluster.memory_bytes, total, less) if size is not None)
    fitting = [*_what_would_fit(job, limit, count), *_smaller_minibatches(job, now.peaks, limit)]
    return f"what would help: {', '.join(fitting)}{', or' if fitting else ''} more stages (parallelism.plan)"


def _smaller_minibatches(job: Job, peaks: Sequence[MemoryPeak], limit: int) -> Iterator[str]:
    """Yield the largest minibatch with which all workers fit, if any; activations are in proportion to its size."""
    size, pieces = job.recipe.train.minibatch_size, job.setup.pipeline.microbatches
    fitting = size // pieces
    for peak in peaks:
        fixed = sum(num for kind, num in peak.by_kind.items() if kind in WHATEVER_SIZE)
        if peak.num_bytes > max(limit, fixed):
            fitting = min(fitting, (limit - fixed) * size // ((peak.num_bytes - fixed) * pieces))
        elif peak.num_bytes > limit:
            fitting = 0
    if fitting >= 1:
        yield f"train.minibatch_size: {fitting * pieces}"


def _what_would_fit(job: Job, limit: int, num_minibatches: int) -> Iterator[str]:
    """Yield changes that fit in memory: recomputation, swapping, and the largest smaller depth."""
    pipeline = job.setup.pipeline

    def needs(changed: Job) -> int:
        return _memory(changed, num_minibatches).fullest.num_bytes

    policies = {*job.setup.plan.memory}
    if policies != {RECOMPUTE} and needs(_with_policy(job, RECOMPUTE)) <= limit:
        yield "parallelism.recompute: true"
    can_swap = job.cluster.pcie_bytes_per_s is not None and pipeline.backward != SPLIT
    if can_swap and policies != {SWAP} and needs(_with_policy(job, SWAP)) <= limit:
        yield "parallelism.swap_layers: ['*']"
    if job.recipe.parallelism.row.depth is None and pipeline.order != ALL_FORWARDS and pipeline.depth > 1:
        depth = most_within(limit, lambda depth: needs(_at_depth(job, depth)), pipeline.depth - 1)
        if depth:
            yield f"parallelism.depth: {depth}"
