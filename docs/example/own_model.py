"""A model, a data set and a metric of one's own: pipebench is told their names, in base.yaml, and no more."""

import torch
from torch import nn
from torch.utils.data import TensorDataset


class Classifier(nn.Module):
    """Tells which of three arms of a spiral a point is on."""

    def __init__(self, width: int = 64, depth: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(2, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 3)

    def forward(self, point: torch.Tensor) -> torch.Tensor:
        """Map [samples, 2] to [samples, 3]; every block is added to what it reads."""
        hidden = torch.tanh(self.first(point))
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        scores: torch.Tensor = self.head(hidden)
        return scores


def spirals(num_train: int = 3000, num_eval: int = 600, noise: float = 0.02) -> tuple[TensorDataset, TensorDataset]:
    """Return points on three spirals, and on which: to train on, and held out. Samples are (point, arm)."""
    arm = torch.randint(3, (num_train + num_eval,))
    turn = torch.rand(num_train + num_eval)
    angle = 4 * turn + 2 * torch.pi / 3 * arm
    point = turn.unsqueeze(1) * torch.stack([angle.cos(), angle.sin()], 1)
    point += noise * torch.randn(point.shape)
    return TensorDataset(point[:num_train], arm[:num_train]), TensorDataset(point[num_train:], arm[num_train:])


def certainty(scores: torch.Tensor, arm: torch.Tensor, sharpness: float = 1.0) -> torch.Tensor:
    """Return how sure the model is of the right arm, one number per sample, 0 to 1: a metric, higher is better."""
    return (sharpness * scores).softmax(1).gather(1, arm.unsqueeze(1)).squeeze(1)
