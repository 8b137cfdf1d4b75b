"""Metrics of a whole held-out set that are no means over samples, such as an area under a curve.

Their objects get the minibatches one by one. They get them in order, so that a metric that depends on the order has
one value under every plan.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pipebench.zoo.registry import DataError, Dataset
from pipebench.zoo.samples import in_words


class NotComputedError(DataError):
    """`compute` of a metric raises."""


class WholeSet:
    """Collects outputs and targets, and computes a data set's metrics of the whole set.

    Attributes:
        metrics: by name; every process has all.
        waiting: outputs and targets, on the host, by minibatch, of which an earlier one isn't there yet.
    """

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self.metrics = dataset.whole_set_metrics()
        self._num_updates = 0
        self.waiting: dict[int, tuple[Any, Any]] = {}

    def add(self, minibatch: int, output: Any, targets: Mapping[str, torch.Tensor]) -> None:
        """Take the model's output for a minibatch, and its targets; minibatches are numbered from 0."""
        if self.metrics:
            own = self._dataset.for_metrics(output, targets)
            self.take({minibatch: pytree.tree_map_only(torch.Tensor, _on_host, own)})

    def take(self, minibatches: Mapping[int, tuple[Any, Any]]) -> None:
        """Take what `waiting` of another process had; update metrics as far as no minibatch is missing.

        Raises:
            DataError: `update` of a metric fails.
        """
        self.waiting |= minibatches
        while self._num_updates in self.waiting:
            output, targets = self.waiting.pop(self._num_updates)
            self._num_updates += 1
            for name, metric in self.metrics.items():
                try:
                    metric.update(output, targets)
                except Exception as error:
                    raise DataError(f"the metric {name} fails on the output, {in_words(output)}") from error

    def compute(self) -> dict[str, float]:
        """Return the metrics; nothing if the first minibatch was another process's.

        Raises:
            NotComputedError: `compute` of a metric raises.
            DataError: it returns no number.
        """
        return {name: _computed(name, metric) for name, metric in self.metrics.items()} if self._num_updates else {}


def _computed(name: str, metric: Any) -> float:
    try:
        with _alone():
            value = metric.compute()
    except Exception as error:
        raise NotComputedError(f"compute of the metric {name} fails") from error
    with suppress(TypeError, ValueError, RuntimeError):  # such as for None, and for tensors of several numbers
        return float(value)
    raise DataError(f"compute of the metric {name} gives {in_words(value)}, needed is a number")


@contextmanager
def _alone() -> Iterator[None]:
    """Hide the other processes from metrics that would exchange with them, as torchmetrics' do: they don't compute."""
    names = vars(torch.distributed)
    before = names["is_initialized"]
    names["is_initialized"] = lambda: False
    try:
        yield
    finally:
        names["is_initialized"] = before


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)  # a copy: an output may be a part of a larger tensor, or be overwritten
