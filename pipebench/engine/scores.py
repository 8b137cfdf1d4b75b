"""Sums of an evaluation over held-out samples, and the whole model for metrics that no single stage can compute."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from pipebench.checkpoint.share import own_names
from pipebench.engine.setup import Setup
from pipebench.engine.whole_set import WholeSet
from pipebench.model.copies import copied, copied_to
from pipebench.zoo.registry import Dataset

_LOSS, _WEIGHT = "eval_loss", "weight of all samples"


class Scores:
    """Sums of the loss and of a dataset's scores over samples, and its metrics of the whole set."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._sums: dict[str, float] = defaultdict(float)  # by name
        self.whole_set = WholeSet(dataset)

    def add(self, minibatch: int, output: Any, targets: Mapping[str, torch.Tensor], weight: float) -> None:
        """Score the model's output for a minibatch, numbered from 0."""
        self._sums[_LOSS] += float(self._dataset.loss(output, targets))
        self._sums[_WEIGHT] += weight
        for name, value in self._dataset.score(output, targets).items():
            self._sums[name] += float(value)
        self.whole_set.add(minibatch, output, targets)

    def share(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return this process's sums, and the metrics of the whole set if this process computes them, as JSON data."""
        return self._sums, self.whole_set.compute()

    def metrics(self, shares: Iterable[tuple[Mapping[str, float], Mapping[str, float]]]) -> dict[str, float]:
        """Return `eval_loss` and every metric of the dataset; `shares` are every worker's, added in their order."""
        total: dict[str, float] = defaultdict(float)
        whole_set: dict[str, float] = {}
        for sums, computed in shares:
            whole_set |= computed
            for name, value in sums.items():
                total[name] += value
        weight, loss = total.pop(_WEIGHT), total.pop(_LOSS)
        mean = loss / weight if weight else math.nan
        return {_LOSS: mean, **self._dataset.summarise(total, weight), **whole_set}


class WholeModel:
    """A copy of the whole model, in evaluation mode, for metrics that no single stage can compute.

    The model of `setup` must still hold its initial weights, for those that no stage trains. Between evaluations the
    copy is on the host: on a GPU it would take memory from training, and may be more than one GPU holds.
    """

    def __init__(self, setup: Setup) -> None:
        self._model = copied(setup.graph.model).eval()
        self._dataset, self._device = setup.dataset, setup.device
        self._own_names = own_names(setup.graph)

    def metrics(self, stages: Iterable[Mapping[str, torch.Tensor]]) -> dict[str, float]:
        """Return the dataset's metrics of the whole model.

        `stages` has the parameters and buffers of stages, by qualified name.
        """
        named = dict(self._model.named_buffers()) | dict(self._model.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for tensors in stages:
                for stages_name, tensor in tensors.items():
                    name = self._own_names[stages_name]
                    if name in named:  # tracing adds buffers for tensors made in forward
                        named[name].copy_(tensor)
        model = self._model if self._device.type == "cpu" else copied_to(self._model, self._device)
        return dict(self._dataset.whole_model_metrics(model))
