"""Mean costs of minibatches whose lengths vary, for planners that take one length."""

from collections.abc import Sequence
from dataclasses import replace

from pipebench.profile.model import LayerProfile, LengthProfile


def mean_layers(lengths: Sequence[LengthProfile]) -> dict[int, tuple[LayerProfile, ...]]:
    """Return number of samples to the layers' mean times and output bytes, with the longest minibatch's saved bytes.

    Every length is profiled: short minibatches use a device badly, so the mean isn't the cost at the mean length.
    """
    shares = [each.share for each in lengths]
    return {
        size: tuple(_mean(shares, rows) for rows in zip(*(each.layers[size] for each in lengths), strict=True))
        for size in lengths[0].layers
    }


def mean_load_s(lengths: Sequence[LengthProfile]) -> dict[int, float]:
    """Return number of samples to the mean seconds of loading them."""
    return {size: sum(each.share * each.load_s[size] for each in lengths) for size in lengths[0].load_s}


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
