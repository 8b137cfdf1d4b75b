"""The profile: what every layer costs at the size that travels, and on which device that is so."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from pipebench.model.sampling import Size, UnitShape
from pipebench.typed_json import Count, Ordinal, Samples, Seconds, Share

_T = TypeVar("_T")


@dataclass(frozen=True)
class LayerProfile:
    """Cost of one layer for one minibatch (or microbatch) of a given number of samples, and what it is joined to.

    Attributes:
        name: the layer's name in the graph, e.g. `features_0`.
        kind: what it is, e.g. `Conv2d`.
        forward_s: seconds of its forward.
        backward_s: seconds of its backward, both input and weight gradient.
        output_bytes: bytes of its output, integers included: what crosses forward if a cut separates it from a reader.
        gradient_bytes: bytes of the part of its output that has a gradient: what crosses back.
        reads: indices of the layers whose output it reads, ascending.
        inputs: names of the model inputs it reads.
        parameter_sizes: qualified name to bytes of every parameter it trains; a name that two layers have is tied.
        buffer_sizes: likewise its floating-point buffers (BatchNorm's running statistics), and 0 for others that it
            shares with another layer.
        saved_bytes: bytes that its forward keeps for its backward, beyond parameters, buffers and what layers before it
            keep.
        output_parts: bytes of the tensors of an output that is several, else empty.
        is_input: whether it only stands for a model input, as in the PipeDream artifact's files; it is no work.
        weight_s: the part of `backward_s` that the gradients of its parameters take, where the two can be told apart.
        master_sizes: bytes of what the optimizer steps on instead of the parameters, by their names (mixed precision).
        saved_with: (layer, bytes) of tensors that it keeps for its backward and layers before it do, too, the layer
            being the last of those: where a cut parts the two, they are kept on both sides.
        keeps: (number, bytes) of every storage that it keeps for its backward, parameters and buffers left out. Numbers
            are the whole model's, so that it can be told what layers hold together, whichever of them are computed
            again or swapped; nothing where a profile only knows `saved_bytes` and `saved_with`.
        puts_out: likewise, of what its output lies in.
        takes: likewise, of the model inputs that it reads.
        runs_once: whether it changes a buffer, so that it isn't computed again whatever a plan asks for.
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


@dataclass(frozen=True)
class LengthProfile:
    """Layer costs of minibatches of one length.

    Attributes:
        columns: how wide their samples are.
        share: of all minibatches.
        layers: as of `Profile`, at exactly this length.
        load_s: likewise.
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
        device: the device the times are true for.
        source: `measured`, `analytic` or `file`.
        note: one readable sentence on how the times came about, constants included.
        layers: number of samples to the layers' costs at exactly that size, in execution order; the last entry is the
            loss, which reads what the model returns. A size that isn't here was not profiled: nothing is scaled.
        update_s_per_byte: optimizer time per byte of trainable parameters (one whole step measured or computed, shared
            out by bytes).
        update_floor_s: optimizer time of one step that doesn't depend on the bytes (kernel launches).
        load_s: number of samples to the seconds it takes to load them.
        whole_step_s: number of samples to a whole measured forward and backward, where one was measured.
        state_bytes_per_byte: bytes of optimizer state per byte of what it steps on (momentum: 1, Adam: 2).
        precision: the recipe's `train.precision` that it was made at.
        lengths: where minibatches vary in length: the costs at every length. `layers` and `load_s` then are what plans
            are made for: the means over all minibatches, and kept for the backward what the longest keep.
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
        """The layers at everything that a unit's costs depend on: at every length, too, where it varies."""
        return self._at_all_sizes(self.layers, [each.layers for each in self.lengths])

    @property
    def load_s_by_size(self) -> dict[Size, float]:
        """The seconds to load a unit, likewise."""
        return self._at_all_sizes(self.load_s, [each.load_s for each in self.lengths])

    def _at_all_sizes(self, means: Mapping[int, _T], own: Sequence[Mapping[int, _T]]) -> dict[Size, _T]:
        found: dict[Size, _T] = dict(means.items())
        for length, values in zip(self.lengths, own, strict=True):
            found |= {UnitShape(n, length.columns): value for n, value in values.items()}
        return found

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer steps on masters beside the parameters (mixed precision)."""
        return any(row.master_sizes for row in next(iter(self.layers.values())))

    @property
    def sum_over_whole(self) -> dict[int, float]:
        """Number of samples to the layers' seconds over those of a whole measured step: near 1 if it adds up."""
        return {
            n: sum(row.forward_s + row.backward_s for row in self.layers[n] if not row.is_input) / s
            for n, s in self.whole_step_s.items()
        }


@dataclass(frozen=True)
class Rows:
    """The layers of a profile without the loss, as something that can be cut."""

    layers: tuple[LayerProfile, ...]
    outputs: tuple[int, ...]

    @staticmethod
    def of(rows: Sequence[LayerProfile]) -> "Rows":
        """Return a profile's rows, the last of which is the loss."""
        return Rows(tuple(rows[:-1]), rows[-1].reads)
