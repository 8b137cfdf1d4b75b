"""A roofline over kernels: the seconds of every operation on a device that isn't here, without running it.

Williams, Waterman and Patterson, "Roofline" (2009), applied to each ATen operation. It takes the longest of three
times: its arithmetic at the peak rate and its bytes at the peak bandwidth, each times an efficiency of
`efficiencies.py`, and the time to launch the kernel. A cluster's pause after every kernel is added.
"""

import functools
import importlib
import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipebench.model.values import tensors_in
from pipebench.model.without_compiler import without_compiler
from pipebench.profile import recurrent
from pipebench.profile.devices import DeviceSpec
from pipebench.profile.efficiencies import (
    MIN_CHANNELS,
    SPLITS,
    TILES,
    WINOGRAD_GAIN,
    WINOGRAD_KERNEL,
    WINOGRAD_PATCH,
    WINOGRAD_ROWS,
    WINOGRAD_TILE,
    Convolutions,
    Efficiencies,
)
from pipebench.profile.repeated import Outputs, call_of, outputs_of

aten = torch.ops.aten
# Operations without a kernel: they allocate, or answer a question about a tensor. Views, which ATen's schemas mark, are
# free as well.
_FREE = {
    *("empty", "empty_like", "empty_strided", "new_empty", "detach", "lift_fresh", "_unsafe_view", "resize_"),
    *("alias", "is_same_size", "sym_size", "sym_numel", "sym_stride", "_reshape_alias"),
}
# Kernels that read so many of their first tensors twice: once for the batch's statistics, once to apply them.
_READ_AGAIN = {
    **dict.fromkeys(
        ("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "cudnn_batch_norm"), 1
    ),
    **dict.fromkeys(("native_batch_norm_backward", "batch_norm_backward", "cudnn_batch_norm_backward"), 2),
}
_NORMALISATIONS = frozenset(_READ_AGAIN)
# Kernels that read no more bytes of their first tensor than they write.
_GATHERS = frozenset(("embedding", "gather", "index", "index_select"))
_PRODUCTS = frozenset((aten.mm, aten.addmm, aten.bmm, aten.baddbmm))
_FORWARD, _INPUT, _WEIGHT = range(3)  # the three products of a convolution: the result and two gradients
_MOST_KNOWN = 1 << 16  # cached operations; a model has some thousands, different ones at every minibatch size
_RECURRENT = {aten._cudnn_rnn: recurrent.forward, aten._cudnn_rnn_backward: recurrent.backward}


class _Cost(NamedTuple):
    flops: float
    num_bytes: float
    launches: int
    seconds: float


@functools.lru_cache(maxsize=8)
def _known_operations(device: DeviceSpec, efficiencies: Efficiencies) -> dict[Hashable, tuple[Outputs, _Cost]]:
    """Return the cache of a device: an operation and its arguments' types and shapes to its outputs and cost.

    Networks repeat operations, and torch computes shapes in Python: those of a BatchNorm take it 10 ms.
    """
    return {}


class Roofline(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the cost of all operations under it on a device; meant for tensors of the meta device."""

    def __init__(self, device: DeviceSpec, efficiencies: Efficiencies | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._efficiencies = efficiencies or device.efficiencies
        self.flops = 0  # of products and convolutions by the direct algorithm; a multiply-add counts two
        self.moved_bytes = 0  # read and written
        self.launches = 0  # kernels
        self.seconds = 0.0  # of all kernels
        self._dtype: torch.dtype | None = None  # of the operation at hand
        self._known = _known_operations(device, self._efficiencies)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation and add its cost."""
        kwargs = kwargs or {}
        if func.overloadpacket in _RECURRENT:
            out, kernels = _RECURRENT[func.overloadpacket](*args)
            self._dtype = args[0].dtype
            for kernel in kernels:
                self._add_library_kernels(kernel)
            return out
        name = func._schema.name.split("::")[-1]
        if func.is_view or name in _FREE:
            return func(*args, **kwargs)
        call = call_of(func, args, kwargs)
        if call is None or call not in self._known:
            out = func(*args, **kwargs)
            cost, outputs = self._cost(func, name, args, kwargs, out), outputs_of(out, (args, kwargs))
            if call is not None and outputs is not None and len(self._known) < _MOST_KNOWN:
                self._known[call] = outputs, cost
        else:
            outputs, cost = self._known[call]
            out = outputs.made()
        self._add(*cost)
        return out

    def _cost(self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> _Cost:
        """Return the cost of an operation that has returned `out`."""
        num_bytes = _bytes_of(name, args, kwargs, out)
        count = _flop_counters().get(func.overloadpacket)
        flops = int(count(*args, **kwargs, out_val=out)) if count else 0
        self._dtype = _type_of(out)
        launches, seconds = 1, self._operation_s(flops / self._occupied_by(func.overloadpacket, args), num_bytes, name)
        if func.overloadpacket is aten.convolution:
            seconds = self._convolution_s(flops, num_bytes, out, args)
        elif func.overloadpacket is aten.convolution_backward:
            launches, seconds = self._convolution_backward_s(flops, num_bytes, args)
        seconds = max(seconds, launches * self._device.launch_s) + launches * self._device.pause_s
        return _Cost(flops, num_bytes, launches, seconds)

    def _add(self, flops: float, num_bytes: float, launches: int, seconds: float) -> None:
        self.flops += int(flops)
        self.moved_bytes += int(num_bytes)
        self.launches += launches
        self.seconds += seconds

    def _add_library_kernels(self, kernels: recurrent.Kernels) -> None:
        """Add kernels that a library launches one after the other, without Python and a pause between them."""
        flops = 2 * math.prod(kernels.product) if kernels.product else 0
        used = self._occupied(kernels.product[0], kernels.product[2]) if kernels.product else 1.0
        each_s = max(self._operation_s(flops / used, kernels.num_bytes), self._efficiencies.library_launch_s)
        count = kernels.count
        self._add(flops * count, kernels.num_bytes * count, count, each_s * count)

    def _operation_s(self, flops: float, num_bytes: float, name: str = "") -> float:
        """Return the seconds of an operation's arithmetic, at the rate of products, or of its bytes, if longer."""
        known = self._efficiencies
        efficiency = known.tensor_product if self._device.tensor_flops_per_s(self._dtype) else known.product
        fraction = known.normalisation if name in _NORMALISATIONS else None
        if "pool" in name and "backward" in name:
            fraction = known.pooling_backward
        return max(self._arithmetic_s(flops, efficiency), self._memory_s(num_bytes, fraction))

    def _occupied_by(self, packet: Any, args: Sequence[Any]) -> float:
        """Return the fraction of the device that an operation's matrix products use; 1 of other operations."""
        if packet not in _PRODUCTS:
            return 1.0
        first, second = args[-2:]
        return self._occupied(first.shape[-2], second.shape[-1], math.prod(first.shape[:-2]))

    def _occupied(self, rows: float, columns: float, num_products: int = 1) -> float:
        """Return the fraction of the device that matrix products use with the best tiling."""
        if rows * columns * num_products == 0:
            return 1.0  # no arithmetic
        width = self._device.num_multiprocessors  # tiles that it computes at a time
        best = 0.0
        for (tile_rows, tile_columns), split in itertools.product(TILES, SPLITS):
            num_tiles = math.ceil(rows / tile_rows) * math.ceil(columns / tile_columns) * num_products * split
            computed = tile_rows * tile_columns * width * math.ceil(num_tiles / width)
            best = max(best, rows * columns * num_products * split / computed)
        return best

    def _arithmetic_s(self, flops: float, efficiency: float) -> float:
        peak = self._device.tensor_flops_per_s(self._dtype) or self._device.flops_per_s
        return flops / (peak * efficiency)

    def _memory_s(self, num_bytes: float, fraction: float | None = None) -> float:
        return num_bytes / (self._device.memory_bytes_per_s * (fraction or self._efficiencies.memory))

    def _convolution_s(
        self, flops: float, num_bytes: float, out: torch.Tensor, args: Sequence[Any], product: int = _FORWARD
    ) -> float:
        """Return the seconds of one of a convolution's products. `args` are `aten.convolution`'s.

        Without tensor cores a convolution by Winograd's algorithm may be faster than the direct one. Where fractions of
        the peaks are known per product, cuDNN's rules say which algorithm it takes (`has_winograd`); else it is the
        faster one, which cuDNN finds by trying.
        """
        x, weight, _, stride, _, dilation, transposed, _, groups = args
        known = self._efficiencies
        if self._device.tensor_flops_per_s(self._dtype):  # tensor cores multiply directly
            in_tf32 = self._dtype is torch.float32
            fraction = known.tf32_convolution if in_tf32 else known.tensor_convolution
            return max(self._arithmetic_s(flops, fraction or known.convolution), self._memory_s(num_bytes))
        has_winograd = tuple(weight.shape[2:]) == (WINOGRAD_KERNEL, WINOGRAD_KERNEL)
        has_winograd &= {*stride, *dilation} == {1} and not transposed and groups == 1
        if known.convolutions:
            moved = x.nbytes + weight.nbytes + out.nbytes
            few_rows = product == _INPUT and min(out.shape[2:]) < WINOGRAD_ROWS
            has_winograd &= x.shape[1] >= MIN_CHANNELS and not few_rows
            used = min(1.0, weight.shape[1] / MIN_CHANNELS)
            fraction = _arithmetic_fraction(known.convolutions, product, has_winograd)
            streamed_s = self._memory_s(moved, _memory_fraction(known.convolutions, product, {*stride} != {1}))
            factor = 1.0 if product == _FORWARD else known.convolutions.gradients
            return max(self._arithmetic_s(flops / used, fraction), streamed_s) * factor
        direct_s = max(self._arithmetic_s(flops, known.convolution), self._memory_s(num_bytes))
        return min(direct_s, self._winograd_s(flops, x, out)) if has_winograd else direct_s

    def _convolution_backward_s(self, flops: int, num_bytes: int, args: Sequence[Any]) -> tuple[int, float]:
        """Return number of kernels and seconds; the gradients of input, weight and bias are a kernel each."""
        gradient, x, weight, bias_sizes, *geometry, (*products, bias) = args
        num_products = sum(products)
        forward_args = (x, weight, bias_sizes, *geometry)
        seconds = sum(
            self._convolution_s(flops / num_products, num_bytes, gradient, forward_args, product)
            for product in itertools.compress((_INPUT, _WEIGHT), products)
        )
        return num_products + bias, seconds + (self._memory_s(gradient.nbytes) if bias else 0.0)

    def _winograd_s(self, flops: float, x: torch.Tensor, out: torch.Tensor) -> float:
        """Return the seconds of Winograd's passes: transform the input, multiply, transform the result back."""
        pixels = math.prod(out.shape[2:])
        tiles = math.prod(math.ceil(side / WINOGRAD_TILE) for side in out.shape[2:])
        grown = tiles * WINOGRAD_PATCH**2 / pixels  # transformed points per pixel: 2.25, more at ragged edges
        plain_bytes = x.nbytes + out.nbytes
        arithmetic = self._arithmetic_s(flops * grown / WINOGRAD_KERNEL**2, self._efficiencies.convolution)
        return self._memory_s(plain_bytes * (1 + grown)) + max(arithmetic, self._memory_s(plain_bytes * grown))


without_compiler((Roofline.__torch_dispatch__,))
# Modules by which torch computes the shapes of operations that have no formula of their own.
for _name in ("torch._refs", "torch._refs.linalg", "torch._refs.nn.functional", "torch._refs.special"):
    without_compiler(vars(importlib.import_module(_name)).values())


def _arithmetic_fraction(known: Convolutions, product: int, winograd: bool) -> float:
    if product == _FORWARD:
        return known.winograd_forward if winograd else known.direct
    return known.direct * (WINOGRAD_GAIN if winograd else 1.0)


def _memory_fraction(known: Convolutions, product: int, strided: bool) -> float:
    of_input = known.strided_input_memory if strided else known.input_memory
    return {_FORWARD: known.forward_memory, _INPUT: of_input, _WEIGHT: known.weight_memory}[product]


@functools.cache
def _flop_counters() -> Mapping[Any, Callable[..., Any]]:
    """Return torch's flop formulas. The import is late because the module imports triton if that is installed."""
    from torch.utils.flop_counter import flop_registry

    return flop_registry


def _bytes_of(name: str, args: Any, kwargs: Any, out: Any) -> int:
    """Return the bytes an operation reads and writes."""
    read = [*map(_num_bytes, tensors_in((args, kwargs)))]
    written = sum(map(_num_bytes, tensors_in(out)))
    if name in _GATHERS:
        read[0] = min(read[0], written)
    if name == "embedding_dense_backward":  # writes zeros, then reads and writes the rows of its first tensor
        written += 2 * read[0]
    return sum(read) + written + sum(read[: _READ_AGAIN.get(name, 0)])


def _type_of(out: Any) -> torch.dtype | None:
    """Return the dtype of an operation's first result, which is taken to be that of its arithmetic."""
    return next((tensor.dtype for tensor in tensors_in(out)), None)


def _num_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes behind a tensor; expanded dimensions count once, since repeated reads hit the cache."""
    if 0 in tensor.shape:
        return 0
    return (
        math.prod(n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride) * tensor.element_size()
    )


def priced(
    device: DeviceSpec, work: Callable[[], Any], efficiencies: Efficiencies | None = None, *, with_data: bool = False
) -> tuple[Any, Callable[[], float]]:
    """Run `work` on meta tensors; return its result and its seconds on the device: a clock for `walk`.

    `with_data`: `work` runs on tensors of this machine's device, whose operations are priced. They are nearly those of
    the device, except in recurrent layers: many operations here, few cuDNN kernels there.
    """
    with nullcontext() if with_data else recurrent.GpuKernels(), Roofline(device, efficiencies) as roofline:
        value = work()
    return value, lambda: roofline.seconds
