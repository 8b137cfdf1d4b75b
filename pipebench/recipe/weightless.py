"""Builds models without weights on the meta device, which has shapes only and takes neither memory nor time.

Filling tensors with normal noise is skipped: on the meta device torch imports its compiler for it, which takes longer
than all else here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

# Operations by which torch 2.11 makes truncated noise and which need the compiler; the shape stays the same.
_STEPS = (torch.Tensor.erfinv_, torch.Tensor.clamp_)


class _NoFilling(TorchFunctionMode):
    """Skips calls that fill a meta tensor with normal noise, truncated or not."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.Tensor.normal_, nn.init.normal_) and _can_be_filled(*args, **kwargs):
            return args[0] if args else kwargs["tensor"]
        if func in _STEPS and args[0].is_meta:
            return args[0]
        return func(*args, **kwargs)


def _can_be_filled(tensor: torch.Tensor, mean: float = 0.0, std: float = 1.0, generator: object = None) -> bool:
    """Return whether these arguments fill a meta tensor; invalid ones are left to torch, which reports them."""
    return tensor.is_meta and std >= 0


@contextmanager
def weightless() -> Iterator[None]:
    """Make tensors on the meta device unless they name a device, without filling them with noise."""
    with torch.device("meta"), _NoFilling():
        yield
