"""Checks on tensors that are read back: whether they are dense, and of the expected shape and type.

Kernels trust their arguments: they write beyond the end of an optimizer state that has another shape than its
parameter, or overlapping elements. So every tensor is checked before use.
"""

from dataclasses import dataclass

import torch

from pipebench.checkpoint.state import CheckpointError


@dataclass(frozen=True)
class Form:
    """Shape and type of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Form":
        """Return a tensor's form."""
        return cls(tuple(tensor.shape), tensor.dtype)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


def check_plain(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that isn't dense on the CPU, with one place in its storage for each element and no more.

    Raises:
        CheckpointError: begins with `name` and says what it is instead.
    """
    problem = _problem(tensor)
    if problem is not None:
        raise CheckpointError(f"{name}: found a tensor {problem}, expected is a plain one")


def check_form(name: str, found: object, expected: Form) -> None:
    """Raise a CheckpointError for anything but a plain tensor of this shape and type; it names found and expected."""
    if not isinstance(found, torch.Tensor):
        raise CheckpointError(f"{name}: found {kind_of(found)}, expected is {expected}")
    check_plain(name, found)
    if Form.of(found) != expected:
        raise CheckpointError(f"{name}: found {Form.of(found)}, expected is {expected}")


def has_nan(tensor: torch.Tensor) -> bool:
    """Return whether an element is NaN."""
    return (tensor.is_floating_point() or tensor.is_complex()) and bool(tensor.isnan().any())


def has_infinite(tensor: torch.Tensor) -> bool:
    """Return whether an element is infinite."""
    return (tensor.is_floating_point() or tensor.is_complex()) and bool(tensor.isinf().any())


def kind_of(value: object) -> str:
    """Return what a value is, for a sentence: a tensor's form, or its class."""
    if isinstance(value, torch.Tensor):
        return str(Form.of(value))
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _problem(tensor: torch.Tensor) -> str | None:
    """Return why a tensor isn't plain; None if it is."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"of class {type(tensor).__name__}"
    if tensor.layout is not torch.strided or tensor.is_nested:
        return f"of layout {str(tensor.layout).removeprefix('torch.')}"
    if tensor.is_quantized:
        return f"that is quantized ({str(tensor.dtype).removeprefix('torch.')})"
    if tensor.device.type != "cpu":
        return f"on device {tensor.device.type}"
    if tensor.untyped_storage().nbytes() != tensor.nbytes or not _is_dense(tensor):
        return f"of strides {list(tensor.stride())} for the shape {list(tensor.shape)}"
    return None


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements are contiguous in some order of dimensions, without overlap."""
    if tensor.numel() < 2:
        return True
    next_stride = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride != next_stride:
            return False
        next_stride *= size
    return True
