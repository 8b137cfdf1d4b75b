"""A data set for mixed precision: inputs are rounded, loss and scores are computed in fp32."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from zoo.registry import Dataset


class RoundedData(Dataset):
    """A data set whose fp32 inputs are rounded to `low_type`; loss and scores are computed in fp32."""

    def __init__(self, data: Dataset, low_type: torch.dtype) -> None:
        self._data, self._low_type = data, low_type
        self.inputs, self.targets, self.metrics = data.inputs, data.targets, data.metrics
        self.num_train, self.num_eval, self.num_ids = data.num_train, data.num_eval, data.num_ids
        self.sequential, self.generates_with = data.sequential, data.generates_with
        self.loader_processes, self.lengths = data.loader_processes, data.lengths

    def check(self) -> None:
        """See `Dataset`, as for the methods below."""
        self._data.check()

    def example(self, num_samples: int) -> dict[str, torch.Tensor]:
        """Return rounded inputs, and targets."""
        return self._rounded(self._data.example(num_samples))

    def of_length(self, columns: int) -> Dataset:
        """Return the data set with rounded examples of a length."""
        return RoundedData(self._data.of_length(columns), self._low_type)

    def fetch(
        self, split: str, indices: Sequence[int], fields: Sequence[str], draw: int = 0
    ) -> dict[str, torch.Tensor]:
        """Return rounded inputs, and targets."""
        return self._rounded(self._data.fetch(split, indices, fields, draw))

    def weight(self, split: str, indices: Sequence[int]) -> float:
        """Return the weight of samples."""
        return self._data.weight(split, indices)

    def loss(self, output: Any, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss of the output in fp32."""
        return self._data.loss(self._unrounded(output), targets)

    def score(self, output: Any, targets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the scores of the output in fp32."""
        return self._data.score(self._unrounded(output), targets)

    def summarise(self, sums: Mapping[str, float], weight: float) -> dict[str, float]:
        """Return metrics."""
        return self._data.summarise(sums, weight)

    def whole_model_metrics(self, model: nn.Module) -> dict[str, float]:
        """Return metrics of the whole model, computed in fp32 with the rounded weights."""
        return self._data.whole_model_metrics(model)

    def buckets(self) -> Sequence[int] | None:
        """Return a bucket per sample."""
        return self._data.buckets()

    def notes(self) -> dict[str, str]:
        """Return what a reader has to know of the data."""
        return self._data.notes()

    def _rounded(self, fields: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Round the inputs, except a field that is a target too."""
        names = {*self.inputs} - {*self.targets}
        return {
            name: value.to(self._low_type) if name in names and value.dtype is torch.float32 else value
            for name, value in fields.items()
        }

    def _unrounded(self, output: Any) -> Any:
        def widen(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.float() if tensor.dtype is self._low_type else tensor

        return pytree.tree_map_only(torch.Tensor, widen, output)
