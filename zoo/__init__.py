"""Models, datasets and metrics: plain torch, usable without pipebench."""

from zoo import (  # noqa: F401  (importing registers)
    alexnet,
    gettext_pairs,
    gnmt,
    inception,
    mnist5k,
    number_words,
    resnet,
    vgg,
    wmt16,
)
from zoo.registry import DATASETS, MODELS, Dataset, Entry

__all__ = ["DATASETS", "MODELS", "Dataset", "Entry"]
