"""The training loss: of this process since the drain, and of all processes since the evaluation."""

import math
from collections.abc import Iterable, Mapping

import torch

_CUDA_LOSS_EVERY = 50  # reading a loss waits for the GPU: look at it only so often


class TrainingLoss:
    """Adds up units' losses.

    Attributes:
        total: sum over all processes since the last evaluation.
        weight: what a mean loss divides that by.
    """

    def __init__(self, total: float = 0.0, weight: float = 0.0) -> None:
        self.total, self.weight = total, weight
        self._own: float | torch.Tensor = 0.0  # a tensor as long as it stays on the GPU
        self._own_weight = 0.0
        self._num_units = 0

    def add(self, loss: torch.Tensor, weight: float) -> bool:
        """Add the loss of one unit of this process; return whether the sum is finite, as far as it has been read."""
        self._own_weight += weight
        self._own = self._own + loss
        self._num_units += 1
        if loss.is_cuda and self._num_units % _CUDA_LOSS_EVERY:
            return True
        self._own = float(self._own)
        return math.isfinite(self._own)

    def take_share(self) -> dict[str, float]:
        """Return what this process has added since the drain, and begin anew."""
        share = {"loss": float(self._own), "weight": self._own_weight}
        self._own = self._own_weight = 0.0
        return share

    def add_shares(self, shares: Iterable[Mapping[str, float]]) -> bool:
        """Add what all processes returned from `take_share`; return whether the sum is finite."""
        for share in shares:
            self.total += share["loss"]
            self.weight += share["weight"]
        return math.isfinite(self.total)

    def take_mean(self) -> float:
        """Return the mean loss since the last evaluation, and begin anew."""
        mean = self.total / self.weight
        self.total = self.weight = 0.0
        return mean
