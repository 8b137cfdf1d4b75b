"""Makes models that have shapes and no weights: on the meta device, which takes neither memory nor time.

torch fills a meta tensor with normal noise by way of its compiler, whose import alone takes longer than anything else
here. There is nothing to fill: so it isn't.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class _Unfilled(TorchFunctionMode):
    """Leaves meta tensors as they are where they would be filled with normal noise."""

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
        return func(*args, **kwargs)


def _can_be_filled(tensor: torch.Tensor, mean: float = 0.0, std: float = 1.0, generator: object = None) -> bool:
    """Say whether it is a meta tensor that torch would fill; of arguments that it doesn't take it is to complain."""
    return tensor.is_meta and std >= 0


@contextmanager
def weightless() -> Iterator[None]:
    """Put every tensor that is made inside, unless its device is named, on the meta device, and spare filling it."""
    with torch.device("meta"), _Unfilled():
        yield
