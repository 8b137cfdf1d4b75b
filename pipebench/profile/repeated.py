"""Repeated operations on tensors of the meta device: keys and stored outputs, for a cache of their costs.

The outputs and costs of an operation there follow from the types and shapes of its arguments.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from pipebench.model.values import tensors_in

_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class Shape(NamedTuple):
    """A tensor without its values."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def made(self) -> torch.Tensor:
        """Return a new tensor of this shape on the meta device."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


class Outputs(NamedTuple):
    """What an operation returns: a tensor, or a list or tuple of tensors and None."""

    container: type | None
    shapes: Sequence[Shape | None]

    def made(self) -> Any:
        """Return new tensors."""
        tensors = [each and each.made() for each in self.shapes]
        return tensors[0] if self.container is None else self.container(tensors)


class _UnknownError(Exception):
    """An argument is something else than a plain value or a strided tensor on the meta device."""


def call_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable | None:
    """Return the key of an operation's outputs and costs; None if it writes into arguments or may read their values."""

    def known(value: Any) -> Hashable:
        if isinstance(value, torch.Tensor):
            if not value.is_meta or value.layout is not torch.strided:
                raise _UnknownError
            return Shape(value.shape, value.stride(), value.dtype)
        if isinstance(value, list | tuple):
            return tuple(map(known, value))
        if not isinstance(value, _PLAIN):
            raise _UnknownError
        return type(value), value  # 1, 1.0 and True are equal

    schema = func._schema
    if any(each.alias_info for each in (*schema.arguments, *schema.returns)):
        return None
    try:
        given = known(args), tuple((name, known(value)) for name, value in kwargs.items())
    except _UnknownError:
        return None
    return func, given, torch.get_default_dtype()


def outputs_of(out: Any, given: Any) -> Outputs | None:
    """Return the shapes of an operation's outputs; None unless every output has a storage of its own."""
    container = type(out) if isinstance(out, list | tuple) else None
    taken = {tensor.untyped_storage()._cdata for tensor in tensors_in(given)}
    shapes = list[Shape | None]()
    for each in out if container else (out,):
        if each is None:
            shapes.append(None)
            continue
        if not isinstance(each, torch.Tensor) or not each.is_meta or each.layout is not torch.strided:
            return None
        storage, shape = each.untyped_storage(), Shape(each.shape, each.stride(), each.dtype)
        if storage._cdata in taken or storage.nbytes() != shape.made().untyped_storage().nbytes():
            return None
        taken.add(storage._cdata)
        shapes.append(shape)
    return Outputs(container, shapes)
