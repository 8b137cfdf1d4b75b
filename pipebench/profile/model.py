"""The profile: what every layer costs at the profiled sizes, and on which device."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from pipebench.model.sampling import Size, UnitShape
from pipebench.model.split_kinds import SPLITTABLE, is_kind_of
from pipebench.typed_json import Count, Ordinal, Samples, Seconds, Share

_T = TypeVar("_T")


class ParameterBytes(NamedTuple):
    """Bytes of parameters and buffers."""

    trained: int = 0  # one version of those that are trained
    stepped: int = 0  # what the optimizer updates of them: the same, or masters in mixed precision
    untrained: int = 0  # others, and buffers: held once, whatever the versions, without gradient and state

    @staticmethod
    def of(rows: "Iterable[LayerProfile]") -> "ParameterBytes":
        """Return those of some layers, of which each shared one counts once."""
        held = {name: num_bytes for row in rows for name, num_bytes in row.held.items()}
        return ParameterBytes(*map(sum, zip(*held.values(), strict=True)))


@dataclass(frozen=True)
class LayerProfile:
    """Cost of one layer for one minibatch (or microbatch) of a given number of samples, and its edges."""

    name: str  # the layer's name in the graph, e.g. `features_0`
    kind: str  # its class or function, e.g. `Conv2d`
    forward_s: Seconds
    backward_s: Seconds  # seconds of its backward, both input and weight gradient
    output_bytes: Count  # bytes of its output, integers included: what a cut after it sends forward
    gradient_bytes: Count  # bytes of the part of its output that has a gradient: what a cut after it sends back
    reads: tuple[Count, ...] = ()  # indices of the layers whose output it reads, ascending
    inputs: tuple[str, ...] = ()  # names of the model inputs it reads
    parameter_sizes: Mapping[str, Count] = field(default_factory=dict)  # bytes by qualified name; tied if two layers'
    # Likewise of floating-point buffers (BatchNorm's running statistics); 0 for others shared with another layer
    buffer_sizes: Mapping[str, Count] = field(default_factory=dict)
    saved_bytes: Count = 0  # saved for its backward, without parameters, buffers and what earlier layers save
    output_parts: tuple[Count, ...] = ()  # bytes of each tensor of an output of several, else empty
    is_input: bool = False  # whether it only stands for a model input, as in the PipeDream artifact's files
    weight_s: Seconds = 0.0  # the part of `backward_s` for gradients of its parameters, where it can be measured
    # Bytes of the optimizer's masters, by the parameters' names (mixed precision)
    master_sizes: Mapping[str, Count] = field(default_factory=dict)
    # (layer, bytes) of tensors that earlier layers save too, `layer` the last of them: a cut between saves them twice
    saved_with: tuple[tuple[Count, Count], ...] = ()
    # (number, bytes) of each storage saved for its backward, without parameters and buffers. Numbers are unique in the
    # model, so that any set of layers has a total. Empty where a profile has only `saved_bytes` and `saved_with`.
    keeps: tuple[tuple[Count, Count], ...] = ()
    puts_out: tuple[tuple[Count, Count], ...] = ()  # likewise, of the storages of its output
    takes: tuple[tuple[Count, Count], ...] = ()  # likewise, of the model inputs that it reads
    reads_samples: bool = False  # of the loss: whether its targets come with whole samples only
    runs_once: bool = False  # whether it returns a buffer that layers change, so that no plan recomputes it
    workspace_bytes: Count = 0  # peak of its forward or backward beside live tensors; 0 where it wasn't measured
    # Likewise of parameters that it uses but doesn't train, and of buffers: one copy, without gradient and state
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

    def with_usual_part(self) -> "LayerProfile":
        """Return the row with an estimated `weight_s`, for a profile without it.

        It is half of the backward of a layer that can be split, as its two products are equally large; all of it where
        the layer reads no other layer, and so computes no input gradient.
        """
        if not self.parameters or not is_kind_of(self.kind, SPLITTABLE):
            return replace(self, weight_s=0.0)
        return replace(self, weight_s=self.backward_s / 2 if self.reads else self.backward_s)

    def with_times_of(self, other: "LayerProfile") -> "LayerProfile":
        """Return this row with the seconds of another."""
        return replace(self, forward_s=other.forward_s, backward_s=other.backward_s, weight_s=other.weight_s)


@dataclass(frozen=True)
class LengthProfile:
    """Layer costs of minibatches of one length, at numbers of samples as in `Profile`."""

    columns: Ordinal  # length of their samples
    share: Share  # fraction of all minibatches, 0 to 1
    layers: Mapping[Samples, tuple[LayerProfile, ...]]
    load_s: Mapping[Samples, Seconds]


@dataclass(frozen=True)
class Profile:
    """Layer costs of one model on one device."""

    model: str  # readable description of the model and its options
    device: str
    source: str  # `measured`, `analytic` or `file`
    note: str  # one sentence on how the times were obtained, constants included
    # Number of samples to the layers' costs at exactly that size, in execution order; the last entry is the loss.
    # Other sizes were not profiled: nothing is scaled.
    layers: Mapping[Samples, tuple[LayerProfile, ...]]
    update_s_per_byte: Seconds  # seconds of an optimizer step per byte of trainable parameters
    update_floor_s: Seconds  # seconds of an optimizer step that don't depend on the bytes (kernel launches)
    load_s: Mapping[Samples, Seconds]  # number of samples to the seconds it takes to load them
    whole_step_s: Mapping[Samples, Seconds]  # likewise of a whole forward and backward, where it was measured
    state_bytes_per_byte: Count = 0  # bytes of optimizer state per byte of what it steps on (momentum: 1, Adam: 2)
    precision: str = "fp32"  # the `train.precision` of the recipe it was made for
    # Costs of each length, where lengths vary; `layers` and `load_s` are then means over all minibatches and saved
    # bytes those of the longest
    lengths: tuple[LengthProfile, ...] = ()
    # Loader processes of which `load_s` is, all of them at work for one worker; 0: a worker loads itself
    loaders: Count = 0
    slices: Count = 1  # devices that a worker stands for; costs are those of one of them
    device_bytes: Count = 0  # memory of the GPU that it was measured on; 0: of none, or not known
    num_devices: Count = 0  # GPUs of the machine that it is used on, which its processes share; 0: none, or not known

    @property
    def rows(self) -> tuple[LayerProfile, ...]:
        """The layers at the largest number of samples: what doesn't depend on it, and shares of whole minibatches."""
        return self.layers[max(self.layers)]

    @property
    def by_size(self) -> dict[Size, tuple[LayerProfile, ...]]:
        """The layers by size: number of samples, and at every length where it varies."""
        return self._at_all_sizes(self.layers, [each.layers for each in self.lengths])

    @property
    def load_s_by_size(self) -> dict[Size, float]:
        """The seconds to load a unit, by size."""
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
        """Whether the optimizer steps on masters beside the parameters (mixed precision)."""
        return any(row.master_sizes for row in self.rows)

    @property
    def sum_over_whole(self) -> dict[int, float]:
        """Number of samples to the layers' total seconds over those of a whole measured step, ideally 1."""
        return {
            n: sum(row.forward_s + row.backward_s for row in self.layers[n] if not row.is_input) / s
            for n, s in self.whole_step_s.items()
        }


@dataclass(frozen=True)
class Rows:
    """The layers of a profile without the loss, in the form that `make_plan` cuts."""

    layers: tuple[LayerProfile, ...]
    outputs: tuple[int, ...]

    @staticmethod
    def of(rows: Sequence[LayerProfile]) -> "Rows":
        """Return a profile's rows, the last of which is the loss."""
        return Rows(tuple(rows[:-1]), rows[-1].reads)
