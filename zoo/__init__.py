"""Models, datasets and metrics: plain torch, usable without pipebench."""

from zoo import alexnet, gnmt, inception, mnist5k, number_words, resnet, vgg, wmt16  # noqa: F401  (importing registers)
from zoo.registry import DATASETS, MODELS, Dataset, Entry

__all__ = ["DATASETS", "MODELS", "Dataset", "Entry"]
