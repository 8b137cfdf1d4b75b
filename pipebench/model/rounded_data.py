"""A data set for mixed precision, which rounds inputs and computes loss and scores in fp32."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pipebench.zoo.registry import Dataset

# Attributes and methods that are the exact data set's own.
_UNCHANGED = (
    *("inputs", "targets", "metrics", "num_train", "num_eval", "num_ids", "sequential", "generates_with"),
    *("loader_processes", "targets_apart", "concurrent", "lengths", "check", "weight", "summarise", "buckets", "notes"),
    *("image_shape", "renew", "whole_set_metrics", "weighs_targets", "weigh"),
)


class RoundedData(Dataset):
    """A data set whose fp32 inputs are rounded to `low_type`.

    Attributes:
        exact: the data set without rounding.
    """

    def __init__(self, data: Dataset, low_type: torch.dtype) -> None:
        self.exact, self._low_type = data, low_type
        for name in _UNCHANGED:
            setattr(self, name, getattr(data, name))

    def example(self, num_samples: int) -> dict[str, torch.Tensor]:
        """Return rounded inputs, and targets."""
        return self._rounded(self.exact.example(num_samples))

    def of_length(self, columns: int) -> Dataset:
        """Return the data set with rounded examples of a length."""
        return RoundedData(self.exact.of_length(columns), self._low_type)

    def begin_epoch(self, epoch: int) -> None:
        """See `Dataset`."""
        self.exact.begin_epoch(epoch)

    def fetch(
        self, split: str, indices: Sequence[int], fields: Sequence[str], draw: int = 0
    ) -> dict[str, torch.Tensor]:
        """Return rounded inputs, and targets."""
        return self._rounded(self.exact.fetch(split, indices, fields, draw))

    def loss(self, output: Any, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss of the output in fp32."""
        return self.exact.loss(self._unrounded(output), targets)

    def score(self, output: Any, targets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the scores of the output in fp32."""
        return self.exact.score(self._unrounded(output), targets)

    def for_metrics(self, output: Any, targets: Mapping[str, torch.Tensor]) -> tuple[Any, Any]:
        """Return the output in fp32, and targets."""
        return self.exact.for_metrics(self._unrounded(output), targets)

    def whole_model_metrics(self, model: nn.Module) -> dict[str, float]:
        """Return metrics of the whole model, whose weights are rounded, computed in fp32."""
        return self.exact.whole_model_metrics(model)

    def _rounded(self, fields: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return fields with fp32 inputs rounded, except those that are also targets."""
        names = {*self.inputs} - {*self.targets}
        return {
            name: value.to(self._low_type) if name in names and value.dtype is torch.float32 else value
            for name, value in fields.items()
        }

    def _unrounded(self, output: Any) -> Any:
        def widen(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.float() if tensor.dtype is self._low_type else tensor

        return pytree.tree_map_only(torch.Tensor, widen, output)
