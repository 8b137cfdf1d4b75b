"""The layer graph: a model turned into layers with every edge between them, ready to be cut anywhere.

torch.fx traces the model once; a layer is a node that computes. The graph is made safe to cut here, in one place:
values overwritten in place are read from their last writer, dropout follows train and eval mode, and every random
layer has a name of its own.
"""

import copy
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import fx, nn
from torch.nn.modules.dropout import _DropoutNd

from pipebench.errors import GraphError

_RANDOM_MODULES: tuple[type[nn.Module], ...] = (_DropoutNd, nn.RReLU)
_DROPOUT_FUNCTIONS = {
    nn.functional.dropout: nn.Dropout,
    nn.functional.dropout1d: nn.Dropout1d,
    nn.functional.dropout2d: nn.Dropout2d,
    nn.functional.dropout3d: nn.Dropout3d,
    nn.functional.alpha_dropout: nn.AlphaDropout,
    nn.functional.feature_alpha_dropout: nn.FeatureAlphaDropout,
}


@dataclass(frozen=True)
class Layer:
    """A node of the graph that computes: the unit that is placed.

    Attributes:
        index: position in execution order.
        name: unique name, e.g. `features_0`.
        kind: module class or function name, e.g. `Conv2d`, `add`.
        node: the torch.fx node.
        reads: indices of the layers whose output it reads, ascending.
        inputs: names of the model inputs it reads.
        parameters: qualified names of the parameters it uses, in the model's own order.
    """

    index: int
    name: str
    kind: str
    node: fx.Node
    reads: tuple[int, ...]
    inputs: tuple[str, ...]
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class LayerGraph:
    """A traced model.

    Attributes:
        model: the model that was traced.
        root: its layers; parameters are the model's own, parameters and buffers keep their names.
        graph: the torch.fx graph the layers are nodes of.
        inputs: names of the model's inputs, in order.
        layers: in execution order.
        outputs: indices of the layers whose output the model returns, ascending.
    """

    model: nn.Module
    root: nn.Module
    graph: fx.Graph
    inputs: tuple[str, ...]
    layers: tuple[Layer, ...]
    outputs: tuple[int, ...]

    def index_of(self, name: str) -> int:
        """Return the index of the layer of that name; module paths (`features.0`) are understood.

        Raises:
            KeyError: no such layer.
        """
        wanted = name.replace(".", "_")
        for layer in self.layers:
            if layer.name == wanted:
                return layer.index
        raise KeyError(name)


class _Tracer(fx.Tracer):
    """torch.fx's tracer, with the user's leaves: qualified names or class names not traced into."""

    def __init__(self, leaves: Sequence[str]) -> None:
        super().__init__()
        self.leaves = frozenset(leaves)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether the module is one layer."""
        named = module_qualified_name in self.leaves or type(m).__name__ in self.leaves
        says_so = getattr(m, "one_layer", False) or carries_state(m)
        return named or says_so or super().is_leaf_module(m, module_qualified_name)


def is_random(module: nn.Module) -> bool:
    """Return whether a module that is one layer draws random numbers, inside of it too."""
    return any(_draws(part) for part in module.modules())


def carries_state(module: nn.Module) -> bool:
    """Return whether a module carries something from one minibatch to the next (see zoo/registry.py)."""
    return hasattr(module, "carried_state")


def forget_states(root: nn.Module) -> None:
    """Let modules that carry something start anew."""
    for module in filter(carries_state, root.modules()):
        module.carried_state = None  # type: ignore[assignment]


def _draws(module: nn.Module) -> bool:
    fused = isinstance(module, nn.RNNBase | nn.MultiheadAttention) and module.dropout > 0
    return isinstance(module, _RANDOM_MODULES) or fused or bool(getattr(module, "random_layer", False))


def trace(model: nn.Module, leaves: Sequence[str] = ()) -> LayerGraph:
    """Turn a model into a layer graph. The model is not changed; its parameters are shared.

    Args:
        model: any module that torch.fx traces.
        leaves: qualified names or class names of modules that become one layer each, besides those that say so
            themselves (zoo/registry.py).

    Raises:
        GraphError: torch.fx can't trace it; names the module, the line and the way out.
    """
    try:
        graph = _Tracer(leaves).trace(model)
    except Exception as error:  # tracing runs the user's forward: anything can come out of it
        raise GraphError(_why_not_traced(model, error)) from error
    module = fx.GraphModule(model, graph)
    _drop_unused_inputs(graph)
    _dropout_functions_to_modules(module, graph)
    _read_overwritten_values_from_their_writer(module, graph)
    graph.eliminate_dead_code()
    _one_module_per_random_layer(module, graph)
    module.recompile()
    return _layer_graph(model, module, graph)


def is_inplace(module: nn.Module, node: fx.Node) -> bool:
    """Return whether the node overwrites its first input."""
    if node.op == "call_module":
        return bool(getattr(module.get_submodule(str(node.target)), "inplace", False))
    if node.op == "call_function":
        name = getattr(node.target, "__name__", "")
        iadd = getattr(node.target, "__module__", "") == "_operator" and name.startswith("i") and name != "invert"
        is_or_index = name in ("is_", "is_not", "index", "inv", "indexOf", "itemgetter")
        return bool(node.kwargs.get("inplace", False)) or (iadd and not is_or_index) or _ends_in_underscore(name)
    return node.op == "call_method" and _ends_in_underscore(str(node.target))


def run_node(root: nn.Module, node: fx.Node, env: Mapping[fx.Node, Any]) -> Any:
    """Execute one node; `env` holds the values of the nodes it reads.

    Args:
        root: holds the modules and parameters the node names.
        node: any node but a placeholder.
        env: values by node.
    """
    return bind_node(root, node, env)()


def bind_node(root: nn.Module, node: fx.Node, env: Mapping[fx.Node, Any]) -> Callable[[], Any]:
    """Return what executes one node, everything it names looked up already; arguments as for `run_node`."""

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
    value: Any = root
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _ends_in_underscore(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def _why_not_traced(model: nn.Module, error: Exception) -> str:
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if "/torch/" not in f.filename and "graph.py" not in f.filename
    ]
    where = f" at {frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else ""
    reason = str(error).strip().split("\n")[0]
    return (
        f"model {type(model).__name__} can't be traced by torch.fx{where}: {reason}; "
        f"name the module that holds this line (qualified name or class) in model.leaves to make it one layer"
    )


def _drop_unused_inputs(graph: fx.Graph) -> None:
    for node in graph.find_nodes(op="placeholder"):
        if not node.users:
            graph.erase_node(node)


def _dropout_functions_to_modules(module: fx.GraphModule, graph: fx.Graph) -> None:
    """Replace dropout functions by modules: tracing has frozen their `training` argument."""
    for index, node in enumerate(list(graph.nodes)):
        if node.op != "call_function" or node.target not in _DROPOUT_FUNCTIONS:
            continue
        arguments = dict(zip(("input", "p", "training", "inplace"), node.args, strict=False)) | dict(node.kwargs)
        made = _DROPOUT_FUNCTIONS[node.target](arguments.get("p", 0.5), arguments.get("inplace", False))
        name = f"dropout_function_{index}"
        module.add_submodule(name, made.train(module.training))
        with graph.inserting_before(node):
            new = graph.call_module(name, (arguments["input"],))
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _read_overwritten_values_from_their_writer(module: nn.Module, graph: fx.Graph) -> None:
    """Let later readers of a value that is overwritten in place read the writer's output.

    It is the same tensor in the whole model, but not once a cut separates writer and reader.
    """
    position = {node: index for index, node in enumerate(graph.nodes)}
    for writer in graph.nodes:
        if not is_inplace(module, writer) or not writer.args or not isinstance(writer.args[0], fx.Node):
            continue
        overwritten = writer.args[0]
        for reader in list(overwritten.users):
            if position[reader] > position[writer]:
                reader.replace_input_with(overwritten, writer)


def _one_module_per_random_layer(module: fx.GraphModule, graph: fx.Graph) -> None:
    """Give every call of a random module a module of its own, so that each call has its own name and its own draw."""
    seen: dict[str, int] = {}
    for node in graph.find_nodes(op="call_module"):
        path = str(node.target)
        called = module.get_submodule(path)
        if not is_random(called):
            continue
        seen[path] = seen.get(path, 0) + 1
        if seen[path] > 1:
            name = f"{path}_call_{seen[path]}"
            shared = {id(parameter): parameter for parameter in called.parameters()}
            module.add_submodule(name, copy.deepcopy(called, dict(shared)))
            node.target = name


def _layer_graph(model: nn.Module, module: fx.GraphModule, graph: fx.Graph) -> LayerGraph:
    computing = [n for n in graph.nodes if n.op in ("call_module", "call_function", "call_method")]
    index = {node: i for i, node in enumerate(computing)}
    (output,) = graph.find_nodes(op="output")
    layers = tuple(
        Layer(
            index=i,
            name=node.name,
            kind=_kind(module, node),
            node=node,
            reads=tuple(sorted({index[n] for n in node.all_input_nodes if n in index})),
            inputs=tuple(n.name for n in node.all_input_nodes if n.op == "placeholder"),
            parameters=tuple(_parameters(module, node)),
        )
        for i, node in enumerate(computing)
    )
    if not layers:
        raise GraphError("the model has no layer: its forward computes nothing")
    inputs = tuple(n.name for n in graph.find_nodes(op="placeholder"))
    outputs = tuple(sorted({index[n] for n in output.all_input_nodes if n in index}))
    return LayerGraph(model, module, graph, inputs, layers, outputs)


def _kind(module: nn.Module, node: fx.Node) -> str:
    if node.op == "call_module":
        return type(module.get_submodule(str(node.target))).__name__
    return str(getattr(node.target, "__name__", node.target))


def _parameters(module: nn.Module, node: fx.Node) -> Iterator[str]:
    """Yield the qualified names of the parameters the node uses; a tied parameter has one name, its first."""
    first_name = {id(parameter): name for name, parameter in module.named_parameters()}
    used: list[nn.Parameter] = []
    if node.op == "call_module":
        used += list(module.get_submodule(str(node.target)).parameters())
    for argument in node.all_input_nodes:
        if argument.op == "get_attr" and isinstance(attribute(module, str(argument.target)), nn.Parameter):
            used.append(attribute(module, str(argument.target)))
    yield from dict.fromkeys(first_name[id(parameter)] for parameter in used if parameter.requires_grad)
