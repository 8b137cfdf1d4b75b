"""Models, datasets and metrics: plain torch, usable without the engine."""

from pipebench.zoo.registry import DATASETS, MODELS, Dataset, Entry

__all__ = ["DATASETS", "MODELS", "Dataset", "Entry"]
