"""The kinds of layers whose backwards can be split, by the names that profiles have."""

from collections.abc import Iterable

SPLITTABLE = (
    "Linear", "Embedding", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d",
)  # fmt: skip
# Normalisations: the gradient of their input requires the sums that are their parameters' gradients.
BY_THE_WAY = (
    "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm", "InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d",
    "LayerNorm", "GroupNorm",
)  # fmt: skip


def is_kind_of(kind: str, names: Iterable[str]) -> bool:
    """Return whether a layer's kind or description is of one of these names: `Linear(8, 8)` is a `Linear`."""
    return kind.split("(")[0] in names
