"""Recurrent layers and dropout as the kernels that a GPU runs; torch would decompose them on the meta device.

On the meta device an LSTM becomes a dozen small operations per step, slow to trace and unlike what cuDNN runs.
`GpuKernels` replaces these calls by the operations that CUDA tensors get. `forward` and `backward` return the kernels
that cuDNN's standard algorithm launches for them: Appleyard, Kocisky and Blunsom, "Optimizing performance of recurrent
neural networks on GPUs" (2016), without the overlap of neighbouring layers. Persistent kernels are left out, since
cuDNN has them only for small batches and for weights that fit into registers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CUDNN_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}  # cuDNN's numbers
_LSTM = _CUDNN_MODES["lstm"]
_GATES = (1, 1, 4, 3)  # by that number


@dataclass(frozen=True)
class Kernels:
    """Equal kernels that a library launches one after the other, without Python in between."""

    product: tuple[float, float, float] | None  # rows, inner size and columns of each one's matrix product, if any
    num_bytes: float  # bytes that each one reads and writes
    count: int = 1


@dataclass(frozen=True)
class _Shape:
    """The sizes of one call of cuDNN. Rows are steps times samples; with packed sequences, the sum of their lengths."""

    gates: int
    steps: int
    rows: int
    input_size: int
    hidden_size: int
    projected_size: int
    num_layers: int
    directions: int
    is_lstm: bool
    itemsize: int

    @property
    def output_size(self) -> int:
        """Output features per row and direction."""
        return self.projected_size or self.hidden_size

    @property
    def per_layer(self) -> Iterator[int]:
        """The width of every layer's input, once per direction."""
        for layer in range(self.num_layers):
            yield from [self.input_size if layer == 0 else self.output_size * self.directions] * self.directions


class GpuKernels(TorchFunctionMode):
    """Replaces recurrent layers and dropout, which torch decomposes on the meta device, by CUDA's operations."""

    def __torch_function__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the function or its CUDA replacement."""
        name = getattr(func, "__name__", "")
        if name in _CUDNN_MODES and func is getattr(torch, name, None):
            return _cudnn_rnn(_CUDNN_MODES[name], *args)
        if func is torch.nn.functional.dropout:
            return _dropout(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def forward(*args: Any) -> tuple[tuple[Any, ...], list[Kernels]]:
    """Return the empty outputs and the kernels of `aten._cudnn_rnn`, whose arguments these are.

    The reserve, saved for the backward, holds every gate and, of an LSTM, the cell.
    """
    x, _, _, _, hx, cx, mode, *_ = args
    shape = _shape(x, *args[6:])
    output = x.new_empty(*x.shape[:-1], shape.output_size * shape.directions)
    reserved = shape.rows * shape.hidden_size * (shape.gates + shape.is_lstm) * shape.num_layers * shape.directions
    outputs = (
        output,
        torch.empty_like(hx),
        torch.empty_like(cx) if mode == _LSTM else x.new_empty(0),
        x.new_empty(reserved * shape.itemsize, dtype=torch.uint8),
        x.new_empty(0),
    )
    return outputs, list(_forward_kernels(shape))


def backward(*args: Any) -> tuple[tuple[Any, ...], list[Kernels]]:
    """Return the empty gradients and the kernels of `aten._cudnn_rnn_backward`, whose arguments these are."""
    x, weights, _, _, hx, cx, *_, mask = args
    wants_x, wants_hx, wants_cx, wants_weights = mask
    shape = _shape(x, *args[10:])
    gradients = (
        torch.empty_like(x) if wants_x else None,
        torch.empty_like(hx) if wants_hx else None,
        torch.empty_like(cx) if wants_cx and cx is not None else None,
        [torch.empty_like(weight) for weight in weights] if wants_weights else [],
    )
    return gradients, list(_backward_kernels(shape, wants_weights, wants_x))


def _forward_kernels(shape: _Shape) -> Iterator[Kernels]:
    """Per layer and direction: one product for the inputs of all steps, then step by step a product and the gates."""
    width = shape.gates * shape.hidden_size
    for input_size in shape.per_layer:
        yield _product(shape.rows, input_size, width, shape.itemsize)
        yield from _steps(shape, backward=False)


def _backward_kernels(shape: _Shape, wants_weights: bool, wants_x: bool) -> Iterator[Kernels]:
    """Per layer and direction: step by step the gates and a product, then one product each for inputs and weights."""
    width = shape.gates * shape.hidden_size
    for index, input_size in enumerate(shape.per_layer):
        yield from _steps(shape, backward=True)
        if wants_x or index >= shape.directions:
            yield _product(shape.rows, width, input_size, shape.itemsize)
        if wants_weights:
            yield _product(input_size, shape.rows, width, shape.itemsize)
            yield _product(shape.output_size, shape.rows, width, shape.itemsize)
            if shape.projected_size:
                yield _product(shape.hidden_size, shape.rows, shape.projected_size, shape.itemsize)


def _steps(shape: _Shape, *, backward: bool) -> Iterator[Kernels]:
    """Yield the sequential part: every step reads the recurrent weights again."""
    samples = shape.rows / shape.steps
    width = shape.gates * shape.hidden_size
    yield _product(samples, shape.output_size, width, shape.itemsize, count=shape.steps)
    if shape.projected_size:
        yield _product(samples, shape.hidden_size, shape.projected_size, shape.itemsize, count=shape.steps)
    # Per sample, the elementwise kernel of a forward reads the two products and saves the gates. That of a backward
    # reads the gates and the two parts of their gradient. Besides, cell and output are read or written once or twice.
    per_sample = 3 * width + (4 if shape.is_lstm else 2) * shape.hidden_size + backward * shape.hidden_size
    yield Kernels(None, samples * per_sample * shape.itemsize, shape.steps)


def _product(rows: float, inner: float, columns: float, itemsize: int, count: int = 1) -> Kernels:
    num_bytes = (rows * inner + inner * columns + rows * columns) * itemsize
    return Kernels((rows, inner, columns), num_bytes, count)


def _shape(x: torch.Tensor, mode: int, *args: Any) -> _Shape:
    """Return the sizes of a call; `args` are those of `aten._cudnn_rnn` after `mode`."""
    hidden_size, projected_size, num_layers, batch_first, _, _, bidirectional, batch_sizes, *_ = args
    return _Shape(
        gates=_GATES[mode],
        steps=len(batch_sizes) or x.shape[1 if batch_first else 0],
        rows=x.shape[0] if batch_sizes else x.shape[0] * x.shape[1],
        input_size=x.shape[-1],
        hidden_size=hidden_size,
        projected_size=projected_size,
        num_layers=num_layers,
        directions=2 if bidirectional else 1,
        is_lstm=mode == _LSTM,
        itemsize=x.element_size(),
    )


def _cudnn_rnn(mode: int, x: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    """Call cuDNN's operation with the arguments of `torch.lstm`, `torch.gru`, `torch.rnn_tanh` or `torch.rnn_relu`."""
    batch_sizes: list[int] = []
    if isinstance(args[2], (list, tuple)):  # packed: batch sizes precede the hidden state, and there is no batch_first
        sizes, hidden, weights, has_biases, num_layers, dropout, train, bidirectional = args
        batch_sizes, batch_first = sizes.tolist(), False
    else:
        hidden, weights, has_biases, num_layers, dropout, train, bidirectional, batch_first = args
    hx, cx = hidden if mode == _LSTM else (hidden, None)
    hidden_size = weights[1].shape[0] // _GATES[mode]
    projected_size = hx.shape[-1] if hx.shape[-1] != hidden_size else 0
    stride = (4 if has_biases else 2) + bool(projected_size)
    output, hy, cy, *_ = torch._cudnn_rnn(
        x, weights, stride, None, hx, cx, mode, hidden_size, projected_size, num_layers, batch_first, dropout, train,
        bidirectional, batch_sizes, None,
    )  # fmt: skip
    return (output, hy, cy) if mode == _LSTM else (output, hy)


def _dropout(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Apply dropout as one kernel that saves a mask of bytes, as on CUDA except in place."""
    given: dict[str, Any] = {**dict(zip(("input", "p", "training", "inplace"), args, strict=False)), **kwargs}
    rate, training = given.get("p", 0.5), given.get("training", True)
    if given.get("inplace", False) or not training or rate in (0, 1):
        return func(*args, **kwargs)  # type: ignore[no-any-return]
    output, _ = torch.native_dropout(given["input"], rate, training)
    return output
