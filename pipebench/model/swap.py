"""Swapped layers: what they save for their backward moves to the host between forward and backward.

Every run of consecutive swapped layers becomes one module inside the stage's, which gives what autograd saves to a
`Keeper`. The idea is that of vDNN (Rhu et al., MICRO'16), and vPipe's virtualised tensors (TPDS'21).
"""

from typing import Any, Protocol

import torch
from torch import fx
from torch.autograd.graph import saved_tensors_hooks

from pipebench.model.folding import FoldedRun


class Keeper(Protocol):
    """Stores what the layers of one unit save for their backward."""

    def pack(self, tensor: torch.Tensor) -> Any:
        """Take a tensor that autograd saves; return what replaces it in the graph."""

    def unpack(self, packed: Any) -> torch.Tensor:
        """Return that tensor for its backward."""


class Swapped(FoldedRun):
    """Runs layers whose saved tensors its keeper stores."""

    def __init__(self, run: fx.GraphModule) -> None:
        super().__init__(run)
        self.keeper: Keeper | None = None  # of the running unit; None leaves saved tensors to autograd

    def forward(self, *values: Any) -> Any:
        """Return the values that later layers read, as a tuple."""
        if self.keeper is None or not torch.is_grad_enabled():
            return self.run(*values)
        with saved_tensors_hooks(self.keeper.pack, self.keeper.unpack):
            return self.run(*values)
