"""The base of data sets of images with one label each: fields, examples and the cross-entropy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipebench.zoo import metrics
from pipebench.zoo.late import torch
from pipebench.zoo.registry import Dataset


class LabelledImages(Dataset):
    """Images, which subclasses read; fields: `image` [samples, *shape] float32, and `label` [samples] int64."""

    inputs: Sequence[str] = ("image",)
    targets: Sequence[str] = ("label",)

    def __init__(self, shape: Sequence[int], num_classes: int, num_train: int, num_eval: int) -> None:
        self.shape = tuple(shape)
        self.image_shape = self.shape if len(self.shape) == 3 else None
        self.num_classes = num_classes
        self.num_ids = {"label": num_classes}
        self.num_train, self.num_eval = num_train, num_eval

    def example(self, num_samples: int) -> dict[str, torch.Tensor]:
        """Return both fields for `num_samples` samples on the meta device; nothing is read."""
        image = torch.empty(num_samples, *self.shape, device="meta")
        return {"image": image, "label": torch.empty(num_samples, dtype=torch.int64, device="meta")}

    def loss(self, output: Any, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the summed cross-entropy, a scalar; output: [samples, classes] or (logits, auxiliary logits)."""
        self.check_logits(metrics.main_logits(output), "label")
        return metrics.classification_loss(output, targets["label"])
