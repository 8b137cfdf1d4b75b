"""Examples: shapes and types of the values that a traced forward computes, at the sizes of the data set's minibatches.

A forward may decide by them: `if mask.dim() == 2:`, `range(x.shape[1])`, `(*x.shape[:-1], -1)`. torch.fx can't, since
its values have none. Here the nodes that such a decision depends on are run on fake tensors, which have no numbers, at
several sizes. If it is the same at all of them, it is taken, otherwise refused as by torch.fx.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils import _pytree as pytree

from pipebench.model.copies import copied
from pipebench.zoo.seeding import seeded

_Known = TypeVar("_Known")
_CALL, _GETATTR = nn.Module.__call__, nn.Module.__getattr__  # torch.fx replaces them while it traces
_DEVICE_ATTRIBUTES = ("is_cuda", "is_cpu", "is_mps", "is_xpu", "is_meta")  # attributes
_DEVICE_METHODS = ("get_device", "type")  # methods without arguments


class Example(NamedTuple):
    """A minibatch, without numbers."""

    tensors: Mapping[str | int, torch.Tensor]  # on the meta device, by name or position of the forward's argument
    low_type: torch.dtype | None = None  # to which fp32 is rounded (see precision.py), if it is


class Examples:
    """The values of nodes, computed when they are asked for."""

    def __init__(self, root: nn.Module, inputs: Sequence[Example]) -> None:
        self._root, self._inputs = root, inputs
        self._values: list[dict[fx.Node, Any]] = [{} for _ in inputs]
        self._positions: dict[fx.Node, int] = {}  # of placeholders among the forward's arguments

    @cached_property
    def _fake(self) -> FakeTensorMode:
        """Made when a forward first decides by a shape: it imports torch's compiler, which takes seconds."""
        return FakeTensorMode(allow_non_fake_inputs=True)

    def feed(self, node: fx.Node, position: int) -> None:
        """Tell which argument of the forward a placeholder is."""
        self._positions[node] = position

    def same(self, node: fx.Node, what: Callable[[Any], _Known]) -> _Known | None:
        """Return `what` of a node's value if it is the same at all sizes; None if it differs, or depends on numbers."""
        if not self._inputs:
            return None
        fake = self._fake
        try:
            with _untraced(), seeded(0), fake:
                found = {what(self._value(node, *each)) for each in zip(self._values, self._inputs, strict=True)}
        except Exception:  # the user's forward is run: anything can come out of it
            return None
        return found.pop() if len(found) == 1 else None

    def _value(self, node: fx.Node, values: dict[fx.Node, Any], given: Example) -> Any:
        """Return a node's value; compute it and what it reads, unless that is known."""
        waiting = [node]
        while waiting:
            reads = [read for read in waiting[-1].all_input_nodes if read not in values]
            if reads:
                waiting += reads
            elif (last := waiting.pop()) not in values:
                values[last] = self._computed(last, values, given)
        return values[node]

    def _faked(self, value: Any, low_type: torch.dtype | None) -> Any:
        return _rounded(self._fake.from_tensor(value), low_type) if isinstance(value, torch.Tensor) else value

    def _copy_of(self, module: nn.Module, low_type: torch.dtype | None) -> nn.Module:
        """Return a copy with fake parameters and buffers; a forward may leave fake tensors in it."""
        faked = {id(each): self._faked(each, low_type) for each in (*module.parameters(), *module.buffers())}
        with unset_fake_temporarily():
            return copied(module, faked)

    def _computed(self, node: fx.Node, values: Mapping[fx.Node, Any], given: Example) -> Any:
        """Run a node; raise a ValueError where a device decides, since tracing is done on the CPU."""
        low_type = given.low_type
        if node.op == "placeholder":
            like = given.tensors.get(str(node.target), given.tensors.get(self._positions.get(node, -1)))
            if like is None:
                raise ValueError(node.target)
            return _rounded(torch.empty(like.shape, dtype=like.dtype), low_type)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "get_attr":
            return self._faked(operator.attrgetter(str(node.target))(self._root), low_type)
        if node.op == "call_module":
            made = self._copy_of(self._root.get_submodule(str(node.target)), low_type)
            if next(made.parameters(), None) is not None:
                args, kwargs = pytree.tree_map_only(torch.Tensor, partial(_rounded, low_type=low_type), (args, kwargs))
            return made(*args, **kwargs)
        if node.op == "call_method" and not (node.target in _DEVICE_METHODS and len(node.args) == 1):
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        if node.op != "call_function" or node.args[1:] in [(name,) for name in _DEVICE_ATTRIBUTES]:
            raise ValueError(node.op)
        assert callable(node.target)
        if getattr(node.target, "__module__", "") in ("_operator", "builtins") and isinstance(args[0], torch.device):
            raise ValueError(args[0])
        return node.target(*args, **kwargs)


def _rounded(tensor: torch.Tensor, low_type: torch.dtype | None) -> torch.Tensor:
    return tensor.to(low_type) if low_type is not None and tensor.dtype is torch.float32 else tensor


@contextmanager
def _untraced() -> Iterator[None]:
    """Let modules and torch's functions do what they do, although they are being traced."""
    before = nn.Module.__call__, nn.Module.__getattr__
    nn.Module.__call__, nn.Module.__getattr__ = _CALL, _GETATTR  # type: ignore[method-assign]
    try:
        with torch._C.DisableTorchFunction():
            yield
    finally:
        nn.Module.__call__, nn.Module.__getattr__ = before  # type: ignore[method-assign]
