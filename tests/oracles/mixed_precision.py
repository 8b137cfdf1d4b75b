"""A model in mixed precision in plain torch; shares no code with the engine.

Micikevicius et al. (2018): fp32 master weights, rounded to 16 bits when they are used. Gradients flow back through the
cast, so that a plain training loop updates the masters with 16-bit gradients.
"""

from collections.abc import Collection

import torch
from torch import nn
from torch.func import functional_call


class Mixed(nn.Module):
    """A model that computes in a 16-bit type and has inputs and outputs in fp32.

    The fp32 parameters of `inner` are the masters; those named in `kept` aren't rounded.
    """

    def __init__(self, inner: nn.Module, low_type: torch.dtype, kept: Collection[str] = ()) -> None:
        super().__init__()
        self.inner, self.low_type, self.kept = inner, low_type, kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        used = {n: p if n in self.kept else p.to(self.low_type) for n, p in self.inner.named_parameters()}
        output: torch.Tensor = functional_call(self.inner, used, (x.to(self.low_type),))
        return output.float()
