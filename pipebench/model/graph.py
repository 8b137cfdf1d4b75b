"""The layer graph: a model as layers with every edge between them, which can be cut anywhere.

torch.fx traces the model twice, in training and in evaluation mode. A layer is a node that computes. The graphs are
made safe to cut, see `in_place.py`.
"""

import difflib
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree

from pipebench.errors import GraphError, nearest
from pipebench.model.examples import Example
from pipebench.model.in_place import MADE, make_cuttable, memory_owner, overwritten_buffer
from pipebench.model.slice_modules import Slices
from pipebench.model.tracing import Fed, TracedModule, fed_arguments, record

DRAWS_AS = "pipebench_draws_as"  # key of a node's `meta`, see `draw_name`
_RANDOM_MODULES: tuple[type[nn.Module], ...] = (_DropoutNd, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


@dataclass(frozen=True)
class Layer:
    """A node of the graph that computes: the unit that is placed."""

    index: int  # position in execution order
    name: str  # unique name, e.g. `features_0`
    kind: str  # module class or function name, e.g. `Conv2d`, `add`
    node: fx.Node
    reads: tuple[int, ...]  # indices of the layers whose output it reads, ascending
    inputs: tuple[str, ...]  # names of the model inputs it reads
    parameters: tuple[str, ...]  # qualified names of the parameters it trains, in the model's own order
    # Qualified names of the buffers that it changes, and of those that it reads and another layer changes. Layers that
    # have a name in common share a stage, as those that share a parameter do
    buffers: tuple[str, ...] = ()
    draws_as: str = ""  # the name that seeds its random draws; "" if it draws none
    idle: bool = False  # left out by an architecture search: keeps its index, reads nothing, and nothing reads it
    runs_once: bool = False  # whether it returns a buffer that layers change, so that no plan recomputes it
    # Qualified names of the parameters that it uses but doesn't train, and of all buffers that it has or reads; of
    # several names of one tensor, the first
    untrained: tuple[str, ...] = ()


class Rounding(NamedTuple):
    """The precision of a model's arithmetic."""

    low_type: torch.dtype  # the 16-bit type that fp32 tensors are rounded to
    constants: frozenset[str]  # qualified names of the rounded buffers: read by layers, written by none


@dataclass(frozen=True)
class LayerGraph:
    """A traced model."""

    model: nn.Module
    root: nn.Module  # the modules the graph calls; their parameters and buffers are the model's own, by its names
    graph: fx.Graph
    inputs: tuple[str, ...]  # names of the model's inputs, in order
    layers: tuple[Layer, ...]  # in execution order
    outputs: tuple[int, ...]  # indices of the layers whose output the model returns, ascending
    # Qualified names of the modules in training mode: all in training, except those that the model keeps in evaluation
    training: frozenset[str] = frozenset()
    evaluation: "LayerGraph | None" = None  # the same model in evaluation mode; None if this graph is in that mode
    evaluation_map: tuple[int | None, ...] = ()  # of an evaluation, each layer's index in training, or None
    rounding: Rounding | None = None  # see `precision.py`; the tensors here aren't rounded
    slices: Slices | None = None  # what this process has of layers that are divided; None: all layers are whole

    @property
    def evaluated(self) -> "LayerGraph":
        """The same model in evaluation mode; only of a graph in training mode."""
        assert self.evaluation is not None
        return self.evaluation

    def index_of(self, name: str) -> int:
        """Return the index of a layer, given its name or module path (`features.0`); raises a KeyError without one."""
        wanted = name.replace(".", "_")
        for layer in self.layers:
            if layer.name == wanted:
                return layer.index
        raise KeyError(name)


def trace(
    model: nn.Module,
    leaves: Sequence[str] = (),
    fed: Fed = None,
    rewrite: Callable[[fx.GraphModule], None] = lambda module: None,
    examples: Sequence[Example] = (),
) -> LayerGraph:
    """Turn a model into a layer graph. The model is not changed; its parameters are shared.

    Args:
        model: any module that torch.fx traces.
        leaves: qualified names or class names of modules that become one layer each, besides those that declare
            themselves as one (zoo/registry.py) and BatchNorm's subclasses.
        fed: number or names of the arguments of its forward that get data; others keep their defaults. None: those
            without a default get data.
        rewrite: changes the traced module; it is called for training and for evaluation.
        examples: see `record`.

    Raises:
        TracingError: torch.fx can't trace it; names the module, the line and the way out.
        GraphError: the model has no such leaf, or computes nothing.
    """
    _check_leaves(model, leaves)

    def is_leaf(module: nn.Module, name: str) -> bool:
        named = name in leaves or type(module).__name__ in leaves
        # A subclass of BatchNorm may call a function that changes its statistics, which torch.fx doesn't record.
        return named or getattr(module, "one_layer", False) or carries_state(module) or isinstance(module, _NormBase)

    def traced() -> fx.GraphModule:
        module = record(model, is_leaf, fed, examples)
        make_cuttable(module, module.graph)
        rewrite(module)
        module.recompile()
        return module

    return _in_both_modes(model, model, traced)


def as_one_layer(model: nn.Module, fed: Fed = None) -> LayerGraph:
    """Return the graph of a model as one layer, which isn't traced and can't be cut."""
    positional, by_keyword = fed_arguments(type(model).forward, fed)
    holder = nn.Module()
    holder.model = model

    def module_of_one_call() -> fx.GraphModule:
        graph = fx.Graph()
        values = [graph.placeholder(name) for name in (*positional, *by_keyword)]
        named: dict[str, Any] = dict(zip(by_keyword, values[len(positional) :], strict=True))
        graph.output(graph.call_module("model", tuple(values[: len(positional)]), named))
        return TracedModule(holder, graph)

    return _in_both_modes(model, holder, module_of_one_call)


def is_random(root: nn.Module, node: fx.Node) -> bool:
    """Return whether a layer may draw random numbers; code that isn't known may."""
    if node.op == "call_module":
        return any(_draws(part) for part in root.get_submodule(str(node.target)).modules())
    name = str(getattr(node.target, "__name__", node.target))
    if node.op == "call_function":
        home = str(getattr(node.target, "__module__", None))
        if home in ("_operator", "builtins", "math"):
            return False
        if home.split(".")[0] not in ("torch", "None"):  # a function of a user or a library
            return True
    # torch marks the operators that draw. A torch function without an operator of its name may draw; a method doesn't.
    operator_forms = getattr(torch.ops.aten, name, None)
    if operator_forms is None:
        return node.op == "call_function"
    forms = (getattr(operator_forms, form) for form in operator_forms.overloads())
    return any(torch.Tag.nondeterministic_seeded in form.tags for form in forms)


def carries_state(module: nn.Module) -> bool:
    """Return whether a module carries a state from one minibatch to the next (see zoo/registry.py)."""
    return hasattr(module, "carried_state")


def stateful_modules(root: nn.Module, layers: Iterable[Layer]) -> tuple[str, ...]:
    """Return the qualified names of the layers' modules that carry a state."""
    called = dict.fromkeys(str(layer.node.target) for layer in layers if layer.node.op == "call_module")
    return tuple(
        f"{path}.{inner}" if inner else path
        for path in called
        for inner, part in root.get_submodule(path).named_modules()
        if carries_state(part)
    )


def forget_states(root: nn.Module) -> None:
    """Reset the states that modules carry from one minibatch to the next."""
    for module in filter(carries_state, root.modules()):
        module.carried_state = None  # type: ignore[assignment]


def reads_of(node: fx.Node, index: Mapping[fx.Node, int]) -> tuple[int, ...]:
    """Return the indices of the layers that a node reads, ascending; `index` has the index of every layer's node."""
    return tuple(sorted({index[read] for read in node.all_input_nodes if read in index}))


def inputs_of(node: fx.Node) -> tuple[str, ...]:
    """Return the names of the model inputs that a node reads."""
    return tuple(read.name for read in node.all_input_nodes if read.op == "placeholder")


def cloned(value: Any) -> Any:
    """Return a layer's value with copies of its tensors."""
    return pytree.tree_map_only(torch.Tensor, torch.clone, value)


def is_torchs_own(module: nn.Module) -> bool:
    """Return whether a module's class is torch's, so that its behaviour is known."""
    return type(module).__module__.split(".")[0] == "torch"


def run_node(root: nn.Module, node: fx.Node, env: Mapping[fx.Node, Any]) -> Any:
    """Execute one node, which isn't a placeholder; `env` has the values of the nodes that it reads."""
    return bind_node(root, node, env)()


def bind_node(root: nn.Module, node: fx.Node, env: Mapping[fx.Node, Any]) -> Callable[[], Any]:
    """Return a callable that does what `run_node` does, with modules, attributes and arguments already looked up."""

    def value(argument: fx.Node) -> Any:
        return attribute(root, str(argument.target)) if argument.op == "get_attr" else env[argument]

    args = fx.node.map_arg(node.args, value)
    kwargs = fx.node.map_arg(node.kwargs, value)
    if node.op == "call_module":
        return partial(root.get_submodule(str(node.target)), *args, **kwargs)
    if node.op == "call_method":
        return partial(getattr(args[0], str(node.target)), *args[1:], **kwargs)
    if node.op == "call_function":
        assert callable(node.target)
        return partial(node.target, *args, **kwargs)
    if node.op == "output":
        return lambda: args[0]
    return lambda: attribute(root, str(node.target))


def attribute(root: nn.Module, path: str) -> Any:
    """Return the attribute at a dotted path."""
    return operator.attrgetter(path)(root)


def tensors_of(graph: LayerGraph, layers: Iterable[Layer]) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers that layers have or read, by qualified name, each under its first name only."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for layer in layers:
        for name, value in tensors_read(graph.root, layer.node):
            found.setdefault(id(value), (name, value))
    return dict(found.values())


def tensors_read(root: nn.Module, node: fx.Node) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor of the parameters and buffers that a node's module has, and of those that it reads."""
    if node.op == "call_module":
        path = str(node.target)
        module = root.get_submodule(path)
        yield from module.named_parameters(prefix=path)
        yield from module.named_buffers(prefix=path)
    for name in (str(each.target) for each in node.all_input_nodes if each.op == "get_attr"):
        if isinstance(value := attribute(root, name), torch.Tensor):
            yield name, value


def _check_leaves(model: nn.Module, leaves: Sequence[str]) -> None:
    """Raise a GraphError for a leaf that is neither a module's name nor a class of one."""
    names = {name for name, _ in model.named_modules(remove_duplicate=False)}
    names |= {type(module).__name__ for module in model.modules()}
    for leaf in leaves:
        if leaf not in names:
            raise GraphError(
                f"model.leaves: model {type(model).__name__} has no module {leaf!r}, by qualified name or class"
                f"{nearest(leaf, sorted(names - {''}))}"
            )


def _in_both_modes(model: nn.Module, holder: nn.Module, make: Callable[[], fx.GraphModule]) -> LayerGraph:
    """Return the layer graph of a model in both modes.

    Args:
        model: the model; its mode is restored.
        holder: the module whose submodules have the names that the graph uses.
        make: returns the traced module of the model in its current mode.
    """
    modes = [(module, module.training) for module in model.modules()]
    attributes = set(model.__dict__)
    found: list[tuple[fx.GraphModule, frozenset[str]]] = []
    try:
        for training in (True, False):
            model.train(training)
            named = holder.named_modules(remove_duplicate=False)
            found.append((make(), frozenset(name for name, module in named if module.training)))
    finally:
        model.train(modes[0][1])  # a method of its own may undo what it did
        for module, mode in modes:
            module.training = mode
        for name in model.__dict__.keys() - attributes:  # tensors made in forward, which the graphs hold now
            delattr(model, name)
    (trains, in_training), (evaluates, in_evaluation) = found
    index_in_training = evaluation_map(_computing(trains.graph), _computing(evaluates.graph))
    evaluation = _layer_graph(model, evaluates, training=in_evaluation, evaluation_map=index_in_training)
    return _layer_graph(model, trains, training=in_training, evaluation=evaluation)


def _draws(module: nn.Module) -> bool:
    fused = isinstance(module, nn.RNNBase | nn.MultiheadAttention) and module.dropout > 0
    return isinstance(module, _RANDOM_MODULES) or fused or not is_torchs_own(module)


def _computing(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op in ("call_module", "call_function", "call_method")]


def _layer_graph(model: nn.Module, module: fx.GraphModule, **rest: Any) -> LayerGraph:
    """Return the layer graph of a traced module; `rest` are further fields of `LayerGraph`."""
    graph = module.graph
    computing = _computing(graph)
    index = {node: i for i, node in enumerate(computing)}
    (output,) = graph.find_nodes(op="output")
    changed = {name for node in computing if (name := overwritten_buffer(module, node)) is not None}
    first_name = {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    layers = tuple(
        Layer(
            index=i,
            name=node.name,
            kind=_kind(module, node),
            node=node,
            reads=reads_of(node, index),
            inputs=inputs_of(node),
            parameters=_names(module, node, first_name, trained=True),
            untrained=_names(module, node, first_name, trained=False),
            buffers=_buffers(module, node, changed),
            draws_as=draw_name(module, node),
            runs_once=(owner := memory_owner(module, node)).op == "get_attr" and str(owner.target) in changed,
        )
        for i, node in enumerate(computing)
    )
    if not layers:
        raise GraphError("the model has no layer: its forward computes nothing")
    inputs = tuple(n.name for n in graph.find_nodes(op="placeholder"))
    return LayerGraph(model, module, graph, inputs, layers, reads_of(output, index), **rest)


def draw_name(module: fx.GraphModule, node: fx.Node) -> str:
    """Return the name that seeds a layer's draws, "" if it draws none; every call of one module has its own name.

    A rewrite that lets a node call another module keeps the name as `DRAWS_AS` in the node's `meta`.
    """
    if DRAWS_AS in node.meta:
        return str(node.meta[DRAWS_AS])
    if not is_random(module, node):
        return ""
    if node.op != "call_module":
        return node.name
    calls = list(module.graph.find_nodes(op="call_module", target=node.target))
    number = calls.index(node) + 1
    return str(node.target) if number == 1 else f"{node.target}_call_{number}"


def _kind(module: nn.Module, node: fx.Node) -> str:
    if node.op == "call_module":
        return type(module.get_submodule(str(node.target))).__name__
    return str(getattr(node.target, "__name__", node.target))


def _names(module: nn.Module, node: fx.Node, first_name: Mapping[int, str], *, trained: bool) -> tuple[str, ...]:
    """Return the qualified names of the trained, or the other, tensors that a node uses; shared ones by their first."""
    used = {first_name.get(id(tensor), name): tensor for name, tensor in tensors_read(module, node)}
    return tuple(
        name for name, tensor in used.items() if (isinstance(tensor, nn.Parameter) and tensor.requires_grad) is trained
    )


def _buffers(module: nn.Module, node: fx.Node, changed: Collection[str]) -> tuple[str, ...]:
    """Return `Layer.buffers` of a node; `changed` are the buffers that any node changes in place."""
    if node.op == "call_module":
        path = str(node.target)
        return tuple(name for name, _ in module.get_submodule(path).named_buffers(prefix=path))
    read = [str(argument.target) for argument in node.all_input_nodes if argument.op == "get_attr"]
    return tuple(dict.fromkeys(n for n in (*read, overwritten_buffer(module, node)) if n is not None and n in changed))


def averaged_buffers(graph: LayerGraph) -> frozenset[str]:
    """Return the qualified names of the buffers that replicas of a stage average at drains: running statistics.

    These are the floating-point buffers that layers may change. A mean would only round the others: constants that
    layers read, and statistics of normalisation layers that stay in evaluation mode while the model trains.
    """
    parts = dict(graph.root.named_modules(remove_duplicate=False))

    def changes(name: str) -> bool:
        owner = name.rpartition(".")[0]
        part = parts[owner]
        is_fixed = isinstance(part, _NormBase) and is_torchs_own(part) and owner not in graph.training
        return attribute(graph.root, name).is_floating_point() and not is_fixed

    return frozenset(name for layer in graph.layers for name in layer.buffers if changes(name))


def evaluation_map(training: Sequence[fx.Node], evaluation: Sequence[fx.Node]) -> tuple[int | None, ...]:
    """Return, for every layer of the evaluation, its index in training, or None if training doesn't have it.

    Indices ascend, as the order of layers is taken to be the same where both modes have them.
    """
    trained, evaluated = list(map(_called, training)), list(map(_called, evaluation))
    if trained == evaluated:  # nearly always
        return tuple(range(len(trained)))
    found: list[int | None] = [None] * len(evaluated)
    matcher = difflib.SequenceMatcher(None, trained, evaluated, autojunk=False)
    for block in matcher.get_matching_blocks():
        for offset in range(block.size):
            found[block.b + offset] = block.a + offset
    return tuple(found)


def _called(node: fx.Node) -> tuple[Any, ...]:
    """Return what identifies a layer in both modes: what it calls, and on which of the model's tensors."""
    names = (str(read.target) for read in node.all_input_nodes if read.op == "get_attr")
    tensors = tuple("" if name.startswith(MADE) else name for name in names)
    return node.op, node.target, tensors
