"""Models, datasets and metrics: plain torch, usable without the engine."""

from zoo import (  # noqa: F401  (importing registers)
    alexnet,
    awd_lm,
    gettext_pairs,
    gnmt,
    imagenet,
    inception,
    king_james,
    mnist5k,
    moving_digits,
    msvd,
    number_words,
    ptb,
    resnet,
    s2vt,
    synthetic,
    vgg,
    wmt16,
)
from zoo.registry import DATASETS, MODELS, Dataset, Entry

__all__ = ["DATASETS", "MODELS", "Dataset", "Entry"]
