"""The zoo's registry: models and datasets by name. Nothing here knows pipebench."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Dataset(Protocol):
    """What a dataset is: samples by index, a loss and metrics.

    Minibatches are chosen by the caller; the dataset is a pure function of the indices.
    Everything but `fetch` and `check` works without the data being there.

    Attributes:
        inputs: fields that feed the model's inputs, in their order.
        targets: fields that feed the loss.
        num_train: training samples.
        num_eval: held-out samples.
        metrics: metric name to `max` or `min`, whichever is better.
    """

    inputs: Sequence[str]
    targets: Sequence[str]
    num_train: int
    num_eval: int
    metrics: Mapping[str, str]

    def check(self) -> None:
        """Raise FileNotFoundError or ImportError, with one readable sentence, if the data can't be read."""

    def example(self, num_samples: int) -> dict[str, torch.Tensor]:
        """Return every field with the shapes and dtypes of `num_samples` samples, on the meta device."""

    def fetch(self, split: str, indices: Sequence[int], fields: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return the fields asked for, first dimension = samples; `split` is `train` or `eval`."""

    def weight(self, split: str, indices: Sequence[int]) -> float:
        """Return the weight of the samples in the mean loss (images; target tokens without padding)."""

    def loss(self, output: Any, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the summed loss, a scalar; divided by `weight` it is the mean."""

    def score(self, output: Any, targets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return per metric the sum over the samples; the metric is its total over the total weight."""


@dataclass(frozen=True)
class Entry:
    """A registry entry: how to make the thing, and one line on what it is."""

    make: Callable[..., Any]
    summary: str


MODELS: dict[str, Entry] = {}
DATASETS: dict[str, Entry] = {}


def model(name: str, summary: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function that returns a `torch.nn.Module`; its typed keyword arguments are the model's options."""
    return _register(MODELS, name, summary)


def dataset(name: str, summary: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function or class that returns a `Dataset`; its typed keyword arguments are its options."""
    return _register(DATASETS, name, summary)


def _register(table: dict[str, Entry], name: str, summary: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(make: Callable[..., Any]) -> Callable[..., Any]:
        if name in table:
            raise ValueError(f"{name!r} is registered twice")
        table[name] = Entry(make, summary)
        return make

    return register
