"""Models, data sets and metrics in plain PyTorch, usable without the engine."""

from pipebench.zoo.registry import DATASETS, MODELS, Dataset, Entry

__all__ = ["DATASETS", "MODELS", "Dataset", "Entry"]
