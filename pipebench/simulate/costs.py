"""What every instruction costs: the profile, summed over stages, in the form the simulator reads."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

from pipebench.model.plan import Plan
from pipebench.model.sampling import Size
from pipebench.profile.model import LayerProfile, Profile
from pipebench.schedule.modes import RECOMPUTE
from pipebench.simulate.memory import swapped_bytes

Crossing = Mapping[tuple[int, int], Mapping[Size, int]]  # by edge (source stage, target stage) and size of a unit
FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20  # DistributedDataParallel's defaults: a small first, then 25 MiB


@dataclass(frozen=True)
class SimulatedBucket:
    """Gradients that are all-reduced together.

    Attributes:
        num_bytes: their size.
        ready: fraction of the stage's backward after which the last of them exists.
        ready_in_part: likewise, of the weight part of a split backward.
        parameters: their qualified names, in the order the backward reaches them.
    """

    num_bytes: int
    ready: float
    parameters: tuple[str, ...] = ()
    ready_in_part: float = 1.0


@dataclass(frozen=True)
class StageCosts:
    """Seconds of one stage on one replica; mappings go from the number of samples in a unit, or its `Shape`.

    Attributes:
        forward_s: forward of one unit.
        backward_s: backward of one unit, recomputation included.
        weight_s: the part of it that computes gradients of weights and can wait, where backwards are split.
        load_s: loading one unit's inputs.
        update_s: one optimizer step.
        buckets: what is all-reduced per update, in order of readiness.
        buffer_bytes: buffers (BatchNorm statistics) averaged over the replicas at a drain.
        swap_bytes: what is copied to the host after one unit's forward, and back before its backward.
        again_s: the part of a unit's backward that computes forwards again.
    """

    forward_s: Mapping[Size, float]
    backward_s: Mapping[Size, float]
    weight_s: Mapping[Size, float]
    load_s: Mapping[Size, float]
    update_s: float
    buckets: tuple[SimulatedBucket, ...] = ()
    buffer_bytes: int = 0
    swap_bytes: Mapping[Size, int] = field(default_factory=dict)
    again_s: Mapping[Size, float] = field(default_factory=dict)


@dataclass(frozen=True)
class HostCosts:
    """What communication and loading take of a worker's own processor; nothing where a GPU computes.

    Attributes:
        message_s: seconds of a message, at each of its two ends.
        message_byte_s: likewise, per byte.
        ring_byte_s: seconds per byte that the worker sends in a ring all-reduce.
        fetches: whether the worker fetches its inputs itself, when it wants them; else they are fetched ahead.
        cores: how many the host's workers have to share; None where every thread has one of its own.
        threads: of each worker.
    """

    message_s: float = 0.0
    message_byte_s: float = 0.0
    ring_byte_s: float = 0.0
    fetches: bool = False
    cores: float | None = None
    threads: int = 1

    def message(self, num_bytes: int) -> float:
        """Return the seconds that one end of a message takes."""
        return self.message_s + self.message_byte_s * num_bytes

    def all_reduce(self, num_bytes: int, replicas: int) -> float:
        """Return the seconds that an all-reduce takes of each replica."""
        return self.ring_byte_s * num_bytes * 2 * (replicas - 1) / replicas


NO_HOST_COSTS = HostCosts()


@dataclass(frozen=True)
class Costs:
    """All costs of a pipeline.

    Attributes:
        stages: one per stage.
        activation_bytes: bytes that cross forward.
        gradient_bytes: likewise, back.
        values: per edge, as how many values of one size its messages come, forward and back: so much faster do they go
            where every value has a connection of its own. An edge that isn't there has one.
        host: what communication takes of the workers' processors.
    """

    stages: tuple[StageCosts, ...]
    activation_bytes: Crossing
    gradient_bytes: Crossing
    host: HostCosts = NO_HOST_COSTS
    values: Mapping[tuple[int, int], tuple[float, float]] = field(default_factory=dict)

    @property
    def num_parameters(self) -> int:
        """Parameters of the model that are trained, as tensors."""
        return sum(len(bucket.parameters) for stage in self.stages for bucket in stage.buckets)

    @property
    def most_samples(self) -> int:
        """The most samples of a unit."""
        return max(size for size in self.stages[0].forward_s if isinstance(size, int))


def stage_costs(profile: Profile, plan: Plan, update_cost: float = 1.0) -> Costs:
    """Sum a profile over the stages of a plan.

    Args:
        profile: layer costs at every size that travels.
        plan: which layers make a stage, what crosses, and whether a backward computes the forward again first.
        update_cost: what an update takes, in optimizer steps.
    """
    rows = next(iter(profile.layers.values()))
    loss = len(rows) - 1
    stages = []
    by_size, load_s = profile.by_size, profile.load_s_by_size
    nothing: dict[Size, int] = {0: 0}  # a short minibatch may leave a microbatch without samples
    for stage in plan.stages:
        memory = dict(zip(range(stage.start, stage.stop), stage.memory, strict=True))
        indices = [*memory, *([loss] if stage.stop == loss else [])]
        forward: dict[Size, float] = {n: sum(at[i].forward_s for i in indices) for n, at in by_size.items()}
        memory |= {loss: stage.memory[-1]} if stage.stop == loss else {}  # what ends with the last layer takes it in
        again = {index for index, policy in memory.items() if policy == RECOMPUTE}
        again_s: dict[Size, float] = {n: sum(at[i].forward_s for i in again) for n, at in by_size.items()}
        swapped: dict[Size, int] = {n: swapped_bytes(at, stage) for n, at in by_size.items()}
        backward = {n: sum(at[i].backward_s for i in indices) + again_s[n] for n, at in by_size.items()}
        weight = {n: sum(at[i].weight_s for i in indices) for n, at in by_size.items()}
        reads_inputs = any(rows[i].inputs for i in range(stage.start, stage.stop))
        load = {n: load_s.get(n, 0.0) if reads_inputs else 0.0 for n in by_size}
        buckets = _buckets(rows, range(stage.start, stage.stop), again)
        num_bytes = sum(bucket.num_bytes for bucket in buckets)  # a tied parameter counts once
        update = profile.update_floor_s + num_bytes * profile.update_s_per_byte * update_cost if num_bytes else 0.0
        buffer_bytes = sum({k: v for i in indices for k, v in rows[i].buffer_sizes.items()}.values())
        forward, backward, weight, load = (nothing | each for each in (forward, backward, weight, load))
        swapped, again_s = nothing | swapped, nothing | again_s
        stages.append(StageCosts(forward, backward, weight, load, update, buckets, buffer_bytes, swapped, again_s))
    activation, gradient = {}, {}
    for edge, producers in plan.crossings.items():
        activation[edge] = nothing | {n: sum(at[i].output_bytes for i in producers) for n, at in by_size.items()}
        gradient[edge] = nothing | {n: sum(at[i].gradient_bytes for i in producers) for n, at in by_size.items()}
    values = {
        edge: (
            as_values([rows[i].output_bytes for i in producers]),
            as_values([rows[i].gradient_bytes for i in producers]),
        )
        for edge, producers in plan.crossings.items()
    }
    return Costs(tuple(stages), activation, gradient, values=values)


def as_values(sizes: Sequence[int]) -> float:
    """Return how many values of the largest's size are as many bytes as these; one if they are none."""
    return sum(sizes) / max(sizes) if any(sizes) else 1.0


def _buckets(rows: tuple[LayerProfile, ...], indices: range, again: Container[int]) -> tuple[SimulatedBucket, ...]:
    """Group a stage's parameters in the order its backward reaches them (last layer first).

    Layers that are recomputed run forward again before the first of their run runs backward.
    """
    before_s = dict.fromkeys(indices, 0.0)  # what is computed again right before a layer's backward
    last_of_run = None
    for index in reversed(indices):
        last_of_run = (index if last_of_run is None else last_of_run) if index in again else None
        if last_of_run is not None:
            before_s[last_of_run] += rows[index].forward_s
    total_s = sum(rows[i].backward_s + before_s[i] for i in indices) or 1.0
    part_s = sum(rows[i].weight_s for i in indices) or 1.0
    buckets: list[SimulatedBucket] = []
    names: list[str] = []
    num_bytes, done_s, done_in_part_s = 0, 0.0, 0.0
    seen: set[str] = set()
    for index in reversed(indices):
        done_s += rows[index].backward_s + before_s[index]
        done_in_part_s += rows[index].weight_s
        fresh = {name: size for name, size in rows[index].parameter_sizes.items() if name not in seen}
        seen.update(fresh)
        names += fresh
        num_bytes += sum(fresh.values())
        if num_bytes >= (BUCKET_BYTES if buckets else FIRST_BUCKET_BYTES):
            ready, ready_in_part = min(1.0, done_s / total_s), min(1.0, done_in_part_s / part_s)
            buckets.append(SimulatedBucket(num_bytes, ready, tuple(names), ready_in_part))
            names, num_bytes = [], 0
    if names:
        buckets.append(SimulatedBucket(num_bytes, 1.0, tuple(names)))
    return tuple(buckets)
