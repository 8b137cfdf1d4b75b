"""Tracing: records a model's forward as a torch.fx graph, in the mode that its modules are in.

torch.fx records the operations on the values that flow through a model. Everything else in `forward` happens once,
during tracing; its result would be frozen, its side effects lost. If that would change what the model computes, tracing
is refused, with the line that does it.
"""

import contextlib
import inspect
import linecache
import pickle
import random
import sys
import traceback
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, Self

import torch
from torch import fx, nn
from torch.fx.graph import PythonCode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from pipebench.errors import TracingError
from pipebench.model import traced_values
from pipebench.model.examples import Example, Examples
from pipebench.model.traced_values import IN_PLACE, Tracer, makers_recorded
from pipebench.zoo.measures import plain_output

IsLeaf = Callable[[nn.Module, str], bool]
Fed = int | Collection[str] | None  # how many arguments of a forward get data, or their names; None: not known
# Key of a node's `meta`: the path of every module whose call returned the node's value, to the call's arguments' names.
CALLS = "pipebench_calls"


def record(model: nn.Module, is_leaf: IsLeaf, fed: Fed = None, examples: Sequence[Example] = ()) -> fx.GraphModule:
    """Trace a model in the mode that its modules are in; the graph shares its parameters, buffers and leaves.

    Args:
        model: the model, which isn't changed.
        is_leaf: takes a module and its qualified name; returns whether it is one layer even if torch.fx would trace
            into it.
        fed: number or names of the forward's arguments that get data; None if unknown.
        examples: minibatches of several sizes, for decisions by shapes and types; none: such decisions are refused.

    Raises:
        TracingError: it can't be traced, or something would be frozen; names the module, the line and the way out.
    """
    versions = [(name, buffer, buffer._version) for name, buffer in model.named_buffers()]
    try:
        with _nothing_drawn(), makers_recorded(), attributes_as_before(model):
            graph = _Tracer(is_leaf, fed, Examples(model, examples)).trace(model)
            held = {name: attrgetter(name)(model) for name, _, _ in versions}
    except Exception as error:  # tracing runs the user's forward: anything can come out of it
        raise TracingError(_why_not_traced(model, error)) from error
    for name, buffer, version in versions:
        if buffer._version != version or not _is_value_of(held[name], buffer, name):
            raise TracingError(
                f"model {type(model).__name__} changes its buffer {name} while it is traced, which torch.fx doesn't "
                f"record; write into it (self.{name.rpartition('.')[2]}.copy_(...)), or name the module that does in "
                "model.leaves to make it one layer"
            )
    return TracedModule(model, graph)


def _is_value_of(held: Any, buffer: torch.Tensor, name: str) -> bool:
    """Return whether a module still has its buffer, or the proxy of it that `self.x += 1` has assigned."""
    if not isinstance(held, fx.Proxy):
        return held is buffer
    node: Any = held.node
    while node.target in IN_PLACE:
        node = node.args[0]
    return bool(node.op == "get_attr" and node.target == name)


def _is_traced(held: Any) -> bool:
    """Return whether something is, or contains, a traced value."""
    return any(isinstance(leaf, fx.Proxy) for leaf in pytree.tree_leaves(held))


_HELD = (dict, OrderedDict, defaultdict, list, set)


@contextmanager
def attributes_as_before(model: nn.Module) -> Iterator[None]:
    """Restore attributes and buffers of modules, and their lists and dicts; new ones stay unless they hold proxies."""
    tables: list[Any] = [vars(module) for module in model.modules()]
    tables += [held for table in tables for held in table.values() if type(held) in _HELD]
    before = [(table, table.copy()) for table in tables]
    try:
        yield
    finally:
        for table, earlier in before:
            if isinstance(table, dict):
                new = {name: held for name, held in table.items() if name not in earlier}
                earlier |= {name: held for name, held in new.items() if not _is_traced(held)}
            table.clear()
            add = table.extend if isinstance(table, list) else table.update
            add(earlier)


class TracedModule(fx.GraphModule):
    """A module that runs a graph, without torch.fx's handling of exceptions, and compiled only if it is called.

    torch.fx's own module prints a traceback to stderr and removes an exception's frames. It generates and compiles its
    forward whenever it is made, copied or changed. Here the first call does, since most modules are only cut or read.
    """

    def recompile(self) -> PythonCode | None:  # type: ignore[override]
        """Discard the forward compiled from the graph as it was."""
        if "forward" in vars(type(self)):  # fx.GraphModule makes a class for each instance
            del type(self).forward
        return None

    def forward(self, *values: Any) -> Any:
        """Compile the graph's forward, and run it."""
        return self.with_forward().forward(*values)

    def with_forward(self) -> Self:
        """Compile the graph's forward, for callers that inspect it; return this module."""
        if "forward" not in vars(type(self)):
            super().recompile()
            type(self).__call__ = nn.Module.__call__  # type: ignore[method-assign]
        return self


def fed_arguments(forward: Callable[..., Any], fed: Fed = None) -> tuple[list[str], list[str]]:
    """Return the names of a forward's arguments that get data: those given by position, and those by keyword.

    `self` is left out. `fed` is their number or names, if known; other arguments keep their defaults, if they have any.
    """
    positional: list[str] = []
    by_keyword: list[str] = []
    count = fed if isinstance(fed, int) else 0
    skipped = False
    for parameter in list(inspect.signature(inspect.unwrap(forward)).parameters.values())[1:]:
        name, kind = parameter.name, parameter.kind
        named = not isinstance(fed, int | None) and name in fed
        if kind is parameter.VAR_POSITIONAL:
            positional += [f"{name}_{index}" for index in range(len(positional), count or 1)]
        elif kind is not parameter.VAR_KEYWORD:
            by_position = kind is not parameter.KEYWORD_ONLY and not skipped
            if parameter.default is parameter.empty or named or (by_position and len(positional) < count):
                (positional if by_position else by_keyword).append(name)
            else:
                skipped = True
        elif not isinstance(fed, int | None):  # forward(**batch)
            by_keyword += [each for each in fed if each not in (*positional, *by_keyword)]
    return positional, by_keyword


class _Tracer(Tracer):
    """torch.fx's tracer with the user's leaves, which traces into torch's own containers."""

    # Buffers are values, as parameters are. Otherwise operations on buffers alone would run during tracing.
    proxy_buffer_attributes = True

    def __init__(self, is_leaf: IsLeaf, fed: Fed, examples: Examples) -> None:
        super().__init__(examples)
        self._is_leaf = is_leaf
        self._fed = fed
        self._contexts = _contexts()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether the module is one layer."""
        return self._is_leaf(m, module_qualified_name) or super().is_leaf_module(m, module_qualified_name)

    def create_arg(self, a: Any) -> Any:
        """Return what a node stores of an argument; refuse a value of another call, kept outside the model."""
        if isinstance(a, fx.Proxy) and a.tracer is not self:
            raise _Frozen(f"{a.node} is a value of an earlier call, which something has kept")
        try:
            return super().create_arg(a)
        except NotImplementedError as error:
            raise _Frozen(
                f"a layer is given a {type(a).__name__}, which is neither data nor a container of it (a cache of keys "
                "and values is switched off by use_cache: false, an option of Hugging Face's models)"
            ) from error

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Record an operation; refuse it under a context, such as `torch.no_grad`, that the graph would lose."""
        if _contexts() != self._contexts:
            raise _Frozen(
                "torch.no_grad, enable_grad, inference_mode and autocast, and the backward of an autograd.Function, "
                "are lost where a model is cut into layers (to keep gradients out, use .detach(), or "
                "requires_grad_(False) on the parameters)"
            )
        if torch.autograd.grad in args:
            raise _Frozen("torch.autograd.grad needs the whole graph from its inputs on, in one layer")
        return super().create_node(*args, **kwargs)

    def create_args_for_root(self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None) -> Any:
        """Return the forward and its arguments: proxies for those that get data; others keep their defaults."""
        positional, by_keyword = fed_arguments(root_fn, self._fed)
        values = [self.create_proxy("placeholder", name, (), {}) for name in positional]
        named = {name: self.create_proxy("placeholder", name, (), {}) for name in by_keyword}
        for position, value in enumerate((*values, *named.values())):
            self.examples.feed(value.node, position)

        def forward(*given: Any) -> Any:
            return plain_output(root_fn(*given, **named))

        return forward, [self.root, *values]

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Record a module as one layer, or trace into it; always into one that a forward makes."""
        try:
            path = self.path_of_module(m)
        except NameError:
            if [*m.parameters(), *m.buffers()]:
                raise
            return forward(*args, **kwargs)
        found = None
        if type(m) in _CONTAINERS and not self._is_leaf(m, path):
            found = _CONTAINERS[type(m)](m, *args, **kwargs)
        if found is None:
            found = super().call_module(m, forward, args, kwargs)
        given = [value.node.name for value in (*args, *kwargs.values()) if isinstance(value, fx.Proxy)]
        if isinstance(found, fx.Proxy) and given and found.node.name not in given:
            found.node.meta.setdefault(CALLS, {})[path] = given
        return found


# torch.fx can't trace torch's Transformers, which branch on shapes to check them and to choose faster kernels. They
# compute a chain of layers, each of which makes these checks itself, and which the following functions call.


def _encoder(
    m: Any, src: Any, mask: Any = None, src_key_padding_mask: Any = None, is_causal: bool | None = None
) -> Any:
    if src_key_padding_mask is not None:  # in evaluation the encoder as a whole may use nested tensors
        return None
    for layer in m.layers:
        src = layer(src, src_mask=mask, is_causal=bool(is_causal))
    return src if m.norm is None else m.norm(src)


def _decoder(*args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(nn.TransformerDecoder.forward).bind(*args, **kwargs)
    given.apply_defaults()
    options = dict(given.arguments)
    m, tgt, memory = (options.pop(name) for name in ("self", "tgt", "memory"))
    options["tgt_is_causal"] = bool(options["tgt_is_causal"])
    for layer in m.layers:
        tgt = layer(tgt, memory, **options)
    return tgt if m.norm is None else m.norm(tgt)


def _transformer(m: Any, src: Any, tgt: Any, **options: Any) -> Any:
    encoder = {"src_mask": "mask", "src_key_padding_mask": "src_key_padding_mask", "src_is_causal": "is_causal"}
    given = {encoder[name]: value for name, value in options.items() if name in encoder}
    memory = m.encoder(src, **given)
    return m.decoder(tgt, memory, **{name: value for name, value in options.items() if name not in encoder})


_CONTAINERS: Mapping[type[nn.Module], Callable[..., Any]] = {
    nn.TransformerEncoder: _encoder,
    nn.TransformerDecoder: _decoder,
    nn.Transformer: _transformer,
}


class _Frozen(Exception):  # noqa: N818 (a reason, which becomes a TracingError with its line)
    """An effect of a forward can't be recorded; says why."""


class _RefuseDraws(TorchFunctionMode):
    """Refuses random numbers that are drawn during tracing, since every minibatch would get the same ones."""

    def __torch_function__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        before = torch.default_generator.get_state()
        result = func(*args, **(kwargs or {}))
        if not torch.equal(torch.default_generator.get_state(), before):
            name = getattr(func, "__name__", str(func))
            raise _Frozen(
                f"the random numbers of {name} would be drawn once and frozen, since their shape doesn't come from the "
                f"model's input (say x.new_empty(...).{name}_() or torch.{name}_like, or so)"
            )
        return result


@contextmanager
def _nothing_drawn() -> Iterator[None]:
    """Refuse random numbers during tracing: torch's when they are drawn, Python's and NumPy's at the end."""
    numpy = sys.modules.get("numpy")

    def states() -> list[Any]:
        of_numpy = None if numpy is None else pickle.dumps(numpy.random.get_state(legacy=False))
        return [random.getstate(), of_numpy]

    before = states()
    with _RefuseDraws():
        yield
    for name, old, new in zip(("Python's random module", "NumPy"), before, states(), strict=True):
        if old != new:
            raise _Frozen(f"random numbers of {name} would be drawn once and frozen")


def _contexts() -> tuple[bool, ...]:
    """Return the settings of autograd and operations that a graph doesn't record."""
    autocast = [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast


def _why_not_traced(model: nn.Module, error: Exception) -> str:
    """Return the sentence that names the model, the line, the reason and the remedy."""
    ours = (__file__, traced_values.__file__, contextlib.__file__)
    steps = [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if "/torch/" not in frame.f_code.co_filename and frame.f_code.co_filename not in ours
    ]
    where = ""
    if steps:
        frame, line = steps[-1]
        filename = frame.f_code.co_filename
        where = f" at {filename}:{line} ({linecache.getline(filename, line).strip()})"
    holders = [frame.f_locals.get("self") for frame, _ in steps]
    holder = next((holder for holder in reversed(holders) if isinstance(holder, nn.Module)), None)
    reason = str(error).strip().split("\n")[0] or type(error).__name__
    way_out = _way_out(model, holder)
    if "dynamo-optimized" in reason or hasattr(model, "_orig_mod"):
        reason, way_out = "torch.compile has compiled it", "leave that out, and set engine.compile: true"
    return f"model {type(model).__name__} can't be traced by torch.fx{where}: {reason}; {way_out}"


def _way_out(model: nn.Module, holder: nn.Module | None) -> str:
    """Return what the user can do about a line that can't be traced; `holder` is the module that holds it."""
    name = next((name for name, module in model.named_modules() if module is holder), "")
    if name:
        kind = type(holder).__name__
        several = sum(type(module).__name__ == kind for module in model.modules()) > 1
        also = f" (or its class, {kind}, for all of them)" if several else ""
        return f"name the module that holds this line, {name}{also}, in model.leaves to make it one layer"
    return (
        "put what this line does into a module of its own and name that in model.leaves to make it one layer, or use "
        "modes single and dp, which need no cut"
    )
