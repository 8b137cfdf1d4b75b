"""Swapped layers: what they save for their backward is on the host for most of the time between forward and backward.

Every run of consecutive layers that are swapped becomes one module inside the stage's, which hands what autograd saves
to whoever keeps it. The idea is that of vDNN (Rhu et al., MICRO'16), and vPipe's virtualised tensors (TPDS'21).
"""

from typing import Any, Protocol

import torch
from torch import fx, nn
from torch.autograd.graph import saved_tensors_hooks


class Keeper(Protocol):
    """Keeps what the layers of one unit save for their backward, wherever it does."""

    def pack(self, tensor: torch.Tensor) -> Any:
        """Take a tensor that autograd saves; return what stands for it in the graph."""

    def unpack(self, packed: Any) -> torch.Tensor:
        """Return that tensor for its backward."""


class Swapped(nn.Module):
    """Runs layers that it shares with the stage; with gradients on, what they save is its keeper's.

    Args:
        run: the layers, each that draws seeded by the one before it. They stay the stage's own: this module has no
            parameters, and no names of them.

    Attributes:
        keeper: of the unit that runs; None leaves what is saved to autograd.
    """

    def __init__(self, run: fx.GraphModule) -> None:
        super().__init__()
        self._run = (run,)
        self.keeper: Keeper | None = None

    @property
    def run(self) -> fx.GraphModule:
        """The layers."""
        return self._run[0]

    def forward(self, *values: Any) -> Any:
        """Return what the layers put out for later ones, as a tuple."""
        if self.keeper is None or not torch.is_grad_enabled():
            return self.run(*values)
        with saved_tensors_hooks(self.keeper.pack, self.keeper.unpack):
            return self.run(*values)
