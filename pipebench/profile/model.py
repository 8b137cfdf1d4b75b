"""The profile: what every layer costs, at which numbers of samples and on which device."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from pipebench.model.sampling import Size, UnitShape
from pipebench.model.split_kinds import SPLITTABLE, is_kind_of
from pipebench.typed_json import Count, Ordinal, Samples, Seconds, Share

_T = TypeVar("_T")


class ParameterBytes(NamedTuple):
    """Bytes of parameters and buffers."""

    trained: int = 0  # one version of the trained parameters
    stepped: int = 0  # what the optimizer steps on: the same parameters, or their fp32 masters in mixed precision
    untrained: int = 0  # other parameters, and buffers: held once for all versions, without gradient and state

    @staticmethod
    def of(rows: "Iterable[LayerProfile]") -> "ParameterBytes":
        """Return the bytes of some layers; a parameter or buffer that several of them share counts once."""
        held = {name: num_bytes for row in rows for name, num_bytes in row.held.items()}
        return ParameterBytes(*map(sum, zip(*held.values(), strict=True)))


@dataclass(frozen=True)
class LayerProfile:
    """Cost of one layer for one minibatch or microbatch of a given number of samples, and its edges."""

    name: str  # the layer's name in the graph, e.g. `features_0`
    kind: str  # its class or function, e.g. `Conv2d`
    forward_s: Seconds
    backward_s: Seconds  # of its whole backward, for gradients of inputs and of parameters
    output_bytes: Count  # bytes of its output, integers included: what a cut after it sends forward
    gradient_bytes: Count  # bytes of the part of its output that has a gradient: what a cut after it sends back
    reads: tuple[Count, ...] = ()  # indices of the layers whose output it reads, ascending
    inputs: tuple[str, ...] = ()  # names of the model inputs it reads
    # Qualified name to bytes of the parameters that it trains; a name that two layers have is a tied parameter
    parameter_sizes: Mapping[str, Count] = field(default_factory=dict)
    # Qualified name to bytes of buffers that keep layers in one stage if they share one: of those that replicas average
    # (BatchNorm's running statistics), 0 for others
    buffer_sizes: Mapping[str, Count] = field(default_factory=dict)
    saved_bytes: Count = 0  # saved for its backward, without parameters, buffers and what earlier layers save
    output_parts: tuple[Count, ...] = ()  # bytes of each tensor of its output if it has several, else empty
    is_input: bool = False  # whether it only stands for a model input, as in the PipeDream artifact's files
    weight_s: Seconds = 0.0  # the part of `backward_s` for gradients of its parameters; 0 if it can't be split
    # Parameter's name to bytes of the optimizer's fp32 master (mixed precision)
    master_sizes: Mapping[str, Count] = field(default_factory=dict)
    # (layer, bytes) of tensors that earlier layers save as well; `layer` is the last of these. With a cut between the
    # two, both stages save the tensors
    saved_with: tuple[tuple[Count, Count], ...] = ()
    # (number, bytes) of each storage saved for its backward, without parameters and buffers. Numbers are unique in the
    # model, so that the storages of any set of layers can be counted once. Empty where a profile has only
    # `saved_bytes` and `saved_with`
    saved_storages: tuple[tuple[Count, Count], ...] = ()
    output_storages: tuple[tuple[Count, Count], ...] = ()  # (number, bytes) of the storages of its output
    input_storages: tuple[
        tuple[Count, Count], ...
    ] = ()  # (number, bytes) of the storages of the model inputs that it reads
    reads_samples: bool = False  # of the loss: whether targets can only be loaded together with the inputs
    runs_once: bool = False  # whether it returns a buffer that layers change, so that no plan recomputes it
    workspace_bytes: Count = 0  # peak of its forward or backward beside live tensors; 0 if it wasn't measured
    # Qualified name to bytes of parameters that it uses but doesn't train, and of all its buffers: held once, without
    # gradient and state
    untrained_sizes: Mapping[str, Count] = field(default_factory=dict)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Qualified names of the parameters it trains."""
        return tuple(self.parameter_sizes)

    @property
    def buffers(self) -> tuple[str, ...]:
        """Qualified names of the buffers it keeps."""
        return tuple(self.buffer_sizes)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters it trains."""
        return sum(self.parameter_sizes.values())

    @property
    def held(self) -> dict[str, ParameterBytes]:
        """Bytes of each parameter and buffer that it uses, by qualified name."""
        trained = {n: ParameterBytes(size, self.master_sizes.get(n, size)) for n, size in self.parameter_sizes.items()}
        return trained | {name: ParameterBytes(untrained=size) for name, size in self.untrained_sizes.items()}

    def with_estimated_split(self) -> "LayerProfile":
        """Return the row with an estimated `weight_s`, for a profile without it.

        The weight part is half of the backward of a layer that can be split, since its two products are equally large.
        It is all of the backward if the layer reads no other layer, and so computes no input gradient.
        """
        if not self.parameters or not is_kind_of(self.kind, SPLITTABLE):
            return replace(self, weight_s=0.0)
        return replace(self, weight_s=self.backward_s / 2 if self.reads else self.backward_s)

    def with_times_of(self, other: "LayerProfile") -> "LayerProfile":
        """Return this row with the seconds of another."""
        return replace(self, forward_s=other.forward_s, backward_s=other.backward_s, weight_s=other.weight_s)

    def with_times_over(
        self, rows: "Sequence[LayerProfile]", combine: Callable[[Sequence[float]], float]
    ) -> "LayerProfile":
        """Return this row with each of its times combined from those of several rows, such as by their mean."""
        return replace(
            self,
            forward_s=combine([row.forward_s for row in rows]),
            backward_s=combine([row.backward_s for row in rows]),
            weight_s=combine([row.weight_s for row in rows]),
        )


def in_order(rows: Sequence[LayerProfile], order: Sequence[int]) -> tuple[LayerProfile, ...]:
    """Return some rows of a profile in another order, with the indices of layers in that order."""
    place = {old: new for new, old in enumerate(order)}
    return tuple(
        replace(
            rows[index],
            reads=tuple(sorted(place[read] for read in rows[index].reads if read in place)),
            saved_with=tuple(sorted((place[other], size) for other, size in rows[index].saved_with if other in place)),
        )
        for index in order
    )


@dataclass(frozen=True)
class LengthProfile:
    """Layer costs of minibatches whose samples have one length, at the same numbers of samples as `Profile`."""

    columns: Ordinal  # the length
    share: Share  # of all minibatches, 0 to 1
    layers: Mapping[Samples, tuple[LayerProfile, ...]]
    load_s: Mapping[Samples, Seconds]


@dataclass(frozen=True)
class Profile:
    """Layer costs of one model on one device."""

    model: str  # readable description of the model and its options
    device: str
    source: str  # `measured`, `analytic` or `file`
    note: str  # one sentence on how the times were obtained, constants included
    # Number of samples to the layers' costs at exactly that size, in execution order; the last row is the loss.
    # Costs at other sizes aren't known, since nothing is scaled
    layers: Mapping[Samples, tuple[LayerProfile, ...]]
    update_s_per_byte: Seconds  # seconds of an optimizer step per byte of trainable parameters
    update_floor_s: Seconds  # seconds of an optimizer step that don't depend on the bytes (kernel launches)
    load_s: Mapping[Samples, Seconds]  # number of samples to the seconds of loading them
    whole_step_s: Mapping[Samples, Seconds]  # number of samples to a whole forward and backward, where measured
    state_bytes_per_byte: Count = 0  # bytes of optimizer state per byte that it steps on (momentum: 1, Adam: 2)
    precision: str = "fp32"  # the `train.precision` of the recipe it was made for
    # Costs at each length, where lengths vary. Then `layers` and `load_s` are means over all minibatches, but for saved
    # bytes, which are those of the longest
    lengths: tuple[LengthProfile, ...] = ()
    loaders: Count = 0  # loader processes that share the work timed as `load_s`; 0: the worker loads by itself
    slices: Count = 1  # devices among which each worker's layers are divided; costs are those of one device
    device_bytes: Count = 0  # memory of the GPU that it was measured on; 0: no GPU, or not known
    num_local_gpus: Count = 0  # GPUs of the machine that uses it, which its processes share; 0: none, or not known

    @property
    def rows(self) -> tuple[LayerProfile, ...]:
        """The layers at the largest number of samples, for what doesn't depend on that number."""
        return self.layers[max(self.layers)]

    @property
    def by_size(self) -> dict[Size, tuple[LayerProfile, ...]]:
        """The layers by number of samples; where lengths vary, also by number of samples and length."""
        return self._at_all_sizes(self.layers, [each.layers for each in self.lengths])

    @property
    def load_s_by_size(self) -> dict[Size, float]:
        """The seconds of loading a unit, by size as in `by_size`."""
        return self._at_all_sizes(self.load_s, [each.load_s for each in self.lengths])

    def _at_all_sizes(self, means: Mapping[int, _T], own: Sequence[Mapping[int, _T]]) -> dict[Size, _T]:
        found: dict[Size, _T] = dict(means.items())
        for length, values in zip(self.lengths, own, strict=True):
            found |= {UnitShape(n, length.columns): value for n, value in values.items()}
        return found

    def with_rows(self, change: Callable[[tuple[LayerProfile, ...]], tuple[LayerProfile, ...]]) -> "Profile":
        """Return the profile with `change` applied to its rows at every size and length."""

        def changed(layers: Mapping[int, tuple[LayerProfile, ...]]) -> dict[int, tuple[LayerProfile, ...]]:
            return {size: change(rows) for size, rows in layers.items()}

        lengths = tuple(replace(each, layers=changed(each.layers)) for each in self.lengths)
        return replace(self, layers=changed(self.layers), lengths=lengths)

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer steps on fp32 masters instead of the parameters (mixed precision)."""
        return any(row.master_sizes for row in self.rows)

    @property
    def sum_over_whole(self) -> dict[int, float]:
        """Number of samples to the layers' total seconds over those of a whole step, ideally 1, where measured."""
        return {
            n: sum(row.forward_s + row.backward_s for row in self.layers[n] if not row.is_input) / s
            for n, s in self.whole_step_s.items()
        }


@dataclass(frozen=True)
class Rows:
    """The layers of a profile without the loss, in the form that `make_plan` takes."""

    layers: tuple[LayerProfile, ...]
    outputs: tuple[int, ...]

    @staticmethod
    def of(rows: Sequence[LayerProfile]) -> "Rows":
        """Return a profile's rows, the last of which is the loss."""
        return Rows(tuple(rows[:-1]), rows[-1].reads)
