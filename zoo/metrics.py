"""Losses and metrics that data sets share: sums over samples, divided by their number means; and perplexity."""

from __future__ import annotations

import math
from typing import Any

from pipebench.zoo.late import torch

# Inception-v3's paper (Szegedy et al. 2016) doesn't print the auxiliary loss's weight; 0.4 is that of the authors' own
# training script in TensorFlow's TF-Slim and of PyTorch's tutorial on fine-tuning torchvision's models.
AUXILIARY_WEIGHT = 0.4


def num_correct(logits: torch.Tensor, labels: torch.Tensor, k: int = 1) -> torch.Tensor:
    """Count the samples [samples, classes] whose label is among the k largest logits: a scalar, int64, on their device.

    More than the number of classes counts as all of them.
    """
    best = logits.topk(min(k, logits.shape[1]), dim=1).indices
    return (best == labels.unsqueeze(1)).sum()


def main_logits(output: Any) -> torch.Tensor:
    """Return the logits of a classifier's output: the output itself, or the first of (logits, auxiliary logits)."""
    logits: torch.Tensor = output[0] if isinstance(output, tuple | list) else output
    return logits


def classification_loss(output: Any, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy summed over the samples; auxiliary logits add theirs times `AUXILIARY_WEIGHT`.

    Args:
        output: [samples, classes] float, or a tuple of such: the logits, then any auxiliary ones.
        labels: [samples] int64.
    """
    loss = torch.nn.functional.cross_entropy(main_logits(output), labels, reduction="sum")
    for auxiliary in output[1:] if isinstance(output, tuple | list) else ():
        loss = loss + AUXILIARY_WEIGHT * torch.nn.functional.cross_entropy(auxiliary, labels, reduction="sum")
    return loss


def perplexity(cross_entropy: float) -> float:
    """Return e to a mean cross-entropy in nats; infinite if it exceeds a float."""
    try:
        return math.exp(cross_entropy)
    except OverflowError:
        return math.inf
