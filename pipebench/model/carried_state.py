"""What a model carries from one call to the next beside its buffers.

torch.fx records operations on values. That a forward also changes weights, as for a moving average of them, or an
attribute, such as a number of calls, is lost, and so is what `train()` and `eval()` do to weights.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

_SHIFTED_ELEMENTS = 4096  # of every parameter
_SHARE, _LEAST = 0.01, 0.001  # of a parameter's mean magnitude; and of parameters that are 0, as many begin
_OF_MODULES = frozenset(vars(nn.Module()))  # attributes that every module has
_PLAIN = (bool, int, float, complex, str, type(None))


@contextmanager
def shifted_weights(model: nn.Module) -> Iterator[None]:
    """Shift some elements of every parameter within, as updates would: some begin as copies of others, or as 0."""
    generator, before = torch.Generator().manual_seed(0), list[tuple[torch.Tensor, torch.Tensor]]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() and parameter.layout is torch.strided and not parameter.is_meta:
                per_row = parameter[0].numel() if parameter.dim() else 1
                some = parameter.detach()[: max(1, _SHIFTED_ELEMENTS // per_row)] if parameter.dim() else parameter
                before.append((some, some.clone()))
                if (parameter.is_floating_point() or parameter.is_complex()) and parameter.itemsize > 1:
                    by = torch.rand(some.shape, generator=generator) * (_SHARE * float(some.abs().mean()) + _LEAST)
                    some += by.to(some.dtype)
    try:
        yield
    finally:
        with torch.no_grad():
            for some, values in before:
                some.copy_(values)


def marks_of(model: nn.Module) -> dict[str, tuple[object, ...]]:
    """Return a mark of every parameter by name, which differs once its values have changed, or it is another one."""
    return {name: (id(each), repr(_sums(each.detach()))) for name, each in model.named_parameters()}


def _sums(tensor: torch.Tensor) -> list[float]:
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    numbers = real.double()
    return [float(numbers.sum()), float(numbers.abs().sum())]


def attributes_of(model: nn.Module) -> dict[str, list[Any]]:
    """Return the numbers, texts and tensors in attributes of a model's modules, by name such as `encoder.steps`."""
    found = {}
    for path, module in model.named_modules():
        for name in vars(module).keys() - _OF_MODULES - {"carried_state"}:
            leaves = map(_comparable, pytree.tree_leaves(vars(module)[name]))
            found[f"{path}.{name}" if path else name] = [leaf for leaf in leaves if leaf is not NotImplemented]
    return found


def _comparable(leaf: Any) -> Any:
    """Return a leaf of an attribute, a tensor copied; NotImplemented for what isn't compared, as sparse tensors."""
    if isinstance(leaf, torch.Tensor):
        is_plain = leaf.layout is torch.strided and not (leaf.is_meta or leaf.is_quantized)
        return leaf.detach().clone() if is_plain and not isinstance(leaf, nn.Parameter) else NotImplemented
    if isinstance(leaf, set | frozenset):
        return len(leaf)
    return leaf if isinstance(leaf, _PLAIN) else NotImplemented


def changed_in(before: Mapping[str, list[Any]], after: Mapping[str, list[Any]]) -> list[str]:
    """Return the attributes whose values, as `attributes_of` returns them, have changed."""
    return [name for name in sorted({**before, **after}) if not _same(before.get(name), after.get(name))]


def _same(one: list[Any] | None, other: list[Any] | None) -> bool:
    if one is None or other is None or len(one) != len(other):
        return False
    return all(map(_equal, one, other))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if one.is_floating_point():  # of types of 8 bits torch compares none
            one, other = one.double(), other.double()
        return torch.allclose(one, other, equal_nan=True)
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return False
    both_nan = isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other)
    return both_nan or bool(one == other)
