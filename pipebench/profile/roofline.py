"""A roofline over kernels: what every operation that reaches the device would cost there, without running it.

Williams, Waterman and Patterson, "Roofline" (2009), applied to each ATen operation: arithmetic at the peak rate, bytes
at the peak bandwidth, each times an efficiency of `devices.py`, and never less than the host needs to launch it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from pipebench.profile.devices import (
    CHANNEL_BLOCK,
    GEMM_EFFICIENCY,
    LAUNCH_S,
    MEMORY_EFFICIENCY,
    WINOGRAD_KERNEL,
    WINOGRAD_PATCH,
    WINOGRAD_TILE,
    WORKSPACE_FRACTION,
    DeviceSpec,
)

aten = torch.ops.aten
# Allocate, or say something about a tensor: no kernel. (Views, which ATen's schemas mark, are free too.)
_FREE = frozenset(
    (
        *("empty", "empty_like", "empty_strided", "new_empty", "detach", "lift_fresh", "_unsafe_view", "resize_"),
        *("alias", "is_same_size", "sym_size", "sym_numel", "sym_stride", "_reshape_alias"),
    )
)
# Kernels that read their first tensors more than once: batch statistics come before what is made with them.
_READ_AGAIN = {
    "native_batch_norm": 1,
    "_native_batch_norm_legit": 1,
    "_batch_norm_with_update": 1,
    "cudnn_batch_norm": 1,
    "native_batch_norm_backward": 2,
    "batch_norm_backward": 2,
    "cudnn_batch_norm_backward": 2,
}


class Roofline(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the work of all operations under it, in seconds on a device; meant for tensors of the meta device.

    Attributes:
        flops: floating-point operations of products and convolutions (a multiply-add is two), by the direct algorithm.
        moved_bytes: bytes read and written.
        launches: kernels.
        seconds: what they take.
    """

    def __init__(self, device: DeviceSpec) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self.flops = 0
        self.moved_bytes = 0
        self.launches = 0
        self.seconds = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation and add its cost."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name.split("::")[-1]
        if func.is_view or name in _FREE:
            return out
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        written = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        again = sum(tensor.nbytes for tensor in read[: _READ_AGAIN.get(name, 0)])
        num_bytes = sum(tensor.nbytes for tensor in (*read, *written)) + again
        count = flop_registry.get(func.overloadpacket)
        flops = int(count(*args, **kwargs, out_val=out)) if count else 0
        launches, seconds = 1, self._direct_s(flops, num_bytes)
        if func.overloadpacket is aten.convolution:
            seconds = self._convolution_s(flops, num_bytes, out, args)
        elif func.overloadpacket is aten.convolution_backward:
            launches, seconds = self._convolution_backward_s(flops, num_bytes, args)
        self.flops += flops
        self.moved_bytes += num_bytes
        self.launches += launches
        self.seconds += max(seconds, launches * LAUNCH_S)
        return out

    def _direct_s(self, flops: float, num_bytes: float) -> float:
        return max(self._arithmetic_s(flops), self._memory_s(num_bytes))

    def _arithmetic_s(self, flops: float) -> float:
        return flops / (self._device.flops_per_s * GEMM_EFFICIENCY)

    def _memory_s(self, num_bytes: float) -> float:
        return num_bytes / (self._device.memory_bytes_per_s * MEMORY_EFFICIENCY)

    def _convolution_s(self, flops: float, num_bytes: float, out: torch.Tensor, args: Sequence[Any]) -> float:
        """Return the seconds of the faster algorithm; cuDNN finds it by trying. `args` are `aten.convolution`'s."""
        x, weight, _, stride, _, dilation, transposed, _, groups = args
        channels = weight.shape[1]
        blocks = math.ceil(channels / CHANNEL_BLOCK) if groups == 1 else channels / CHANNEL_BLOCK
        direct = self._direct_s(flops * blocks * CHANNEL_BLOCK / channels, num_bytes)
        square = tuple(weight.shape[2:]) == (WINOGRAD_KERNEL, WINOGRAD_KERNEL)
        plain = {*stride, *dilation} == {1} and not transposed and groups == 1 and channels >= CHANNEL_BLOCK
        return min(direct, self._winograd_s(flops, x, out)) if square and plain else direct

    def _convolution_backward_s(self, flops: int, num_bytes: int, args: Sequence[Any]) -> tuple[int, float]:
        """Return kernels and seconds; the gradients of input, weight and bias are kernels of their own."""
        gradient, x, weight, bias_sizes, *geometry, (*products, bias) = args
        num_products = sum(products)
        forward_args = (x, weight, bias_sizes, *geometry)
        seconds = sum(
            self._convolution_s(flops / num_products, num_bytes, gradient, forward_args) for _ in range(num_products)
        )
        return num_products + bias, seconds + (self._memory_s(gradient.nbytes) if bias else 0.0)

    def _winograd_s(self, flops: float, x: torch.Tensor, out: torch.Tensor) -> float:
        """Return the seconds of transforming the input, multiplying and transforming back, or infinity."""
        pixels = math.prod(out.shape[2:])
        tiles = math.prod(math.ceil(side / WINOGRAD_TILE) for side in out.shape[2:])
        grown = tiles * WINOGRAD_PATCH**2 / pixels  # transformed points per pixel: 2.25, more at ragged edges
        plain_bytes = x.nbytes + out.nbytes
        if plain_bytes * grown > self._device.memory_bytes * WORKSPACE_FRACTION:
            return math.inf
        product = self._direct_s(flops * grown / WINOGRAD_KERNEL**2, plain_bytes * grown)
        return self._memory_s(plain_bytes * (1 + grown)) + product


def priced(device: DeviceSpec, work: Callable[[], Any]) -> tuple[Any, Callable[[], float]]:
    """Do some work on meta tensors; return its result and its seconds on the device: a clock for `walk`."""
    with Roofline(device) as roofline:
        value = work()
    return value, lambda: roofline.seconds
