"""What an evaluation adds up over held-out samples, wherever they were scored."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from zoo.registry import Dataset

_LOSS, _WEIGHT = "eval_loss", "weight of all samples"


class Scores:
    """Sums of the loss and of a dataset's scores over samples.

    Attributes:
        sums: by name; plain numbers, so that sums of several workers can be put together with `merge`.
    """

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self.sums: dict[str, float] = defaultdict(float)

    def add(self, output: Any, targets: Mapping[str, torch.Tensor], weight: float) -> None:
        """Score the model's output for some samples."""
        self.sums[_LOSS] += float(self._dataset.loss(output, targets))
        self.sums[_WEIGHT] += weight
        for name, value in self._dataset.score(output, targets).items():
            self.sums[name] += float(value)

    def merge(self, others: Iterable[Mapping[str, float]]) -> None:
        """Replace the sums by those of several workers, this one's among them, in their order."""
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
