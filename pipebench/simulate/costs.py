"""Costs of every instruction: a profile summed over stages, for the simulator."""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from pipebench.model.plan import Plan, StagePlan, tied_parameters
from pipebench.model.sampling import Size
from pipebench.profile.model import LayerProfile, Profile
from pipebench.profile.tensor import unit_bytes
from pipebench.schedule.modes import RECOMPUTE
from pipebench.simulate.memory import swapped_bytes
from pipebench.simulate.timeline import TENSOR

Crossing = Mapping[tuple[int, int], Mapping[Size, int]]  # by edge (source stage, target stage) and size of a unit
# DistributedDataParallel's defaults
FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20


@dataclass(frozen=True)
class SimulatedBucket:
    """Gradients that are all-reduced together."""

    num_bytes: int
    ready: float  # fraction of the stage's backward after which the last of them exists
    parameters: tuple[str, ...] = ()  # qualified names, in the order in which the backward reaches them
    ready_in_part: float = 1.0  # if backwards are split: the fraction of the weight part


@dataclass(frozen=True)
class StageCosts:
    """Seconds and bytes of one stage on one replica, by size of a unit: its number of samples or its `UnitShape`."""

    forward_s: Mapping[Size, float]  # of one unit
    backward_s: Mapping[Size, float]  # of one unit, recomputation included
    weight_s: Mapping[Size, float]  # weight part of `backward_s`, which can be delayed if backwards are split
    load_s: Mapping[Size, float]  # of one unit's inputs
    update_s: float  # of one optimizer step
    buckets: tuple[SimulatedBucket, ...] = ()  # all-reduced per update, in order of readiness
    buffer_bytes: int = 0  # buffers (BatchNorm statistics) averaged over the replicas at a drain
    # Of one unit, copied to the host after its forward, and back before its backward
    swap_bytes: Mapping[Size, int] = field(default_factory=dict)
    again_s: Mapping[Size, float] = field(default_factory=dict)  # part of `backward_s` that recomputes forwards
    tied_bytes: int = 0  # of its copies of weights that are tied between stages and are in no bucket
    # Sent for one unit between the devices of a worker whose layers are sliced, recomputation included
    tensor_bytes: Mapping[Size, int] = field(default_factory=dict)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of its trained parameters."""
        return sum(bucket.num_bytes for bucket in self.buckets) + self.tied_bytes


@dataclass(frozen=True)
class SharedProcessors:
    """Processors that workers share: all cores of a host are one processor; a GPU is one with a single queue."""

    capacity: float  # threads that a processor runs at full speed at once
    threads: int = 1  # per worker
    processors: tuple[int, ...] = ()  # index of every worker's processor; empty: all workers share one


@dataclass(frozen=True)
class HostCosts:
    """Seconds that communication and loading take of a worker's own processor; all 0 if a GPU computes."""

    message_s: float = 0.0  # per message, at each end
    message_byte_s: float = 0.0  # per byte of a message, at each end
    ring_byte_s: float = 0.0  # per byte that the worker sends in a ring all-reduce
    fetches: bool = False  # whether the worker loads its inputs itself when it needs them; else they are prefetched
    shared: SharedProcessors | None = None  # None: every thread has a core of its own

    def message(self, num_bytes: int) -> float:
        """Return the seconds of one end of a message."""
        return self.message_s + self.message_byte_s * num_bytes

    def all_reduce(self, num_bytes: int, replicas: int) -> float:
        """Return the seconds of a sum on each replica."""
        return self.ring_byte_s * num_bytes * 2 * (replicas - 1) / replicas

    def exchange(self, num_bytes: int, replicas: int) -> float:
        """Return the seconds of a scatter or a gather on each replica: half a sum, and messages to and from all others.

        0 if there are no bytes.
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
    # By edge, the number of equal values per message, forward and back; 1 by default. Each may have a connection.
    values: Mapping[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    # Gradients summed over the copies of every tie of `Pipeline.ties`; no bytes if these are sharded, see `stage_costs`
    ties: tuple[SimulatedBucket, ...] = ()
    slices: int = 1  # devices that a worker stands for; all costs but `tensor_bytes` are of one of them

    @property
    def num_parameters(self) -> int:
        """Trained parameter tensors of the model."""
        buckets = [*self.ties, *(bucket for stage in self.stages for bucket in stage.buckets)]
        return len({name for bucket in buckets for name in bucket.parameters})

    @property
    def most_samples(self) -> int:
        """The largest number of samples of a unit."""
        return max(size for size in self.stages[0].forward_s if isinstance(size, int))

    def of_all_devices(
        self, num_bytes: Mapping[tuple[str, str], int], samples: int, inside: str
    ) -> Counter[tuple[str, str]]:
        """Return the bytes sent by all devices by (kind, level), given those of the first device of every worker.

        Adds the bytes that slices send each other over level `inside`, which are proportional to the samples trained
        on.
        """
        found = Counter({key: self.slices * count for key, count in num_bytes.items()})
        if self.slices > 1:
            size = self.most_samples
            found[TENSOR, inside] = round(sum(stage.tensor_bytes[size] for stage in self.stages) * samples / size)
        return found


def stage_costs(profile: Profile, plan: Plan, steps: Sequence[float] = (), *, sharded: bool = False) -> Costs:
    """Return the costs of a plan: a profile summed over its stages.

    A weight that several stages share is summed over their copies apart from the stages' buckets. If replicas are
    sharded, it is a bucket of its own in each of these stages. Replicas then divide all its copies alike, so each adds
    the sums of its shards without a message.

    Args:
        profile: layers in the plan's order.
        plan: its stages.
        steps: optimizer steps that an update of each stage costs; empty: 1.
        sharded: whether a replica updates a shard of the parameters.
    """
    rows, by_size = profile.rows, profile.by_size
    loading = loading_stages(plan, rows)
    readers = sum(plan.stages[index].replicas for index in loading)
    loads = profile.loaders / shared_loaders(profile.loaders, readers) if profile.loaders and readers else 1.0
    one_s = profile.load_s_by_size
    load_s = _NOTHING | {n: one_s.get(n, 0.0) * loads for n in by_size}
    tied = tied_parameters(rows, plan)
    stages = []
    for index, stage in enumerate(plan.stages):
        loads_s = load_s if index in loading else dict.fromkeys(load_s, 0.0)
        update_s = partial(_update_s, profile, stage.replicas if sharded else 1, steps[index] if steps else 1.0)
        own = _as_buckets(rows, (names for sharing, names in tied.items() if index in sharing))
        made = _costs_of(profile, by_size, stage, loads_s, update_s, own)
        stages.append(replace(made, buckets=(*made.buckets, *own), tied_bytes=0) if sharded else made)
    ties = _as_buckets(rows, tied.values())
    ties = tuple(replace(each, num_bytes=0) for each in ties) if sharded else ties
    return _with_crossings(Costs(tuple(stages), {}, {}, ties=ties, slices=profile.slices), plan, profile)


_NOTHING: dict[Size, int] = {0: 0}  # a short minibatch may leave a microbatch without samples


def _costs_of(
    profile: Profile,
    by_size: Mapping[Size, tuple[LayerProfile, ...]],
    stage: StagePlan,
    load_s: Mapping[Size, float],
    update_s: Callable[[int], float],
    tied: tuple[SimulatedBucket, ...],
) -> StageCosts:
    """Return a stage's costs.

    Args:
        profile: of the model.
        by_size: its rows by size.
        stage: its layers and their memory policies.
        load_s: seconds of loading, by size.
        update_s: returns the seconds of an update, given the bytes of the stage's parameters.
        tied: its copies of tied parameters, which are in none of its buckets.
    """
    rows, policies = profile.rows, stage.memory
    if stage.stop == len(rows) - 1:
        policies = (*policies, policies[-1])  # the loss goes with the last layer
    indices = range(stage.start, stage.stop + (stage.stop == len(rows) - 1))
    again = {index for index, policy in zip(indices, policies, strict=True) if policy == RECOMPUTE}
    repeated = [place for place, index in enumerate(indices) if index in again]
    again_s = {n: sum(at[i].forward_s for i in again) for n, at in by_size.items()}
    buckets = _buckets(rows, indices, again, {name for bucket in tied for name in bucket.parameters})
    num_bytes = sum(bucket.num_bytes for bucket in (*buckets, *tied))
    return StageCosts(
        forward_s=_NOTHING | {n: sum(at[i].forward_s for i in indices) for n, at in by_size.items()},
        backward_s=_NOTHING | {n: sum(at[i].backward_s for i in indices) + again_s[n] for n, at in by_size.items()},
        weight_s=_NOTHING | {n: sum(at[i].weight_s for i in indices) for n, at in by_size.items()},
        load_s=load_s,
        update_s=update_s(num_bytes),
        buckets=buckets,
        buffer_bytes=sum({k: v for i in indices for k, v in rows[i].buffer_sizes.items()}.values()),
        swap_bytes=_NOTHING | {n: swapped_bytes(at, stage) for n, at in by_size.items()},
        again_s=_NOTHING | again_s,
        tied_bytes=sum(bucket.num_bytes for bucket in tied),
        tensor_bytes={n: unit_bytes([at[i] for i in indices], profile.slices, repeated) for n, at in by_size.items()},
    )


def _update_s(profile: Profile, shards: int, steps: float, num_bytes: int) -> float:
    """Return the seconds of an update of a replica's shard of parameters that takes several optimizer steps."""
    stepped = num_bytes / shards * steps
    return profile.update_floor_s + stepped * profile.update_s_per_byte if num_bytes else 0.0


def loading_stages(plan: Plan, rows: Sequence[LayerProfile]) -> tuple[int, ...]:
    """Return the stages that read the data set; `rows` are the plan's layers, at any size, and the loss."""
    found = [
        index for index, stage in enumerate(plan.stages) if any(row.inputs for row in rows[stage.start : stage.stop])
    ]
    return reading(plan, found, with_targets=rows[-1].reads_samples)


def reading(plan: Plan, inputs: Sequence[int], *, with_targets: bool) -> tuple[int, ...]:
    """Return the stages that read samples: `inputs`, and the last for targets unless its devices read inputs."""
    beside = any(plan.stages[index].devices == plan.stages[-1].devices for index in inputs)
    return (*inputs, len(plan.stages) - 1) if with_targets and not beside else (*inputs,)


def shared_loaders(loaders: int, readers: int) -> int:
    """Return the loader processes of each of the workers that read: the data set's divided by `readers`, at least 1."""
    return min(loaders, max(1, loaders // readers))


def _with_crossings(costs: Costs, plan: Plan, profile: Profile) -> Costs:
    """Return costs with the bytes and numbers of values that cross a plan's cuts."""
    rows, by_size = profile.rows, profile.by_size
    activation, gradient, values = {}, {}, {}
    for edge, producers in plan.crossings.items():
        activation[edge] = _NOTHING | {n: sum(at[i].output_bytes for i in producers) for n, at in by_size.items()}
        gradient[edge] = _NOTHING | {n: sum(at[i].gradient_bytes for i in producers) for n, at in by_size.items()}
        sent, returned = [rows[i].output_bytes for i in producers], [rows[i].gradient_bytes for i in producers]
        values[edge] = as_values(sent), as_values(returned)
    return replace(costs, activation_bytes=activation, gradient_bytes=gradient, values=values)


def _as_buckets(rows: Sequence[LayerProfile], ties: Iterable[Sequence[str]]) -> tuple[SimulatedBucket, ...]:
    """Return a bucket of the parameters of every tie, given their names."""
    sizes = {name: size for row in rows for name, size in row.parameter_sizes.items()}
    return tuple(SimulatedBucket(sum(sizes[name] for name in names), 1.0, tuple(names)) for names in ties)


def as_values(sizes: Sequence[int]) -> float:
    """Return how many values of the largest size have as many bytes as all; 1 if there are none."""
    return sum(sizes) / max(sizes) if any(sizes) else 1.0


def _buckets(
    rows: tuple[LayerProfile, ...], indices: Sequence[int], again: Container[int], apart: Container[str]
) -> tuple[SimulatedBucket, ...]:
    """Return a stage's gradient buckets, in the order in which its backward reaches the parameters.

    Args:
        rows: all layers.
        indices: the stage's layers, the loss included.
        again: its recomputed layers.
        apart: names of parameters that are in no bucket.
    """
    before_s = _recomputed_before(rows, indices, again)
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


def _recomputed_before(rows: Sequence[LayerProfile], indices: Sequence[int], again: Container[int]) -> dict[int, float]:
    """Return the seconds recomputed right before every layer's backward: of its run, before that of the last layer."""
    before_s = dict.fromkeys(indices, 0.0)
    last_of_run = None
    for index in reversed(indices):
        if index not in again:
            last_of_run = None
            continue
        last_of_run = index if last_of_run is None else last_of_run
        before_s[last_of_run] += rows[index].forward_s
    return before_s
