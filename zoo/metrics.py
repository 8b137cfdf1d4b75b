"""Metrics of classifiers, as sums over samples: divided by the number of samples they are fractions."""

import torch


def num_correct(logits: torch.Tensor, labels: torch.Tensor, k: int = 1) -> torch.Tensor:
    """Count the samples whose label is among the k largest logits.

    Args:
        logits: [samples, classes] float.
        labels: [samples] int64.
        k: at least 1; more than the number of classes counts as all of them.

    Returns:
        A scalar, int64, on the logits' device.
    """
    best = logits.topk(min(k, logits.shape[1]), dim=1).indices
    return (best == labels.unsqueeze(1)).sum()
