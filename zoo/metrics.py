"""Losses and metrics that several data sets use, summed over samples or tokens; and perplexity."""

from __future__ import annotations

import math
from typing import Any

from pipebench.zoo.late import torch

# Inception-v3's paper (Szegedy et al. 2016) doesn't give the weight of the auxiliary loss. 0.4 is that of the authors'
# training script in TensorFlow's TF-Slim, and of PyTorch's tutorial on fine-tuning torchvision's models.
AUXILIARY_WEIGHT = 0.4


def num_correct(logits: torch.Tensor, labels: torch.Tensor, k: int = 1) -> torch.Tensor:
    """Count the samples whose label is among the k largest logits, or among all if k is more than the classes.

    Args:
        logits: [samples, classes] float.
        labels: [samples] int64.
        k: at least 1.

    Returns:
        A scalar, int64, on the logits' device.
    """
    best = logits.topk(min(k, logits.shape[1]), dim=1).indices
    return (best == labels.unsqueeze(1)).sum()


def main_logits(output: Any) -> torch.Tensor:
    """Return the logits in a classifier's output, which is logits or (logits, auxiliary logits)."""
    logits: torch.Tensor = output[0] if isinstance(output, tuple | list) else output
    return logits


def classification_loss(output: Any, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy summed over samples, plus that of auxiliary logits times `AUXILIARY_WEIGHT`.

    Args:
        output: logits [samples, classes] float, or a tuple of logits and any auxiliary logits.
        labels: [samples] int64.
    """
    loss = torch.nn.functional.cross_entropy(main_logits(output), labels, reduction="sum")
    for auxiliary in output[1:] if isinstance(output, tuple | list) else ():
        loss = loss + AUXILIARY_WEIGHT * torch.nn.functional.cross_entropy(auxiliary, labels, reduction="sum")
    return loss


def token_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, ignored: int = -100, label_smoothing: float = 0.0
) -> torch.Tensor:
    """Return the cross-entropy in nats, summed over tokens: a scalar.

    Args:
        logits: [samples, tokens, vocabulary] float.
        labels: [samples, tokens] int64.
        ignored: the label of padding, which isn't counted.
        label_smoothing: share of the probability that is spread evenly over the vocabulary.
    """
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=ignored, label_smoothing=label_smoothing, reduction="sum"
    )


def perplexity(cross_entropy: float) -> float:
    """Return e to the power of a mean cross-entropy in nats; infinite if that exceeds a float."""
    try:
        return math.exp(cross_entropy)
    except OverflowError:
        return math.inf
