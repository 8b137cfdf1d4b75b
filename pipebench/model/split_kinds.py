"""The kinds of layers whose backwards can be split, by name: read off a profile, a kind is only a name."""

SPLITTABLE = (
    "Linear", "Embedding", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d",
)  # fmt: skip
