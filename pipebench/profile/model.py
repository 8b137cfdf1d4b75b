"""The profile: what every layer costs at the profiled sizes, and on which device."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from pipebench.model.sampling import Size, UnitShape
from pipebench.typed_json import Count, Ordinal, Samples, Seconds, Share

_T = TypeVar("_T")


@dataclass(frozen=True)
class LayerProfile:
    """Cost of one layer for one minibatch (or microbatch) of a given number of samples, and its edges.

    Attributes:
        name: the layer's name in the graph, e.g. `features_0`.
        kind: its class or function, e.g. `Conv2d`.
        backward_s: seconds of its backward, both input and weight gradient.
        output_bytes: bytes of its output, integers included: what a cut after it sends forward.
        gradient_bytes: bytes of the part of its output that has a gradient: what a cut after it sends back.
        reads: indices of the layers whose output it reads, ascending.
        inputs: names of the model inputs it reads.
        parameter_sizes: qualified name to bytes of every parameter it trains; a name that two layers have is tied.
        buffer_sizes: likewise its floating-point buffers (BatchNorm's running statistics), and 0 for others that it
            shares with another layer.
        saved_bytes: bytes that its forward saves for its backward, beyond parameters, buffers and what earlier layers
            save.
        output_parts: bytes of each tensor of an output of several, else empty.
        is_input: whether it only stands for a model input, as in the PipeDream artifact's files.
        weight_s: the part of `backward_s` that computes gradients of its parameters, where it can be measured.
        master_sizes: bytes of the optimizer's masters, by the parameters' names (mixed precision).
        saved_with: (layer, bytes) of tensors that it and earlier layers save, the layer being the last of those: a cut
            between the two saves them on both sides.
        keeps: (number, bytes) of every storage that it saves for its backward but parameters and buffers. Numbers are
            unique in the model: they give the bytes that any set of layers saves together, some of them recomputed or
            swapped. Empty where a profile has only `saved_bytes` and `saved_with`.
        puts_out: likewise, of the storages of its output.
        takes: likewise, of the model inputs that it reads.
        runs_once: whether it changes a buffer, so that no plan recomputes it.
    """

    name: str
    kind: str
    forward_s: Seconds
    backward_s: Seconds
    output_bytes: Count
    gradient_bytes: Count
    reads: tuple[Count, ...] = ()
    inputs: tuple[str, ...] = ()
    parameter_sizes: Mapping[str, Count] = field(default_factory=dict)
    buffer_sizes: Mapping[str, Count] = field(default_factory=dict)
    saved_bytes: Count = 0
    output_parts: tuple[Count, ...] = ()
    is_input: bool = False
    weight_s: Seconds = 0.0
    master_sizes: Mapping[str, Count] = field(default_factory=dict)
    saved_with: tuple[tuple[Count, Count], ...] = ()
    keeps: tuple[tuple[Count, Count], ...] = ()
    puts_out: tuple[tuple[Count, Count], ...] = ()
    takes: tuple[tuple[Count, Count], ...] = ()
    runs_once: bool = False

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

    def with_times_of(self, other: "LayerProfile") -> "LayerProfile":
        """Return this row with the seconds of another."""
        return replace(self, forward_s=other.forward_s, backward_s=other.backward_s, weight_s=other.weight_s)


@dataclass(frozen=True)
class LengthProfile:
    """Layer costs of minibatches of one length, at numbers of samples as in `Profile`.

    Attributes:
        columns: length of their samples.
        share: fraction of all minibatches, 0 to 1.
    """

    columns: Ordinal
    share: Share
    layers: Mapping[Samples, tuple[LayerProfile, ...]]
    load_s: Mapping[Samples, Seconds]


@dataclass(frozen=True)
class Profile:
    """Layer costs of one model on one device.

    Attributes:
        model: readable description of the model and its options.
        source: `measured`, `analytic` or `file`.
        note: one sentence on how the times were obtained, constants included.
        layers: number of samples to the layers' costs at exactly that size, in execution order; the last entry is the
            loss, which reads what the model returns. Other sizes were not profiled: nothing is scaled.
        update_s_per_byte: seconds of an optimizer step per byte of trainable parameters.
        update_floor_s: seconds of an optimizer step that don't depend on the bytes (kernel launches).
        load_s: number of samples to the seconds it takes to load them.
        whole_step_s: number of samples to the seconds of a whole measured forward and backward, where one was measured.
        state_bytes_per_byte: bytes of optimizer state per byte of what it steps on (momentum: 1, Adam: 2).
        precision: the `train.precision` of the recipe it was made for.
        lengths: where minibatches vary in length, the costs at every length. `layers` and `load_s` are then the means
            over all minibatches, and saved bytes those of the longest.
    """

    model: str
    device: str
    source: str
    note: str
    layers: Mapping[Samples, tuple[LayerProfile, ...]]
    update_s_per_byte: Seconds
    update_floor_s: Seconds
    load_s: Mapping[Samples, Seconds]
    whole_step_s: Mapping[Samples, Seconds]
    state_bytes_per_byte: Count = 0
    precision: str = "fp32"
    lengths: tuple[LengthProfile, ...] = ()

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
        return any(row.master_sizes for row in next(iter(self.layers.values())))

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
