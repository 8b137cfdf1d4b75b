"""Examples: shapes and types of the values that a traced forward computes, at the sizes of the data set's minibatches.

A forward may decide by them: `if mask.dim() == 2:`, `range(x.shape[1])`, `(*x.shape[:-1], -1)`. torch.fx can't, since
its values have none. Here the nodes that such a decision depends on are run on fake tensors, which have no numbers, at
several sizes. If it is the same at all of them, it is taken, otherwise refused as by torch.fx.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from pipebench.zoo.seeding import seeded

# Tensors of a minibatch on the meta device, by the name of the forward's argument or by its position.
Example = Mapping[str | int, torch.Tensor]
_Known = TypeVar("_Known")
_CALL, _GETATTR = nn.Module.__call__, nn.Module.__getattr__  # torch.fx replaces them while it traces
_OF_DEVICES = ("is_cuda", "is_cpu", "is_mps", "is_xpu", "is_meta")  # attributes


class Examples:
    """The values of nodes, computed when they are asked for."""

    def __init__(self, root: nn.Module, inputs: Sequence[Example], apart: Callable[[nn.Module], Any]) -> None:
        """`apart` returns a context within which a module's forward changes nothing."""
        self._root, self._inputs, self._apart = root, inputs, apart
        self._fake = FakeTensorMode(allow_non_fake_inputs=True) if inputs else None
        self._values: list[dict[fx.Node, Any]] = [{} for _ in inputs]

    def feed(self, node: fx.Node, position: int) -> None:
        """Tell which argument of the forward a placeholder is."""
        for values, given in zip(self._values, self._inputs, strict=True):
            like = given.get(node.name, given.get(position))
            if like is not None and self._fake is not None:
                with _untraced(), self._fake:
                    values[node] = torch.empty(like.shape, dtype=like.dtype)

    def same(self, node: fx.Node, what: Callable[[Any], _Known]) -> _Known | None:
        """Return `what` of a node's value if it is the same at all sizes; None if it differs, or depends on numbers."""
        if self._fake is None:
            return None
        try:
            with _untraced(), seeded(0), self._fake:
                found = {what(self._value(node, values)) for values in self._values}
        except Exception:  # the user's forward is run: anything can come out of it
            return None
        return found.pop() if len(found) == 1 else None

    def _value(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        """Return a node's value; compute it and what it reads, unless that is known."""
        waiting = [node]
        while waiting:
            reads = [read for read in waiting[-1].all_input_nodes if read not in values]
            if reads:
                waiting += reads
            elif (last := waiting.pop()) not in values:
                values[last] = self._computed(last, values)
        return values[node]

    def _faked(self, value: Any) -> Any:
        is_tensor = isinstance(value, torch.Tensor) and self._fake is not None
        return self._fake.from_tensor(value) if is_tensor else value  # type: ignore[union-attr]

    def _computed(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        """Run a node; raise a ValueError where a device decides, since tracing is done on the CPU."""
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "get_attr":
            return self._faked(operator.attrgetter(str(node.target))(self._root))
        if node.op == "call_module":
            module = self._root.get_submodule(str(node.target))
            tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
            with self._apart(module):
                return functional_call(module, {name: self._faked(each) for name, each in tensors}, args, kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        if node.op != "call_function" or node.args[1:] in [(name,) for name in _OF_DEVICES]:
            raise ValueError(node.op)
        assert callable(node.target)
        if getattr(node.target, "__module__", "") in ("_operator", "builtins") and isinstance(args[0], torch.device):
            raise ValueError(args[0])
        return node.target(*args, **kwargs)


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
