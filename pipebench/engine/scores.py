"""Sums of an evaluation over held-out samples, and the whole model for metrics that no single stage can compute."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from pipebench.checkpoint.share import own_names
from pipebench.engine.setup import Setup
from pipebench.model.graph import copied
from pipebench.zoo.registry import Dataset

_LOSS, _WEIGHT = "eval_loss", "weight of all samples"


class Scores:
    """Sums of the loss and of a dataset's scores over samples."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        # By name; plain numbers, so that `merge` can add those of several workers
        self.sums: dict[str, float] = defaultdict(float)

    def add(self, output: Any, targets: Mapping[str, torch.Tensor], weight: float) -> None:
        """Score the model's output for some samples."""
        self.sums[_LOSS] += float(self._dataset.loss(output, targets))
        self.sums[_WEIGHT] += weight
        for name, value in self._dataset.score(output, targets).items():
            self.sums[name] += float(value)

    def merge(self, others: Iterable[Mapping[str, float]]) -> None:
        """Replace the sums by the total over workers, this one included, in their order."""
        total: dict[str, float] = defaultdict(float)
        for sums in others:
            for name, value in sums.items():
                total[name] += value
        self.sums = total

    def metrics(self) -> dict[str, float]:
        """Return `eval_loss` and every metric of the dataset."""
        sums = dict(self.sums)
        weight = sums.pop(_WEIGHT)
        return {_LOSS: sums.pop(_LOSS) / weight, **self._dataset.summarise(sums, weight)}


class WholeModel:
    """A copy of the whole model, in evaluation mode, filled with the stages' weights.

    The model of `setup` must still hold its initial weights, for those that no stage trains.
    """

    def __init__(self, setup: Setup) -> None:
        self._model = copied(setup.graph.model).to(setup.device).eval()
        self._tensors = dict(self._model.named_buffers()) | dict(self._model.named_parameters(remove_duplicate=False))
        self._own_names = own_names(setup.graph)

    def filled(self, stages: Iterable[Mapping[str, torch.Tensor]]) -> nn.Module:
        """Return the model with the stages' parameters and buffers by qualified name."""
        with torch.no_grad():
            for tensors in stages:
                for stages_name, tensor in tensors.items():
                    name = self._own_names[stages_name]
                    if name in self._tensors:  # tracing adds buffers for tensors made in forward
                        self._tensors[name].copy_(tensor)
        return self._model
