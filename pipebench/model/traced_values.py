"""Traced values: what torch.fx records of the values that flow through a forward, and what they know of themselves.

torch.fx's own proxies don't record item assignment and don't know any shape. Here they also stand for numbers, such as
widths and lengths, and for truth, if these are the same in all examples.
"""

import dis
import linecache
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import fx

from pipebench.model.examples import Examples

IN_PLACE = (operator.iadd, operator.isub, operator.imul, operator.itruediv)


class Tracer(fx.Tracer):
    """A tracer whose values know examples of themselves."""

    def __init__(self, examples: Examples) -> None:
        super().__init__()
        self.examples = examples

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Return the proxy of a node's value."""
        return Value(node, self)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """Return the parts of a value, such as a shape, that has equally many in every minibatch."""
        known = self.examples.same(obj.node, _num_parts)
        return super().iter(obj) if known is None else (operator.getitem(obj, index) for index in range(known))


def _num_parts(value: Any) -> int:
    if isinstance(value, Mapping):
        raise TypeError("its keys are iterated over")
    return len(value)


class Value(fx.Proxy):
    """torch.fx's proxy of a value, which also records item assignment, passes assertions, and knows examples of it."""

    tracer: Tracer

    def __getattr__(self, name: str) -> fx.proxy.Attribute:
        return _Attribute(self, name)

    def __bool__(self) -> bool:
        # An assertion is taken to hold: it doesn't change the result, and otherwise the model couldn't run at all.
        if _is_in_an_assertion(sys._getframe(1)):
            return True
        known = self.tracer.examples.same(self.node, bool)
        return super().__bool__() if known is None else known

    def __index__(self) -> int:
        known = self.tracer.examples.same(self.node, operator.index)
        if known is None:
            raise TypeError(f"{self.node} is no number that is the same in every minibatch")
        return known

    def __int__(self) -> int:
        return self.__index__()

    def __len__(self) -> int:
        known = self.tracer.examples.same(self.node, len)
        if known is None:
            raise TypeError("len() of a value isn't the same in every minibatch (of a tensor, .shape[0] can be traced)")
        return known

    def __iadd__(self, other: Any) -> Any:
        return self._in_place(operator.iadd, other)

    def __isub__(self, other: Any) -> Any:
        return self._in_place(operator.isub, other)

    def __imul__(self, other: Any) -> Any:
        return self._in_place(operator.imul, other)

    def __itruediv__(self, other: Any) -> Any:
        return self._in_place(operator.itruediv, other)

    def _in_place(self, operation: Callable[..., Any], other: Any) -> Any:
        """Record an in-place operation on a buffer; for other values `x += y` becomes `x = x + y`, as in torch.fx."""
        of_buffer = self.node.op == "get_attr" or self.node.target in IN_PLACE
        return self.tracer.create_proxy("call_function", operation, (self, other), {}) if of_buffer else NotImplemented

    def __setitem__(self, index: Any, item: Any) -> None:
        self.tracer.create_proxy("call_function", set_item, (self, index, item), {})


class _Attribute(Value, fx.proxy.Attribute):
    """The same of an attribute, which is only recorded if it is more than the name of a method."""


def _is_in_an_assertion(frame: FrameType) -> bool:
    """Return whether a frame is evaluating an assertion's condition."""
    if linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("assert "):
        return True
    to_come = (step for step in dis.get_instructions(frame.f_code) if step.offset >= frame.f_lasti)
    decisive = (s.opname for s in to_come if s.opname not in ("TO_BOOL", "NOT_TAKEN", "CACHE", "EXTENDED_ARG"))
    jump, then = next(decisive, ""), next(decisive, "")
    return jump.endswith("IF_TRUE") and then in ("LOAD_ASSERTION_ERROR", "LOAD_COMMON_CONSTANT")


def set_item(value: torch.Tensor, index: Any, item: Any) -> torch.Tensor:
    """Assign to a part of a tensor and return the tensor, as in-place operations do."""
    value[index] = item
    return value


def with_item(value: torch.Tensor, index: Any, item: Any) -> torch.Tensor:
    """Return a copy of a tensor with a part of it assigned to."""
    return set_item(value.clone(), index, item)


_MAKERS = (
    *("zeros", "ones", "empty", "full", "rand", "randn", "randint", "randperm", "arange", "linspace", "eye", "tensor"),
    *("as_tensor", "tril_indices", "triu_indices"),
)
_LIMITS = ("finfo", "iinfo")


@contextmanager
def makers_recorded() -> Iterator[None]:
    """Record calls of torch's functions that make tensors by a value's numbers or tell a type's limits, and einops's.

    torch.fx doesn't see them all, as none of their arguments has to be a tensor.
    """
    found: list[tuple[Any, str]] = [(torch, name) for name in (*_MAKERS, *_LIMITS)]
    if "einops.einops" in sys.modules:  # `rearrange` and `repeat` call it; it looks at a value's class
        found.append((sys.modules["einops.einops"], "reduce"))
    before = [(holder, name, getattr(holder, name)) for holder, name in found]
    try:
        for holder, name, make in before:
            setattr(holder, name, _recording(make, limits=name in _LIMITS))
        yield
    finally:
        for holder, name, make in before:
            setattr(holder, name, make)


def _recording(make: Callable[..., Any], *, limits: bool = False) -> Callable[..., Any]:
    """Return a function that calls `make`, or records a call of it if a traced value is among its arguments."""

    def called(*args: Any, **kwargs: Any) -> Any:
        values: list[Value] = []
        fx.node.map_aggregate((args, kwargs), lambda each: values.append(each) if isinstance(each, Value) else None)
        if not values:
            return make(*args, **kwargs)
        if limits:
            return _Limits(make, values[0])
        return values[0].tracer.create_proxy("call_function", make, args, kwargs)

    return called


class _Limits:
    """`torch.finfo` or `torch.iinfo` of a traced value's type; no layer returns one, since it couldn't cross a cut."""

    def __init__(self, make: Callable[..., Any], dtype: Value) -> None:
        self._kind, self._dtype = make.__name__, dtype

    def __getattr__(self, name: str) -> Any:
        return self._dtype.tracer.create_proxy("call_function", limit, (self._kind, self._dtype, name), {})


def limit(kind: str, dtype: torch.dtype, name: str) -> Any:
    """Return an attribute of a type's `finfo` or `iinfo`."""
    return getattr(getattr(torch, kind)(dtype), name)
