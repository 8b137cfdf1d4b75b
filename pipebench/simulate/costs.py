"""Costs of every instruction: a profile summed over stages, as the simulator reads it."""

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipebench.model.plan import Plan, tied_parameters
from pipebench.model.sampling import Size
from pipebench.profile.model import LayerProfile, Profile
from pipebench.profile.tensor import unit_bytes
from pipebench.schedule.modes import RECOMPUTE
from pipebench.simulate.memory import swapped_bytes
from pipebench.simulate.timeline import TENSOR

Crossing = Mapping[tuple[int, int], Mapping[Size, int]]  # by edge (source stage, target stage) and size of a unit
FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20  # DistributedDataParallel's defaults: a small first, then 25 MiB


@dataclass(frozen=True)
class SimulatedBucket:
    """Gradients that are all-reduced together."""

    num_bytes: int
    ready: float  # fraction of the stage's backward after which the last of them exists
    parameters: tuple[str, ...] = ()  # qualified names, in the order in which the backward reaches them
    ready_in_part: float = 1.0  # as `ready`, of the weight part of a split backward


@dataclass(frozen=True)
class StageCosts:
    """Seconds and bytes of one stage on one replica, by size of a unit: its number of samples or its `UnitShape`."""

    forward_s: Mapping[Size, float]  # of one unit
    backward_s: Mapping[Size, float]  # of one unit, recomputation included
    # Part of `backward_s` that computes gradients of weights and can wait, if backwards are split
    weight_s: Mapping[Size, float]
    load_s: Mapping[Size, float]  # of one unit's inputs
    update_s: float  # of one optimizer step
    buckets: tuple[SimulatedBucket, ...] = ()  # all-reduced per update, in order of readiness
    buffer_bytes: int = 0  # buffers (BatchNorm statistics) averaged over the replicas at a drain
    # Copied to the host after one unit's forward, and back before its backward
    swap_bytes: Mapping[Size, int] = field(default_factory=dict)
    again_s: Mapping[Size, float] = field(default_factory=dict)  # part of `backward_s` that recomputes forwards
    tied_bytes: int = 0  # of its copies of weights that other stages have, too; in no bucket
    # That the devices of a worker send each other for one unit, recomputation included
    tensor_bytes: Mapping[Size, int] = field(default_factory=dict)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of its trained parameters."""
        return sum(bucket.num_bytes for bucket in self.buckets) + self.tied_bytes


@dataclass(frozen=True)
class SharedProcessors:
    """Processors that workers share: a host's cores, all of them one processor, or GPUs, each with one queue."""

    capacity: float  # threads that one runs at full speed at once
    threads: int = 1  # per worker
    processors: tuple[int, ...] = ()  # by worker, the number of its processor, from 0; if empty, all workers are on one


@dataclass(frozen=True)
class HostCosts:
    """What communication and loading cost a worker's own processor, all 0 if a GPU computes; and who shares one."""

    message_s: float = 0.0  # per message, at each end
    message_byte_s: float = 0.0  # per byte, likewise
    ring_byte_s: float = 0.0  # per byte that the worker sends in a ring all-reduce
    fetches: bool = False  # whether the worker fetches its inputs itself, on demand; else they are prefetched
    shared: SharedProcessors | None = None  # None: every thread has its processor to itself

    def message(self, num_bytes: int) -> float:
        """Return the seconds of one end of a message."""
        return self.message_s + self.message_byte_s * num_bytes

    def all_reduce(self, num_bytes: int, replicas: int) -> float:
        """Return the seconds of a sum on each replica."""
        return self.ring_byte_s * num_bytes * 2 * (replicas - 1) / replicas

    def exchange(self, num_bytes: int, replicas: int) -> float:
        """Return the seconds of a scatter or a gather on each replica: half a sum, by messages to and from all others.

        Nothing is exchanged without bytes.
        """
        return self.all_reduce(num_bytes, replicas) / 2 + 2 * (replicas - 1) * self.message_s * (num_bytes > 0)


NO_HOST_COSTS = HostCosts()


@dataclass(frozen=True)
class Costs:
    """All costs of a pipeline."""

    stages: tuple[StageCosts, ...]
    activation_bytes: Crossing  # bytes that cross forward
    gradient_bytes: Crossing  # bytes that cross back
    host: HostCosts = NO_HOST_COSTS
    # Per edge, equal values per message, forward and back (default 1): faster with one connection per value
    values: Mapping[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    ties: tuple[SimulatedBucket, ...] = ()  # gradients summed over the copies of every tie of `Pipeline.ties`
    slices: int = 1  # devices that a worker stands for; what is here is of one of them, but `tensor_bytes`

    @property
    def num_parameters(self) -> int:
        """Trained parameter tensors of the model."""
        buckets = [*self.ties, *(bucket for stage in self.stages for bucket in stage.buckets)]
        return sum(len(bucket.parameters) for bucket in buckets)

    @property
    def most_samples(self) -> int:
        """The largest number of samples of a unit."""
        return max(size for size in self.stages[0].forward_s if isinstance(size, int))

    def of_all_devices(
        self, num_bytes: Mapping[tuple[str, str], int], samples: int, inside: str
    ) -> Counter[tuple[str, str]]:
        """Return bytes by (kind, level) of all devices, given those of the first of every worker, with its slices'.

        What slices send each other over level `inside` grows with the samples trained on.
        """
        found = Counter({key: self.slices * count for key, count in num_bytes.items()})
        if self.slices > 1:
            size = self.most_samples
            found[TENSOR, inside] = round(sum(stage.tensor_bytes[size] for stage in self.stages) * samples / size)
        return found


def stage_costs(profile: Profile, plan: Plan, steps: Sequence[float] = (), *, sharded: bool = False) -> Costs:
    """Sum a profile over a plan's stages, whose updates take `steps` optimizer steps (1), of a shard if sharded."""
    rows = profile.rows
    loss = len(rows) - 1
    stages = []
    by_size, load_s, loading = profile.by_size, profile.load_s_by_size, loading_stages(plan, rows)
    readers = sum(plan.stages[index].replicas for index in loading)
    share = profile.loaders / shared_loaders(profile.loaders, readers) if profile.loaders and readers else 1.0
    nothing: dict[Size, int] = {0: 0}  # a short minibatch may leave a microbatch without samples
    tied = tied_parameters(rows, plan)
    apart = {name for names in tied.values() for name in names}
    for index, stage in enumerate(plan.stages):
        memory = dict(zip(range(stage.start, stage.stop), stage.memory, strict=True))
        indices = [*memory, *([loss] if stage.stop == loss else [])]
        forward: dict[Size, float] = {n: sum(at[i].forward_s for i in indices) for n, at in by_size.items()}
        memory |= {loss: stage.memory[-1]} if stage.stop == loss else {}  # the loss goes with the last layer
        again = {index for index, policy in memory.items() if policy == RECOMPUTE}
        again_s: dict[Size, float] = {n: sum(at[i].forward_s for i in again) for n, at in by_size.items()}
        swapped: dict[Size, int] = {n: swapped_bytes(at, stage) for n, at in by_size.items()}
        backward = {n: sum(at[i].backward_s for i in indices) + again_s[n] for n, at in by_size.items()}
        weight = {n: sum(at[i].weight_s for i in indices) for n, at in by_size.items()}
        load = {n: load_s.get(n, 0.0) * share if index in loading else 0.0 for n in by_size}
        buckets = _buckets(rows, indices, again, apart)
        tied_bytes = _num_bytes(rows[stage.start : stage.stop], apart)
        num_bytes = sum(bucket.num_bytes for bucket in buckets) + tied_bytes
        stepped = num_bytes / stage.replicas if sharded else num_bytes
        stepped *= steps[index] if steps else 1.0
        update = profile.update_floor_s + stepped * profile.update_s_per_byte if num_bytes else 0.0
        buffer_bytes = sum({k: v for i in indices for k, v in rows[i].buffer_sizes.items()}.values())
        forward, backward, weight, load = (nothing | each for each in (forward, backward, weight, load))
        swapped, again_s = nothing | swapped, nothing | again_s
        repeated = [place for place, index in enumerate(indices) if index in again]
        tensor = {n: unit_bytes([at[i] for i in indices], profile.slices, repeated) for n, at in by_size.items()}
        stages.append(
            StageCosts(
                forward, backward, weight, load, update, buckets, buffer_bytes, swapped, again_s, tied_bytes, tensor
            )
        )
    ties = tuple(SimulatedBucket(_num_bytes(rows, names), 1.0, tuple(names)) for names in tied.values())
    return _with_crossings(Costs(tuple(stages), {}, {}, ties=ties, slices=profile.slices), plan, profile)


def loading_stages(plan: Plan, rows: Sequence[LayerProfile]) -> tuple[int, ...]:
    """Return the stages that read the data set; `rows` are the plan's layers, at any size, and the loss."""
    found = [
        index for index, stage in enumerate(plan.stages) if any(row.inputs for row in rows[stage.start : stage.stop])
    ]
    return reading(plan, found, with_targets=rows[-1].reads_samples)


def reading(plan: Plan, inputs: Sequence[int], *, with_targets: bool) -> tuple[int, ...]:
    """Return the stages that read samples: for inputs, and the last for targets unless one of these is beside it."""
    beside = any(plan.stages[index].devices == plan.stages[-1].devices for index in inputs)
    return (*inputs, len(plan.stages) - 1) if with_targets and not beside else (*inputs,)


def shared_loaders(loaders: int, readers: int) -> int:
    """Return the loader processes of each of so many workers that read: the data set's number divided among them."""
    return min(loaders, max(1, loaders // readers))


def _with_crossings(costs: Costs, plan: Plan, profile: Profile) -> Costs:
    """Return costs with those of the values that cross a plan's cuts."""
    nothing: dict[Size, int] = {0: 0}
    rows, by_size = profile.rows, profile.by_size
    activation, gradient, values = {}, {}, {}
    for edge, producers in plan.crossings.items():
        activation[edge] = nothing | {n: sum(at[i].output_bytes for i in producers) for n, at in by_size.items()}
        gradient[edge] = nothing | {n: sum(at[i].gradient_bytes for i in producers) for n, at in by_size.items()}
        sent, returned = [rows[i].output_bytes for i in producers], [rows[i].gradient_bytes for i in producers]
        values[edge] = as_values(sent), as_values(returned)
    return replace(costs, activation_bytes=activation, gradient_bytes=gradient, values=values)


def _num_bytes(rows: Sequence[LayerProfile], names: Container[str]) -> int:
    """Return the bytes of those parameters of some layers that have one of the names."""
    sizes = {name: size for row in rows for name, size in row.parameter_sizes.items() if name in names}
    return sum(sizes.values())


def as_values(sizes: Sequence[int]) -> float:
    """Return the total over the largest size: how many equal values are as many bytes; 1 if there are none."""
    return sum(sizes) / max(sizes) if any(sizes) else 1.0


def _buckets(
    rows: tuple[LayerProfile, ...], indices: Sequence[int], again: Container[int], apart: Container[str]
) -> tuple[SimulatedBucket, ...]:
    """Group a stage's parameters but those `apart`, in the order in which its backward reaches them, last layer first.

    `indices` are of its layers, the loss included.

    A run of recomputed layers repeats its forwards before its first backward.
    """
    before_s = dict.fromkeys(indices, 0.0)  # recomputed right before a layer's backward
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
        fresh = {n: size for n, size in rows[index].parameter_sizes.items() if n not in seen and n not in apart}
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
