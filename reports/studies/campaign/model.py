"""The model that the campaign trains, as a user's own: small, with every kind of state that a checkpoint restores."""

import torch
from torch import nn

from reports.studies.campaign.points import arm

_WATCH = arm()
_CHANNELS, _WIDE = 4, 12


class Small(nn.Module):
    """A network with running statistics and dropout, of twelve layers: [samples, 1, 8, 8] to [samples, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, _CHANNELS, 3), nn.BatchNorm2d(_CHANNELS)
        self.again, self.flat = nn.Conv2d(_CHANNELS, _CHANNELS, 3), nn.Flatten()
        self.drop = nn.Dropout(0.2)
        self.wide, self.middle = nn.Linear(_CHANNELS * 16, _WIDE), nn.Linear(_WIDE, _WIDE)
        self.narrow, self.head = nn.Linear(_WIDE, _WIDE), nn.Linear(_WIDE, 4)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Map images to scores."""
        x = torch.relu(self.norm(self.conv(image)))
        x = self.drop(self.flat(torch.relu(self.again(x))))
        x = self.middle(torch.tanh(self.wide(x)))
        return self.head(torch.tanh(self.narrow(x)))  # type: ignore[no-any-return]


def small() -> nn.Module:
    """Return the model."""
    model = Small()
    if _WATCH is not None:
        _WATCH.reached("model", 0)
    return model
