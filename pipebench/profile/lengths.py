"""Minibatches whose lengths vary, as one that stands for all: what plans are made for, where one length has to do."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from pipebench.profile.model import LayerProfile, LengthProfile

_Layers = Mapping[int, tuple[LayerProfile, ...]]


def mean_layers(lengths: Sequence[LengthProfile]) -> dict[int, tuple[LayerProfile, ...]]:
    """Return the layers' costs at the sizes that are profiled: means over all minibatches, memory of the longest.

    A minibatch of average length doesn't cost that, since short ones use a device badly: every length is profiled.

    Args:
        lengths: at least one, with costs at the same sizes.
    """
    return {size: _mean_rows([(each.share, each.layers[size]) for each in lengths]) for size in lengths[0].layers}


def mean_load_s(lengths: Sequence[LengthProfile]) -> dict[int, float]:
    """Return the mean seconds to load so many samples."""
    return {size: sum(each.share * each.load_s[size] for each in lengths) for size in lengths[0].load_s}


def of_every_length(
    lengths: Sequence[LengthProfile], change: Callable[[_Layers], _Layers]
) -> tuple[LengthProfile, ...]:
    """Return the costs of every length with their layers changed."""
    return tuple(replace(each, layers=change(each.layers)) for each in lengths)


def _mean_rows(weighted: Sequence[tuple[float, tuple[LayerProfile, ...]]]) -> tuple[LayerProfile, ...]:
    shares = [share for share, _ in weighted]
    return tuple(_mean(shares, rows) for rows in zip(*(rows for _, rows in weighted), strict=True))


def _mean(shares: Sequence[float], rows: Sequence[LayerProfile]) -> LayerProfile:
    def mean(values: Sequence[float]) -> float:
        return sum(share * value for share, value in zip(shares, values, strict=True))

    parts = tuple(round(mean(sizes)) for sizes in zip(*(row.output_parts for row in rows), strict=True))
    output_bytes = sum(parts) or round(mean([row.output_bytes for row in rows]))
    longest = max(rows, key=lambda row: (row.saved_bytes, row.output_bytes))
    return replace(
        longest,
        forward_s=mean([row.forward_s for row in rows]),
        backward_s=mean([row.backward_s for row in rows]),
        weight_s=mean([row.weight_s for row in rows]),
        output_bytes=output_bytes,
        gradient_bytes=min(output_bytes, round(mean([row.gradient_bytes for row in rows]))),
        output_parts=parts,
    )
