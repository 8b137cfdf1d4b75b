"""Layers that write in place, and the other layers whose values share the memory that they write into.

`make_cuttable` makes a graph safe to cut: readers of values overwritten in place read the output of the last writer,
tensors that a forward makes are made in every forward, and nodes with side effects are kept.
"""

from torch import fx, nn

from pipebench.errors import GraphError
from pipebench.model.traced_values import set_item

MADE = "_tensor_constant"  # torch.fx's names of tensors made in forward begin with this; a number follows
# Functions and modules that may return their first argument or a view of it, which an in-place layer after them
# overwrites.
_VIEWS = {
    *("flatten", "view", "view_as", "reshape", "transpose", "permute", "squeeze", "unsqueeze", "t", "expand", "chunk"),
    *("split", "unbind", "narrow", "select", "getitem", "contiguous", "detach", "swapaxes", "swapdims", "movedim"),
    *("moveaxis", "expand_as", "broadcast_to", "diagonal", "unfold", "ravel", "tensor_split", "unflatten", "adjoint"),
    *("to", "float", "double", "half", "bfloat16", "type", "type_as", "cpu", "cuda", "dropout", "conj", "resolve_conj"),
    *("Flatten", "Unflatten", "Identity", "Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout"),
}
_VIEWING = ("data", "T", "mT", "H", "mH", "real", "imag")  # attributes that are views
# Functions of `operator` that begin with `i` and don't write into their first argument.
_NOT_IN_PLACE = ("invert", "inv", "is_", "is_not", "index", "indexOf", "itemgetter")


def make_cuttable(root: nn.Module, graph: fx.Graph) -> None:
    """Let readers of an overwritten value read its writer, and remove nodes that aren't read and have no side effect.

    Args:
        root: has the modules and tensors that the graph names.
        graph: is changed.

    Raises:
        GraphError: a layer writes into a tensor given as `out`, which can't be followed.
    """
    for node in graph.nodes:
        if isinstance(node.kwargs.get("out"), fx.Node):
            raise GraphError(f"layer {node.name} writes its result into out=, which can't be followed: assign it")
    _make_overwritten_constants_anew(root, graph)
    _read_overwritten_values_from_their_writer(root, graph)
    graph.eliminate_dead_code(lambda node: node.is_impure() or _has_effect(root, node))


def _has_effect(module: nn.Module, node: fx.Node) -> bool:
    """Return whether a layer may change a buffer, so that it has to run even if nothing reads it."""
    if node.op == "call_module":
        return any(True for _ in module.get_submodule(str(node.target)).buffers())
    return overwritten_buffer(module, node) is not None


def overwritten_buffer(root: nn.Module, node: fx.Node) -> str | None:
    """Return the qualified name of the buffer that a layer changes in place, also through views; None if none."""
    changed = overwritten(root, node)
    return str(changed.target) if changed is not None and changed.op == "get_attr" else None


def overwritten(root: nn.Module, node: fx.Node) -> fx.Node | None:
    """Return the node whose value an in-place layer changes, also through views of it; None for other layers."""
    return memory_owner(root, node) if is_inplace(root, node) else None


def memory_owner(root: nn.Module, node: fx.Node) -> fx.Node:
    """Return the node that has allocated the memory of a node's value: the node itself, or one that it is a view of."""
    while may_share_memory(root, node) and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def may_share_memory(root: nn.Module, node: fx.Node) -> bool:
    """Return whether a node's value may share memory with its first argument's."""
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    name = getattr(node.target, "__name__", str(node.target))
    if node.op == "call_module":
        name = type(root.get_submodule(str(node.target))).__name__
    if node.target is getattr:
        return node.args[1] in _VIEWING
    return name in _VIEWS or is_inplace(root, node)


def is_inplace(module: nn.Module, node: fx.Node) -> bool:
    """Return whether the node overwrites its first input."""
    if node.op == "call_module":
        return bool(getattr(module.get_submodule(str(node.target)), "inplace", False))
    if node.op == "call_function":
        name = getattr(node.target, "__name__", "")
        if node.kwargs.get("inplace", False) or node.target is set_item:
            return True
        if getattr(node.target, "__module__", "") == "_operator":  # iadd, but also index; and_ isn't in place
            return name.startswith("i") and name not in _NOT_IN_PLACE
        return _ends_in_underscore(name)
    return node.op == "call_method" and _ends_in_underscore(str(node.target))


def _ends_in_underscore(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def _make_overwritten_constants_anew(root: nn.Module, graph: fx.Graph) -> None:
    """Let layers change a copy of a tensor that the model's forward makes.

    torch.fx records it as a constant, but the model makes a new one in every forward.
    """
    found = {changed for node in graph.nodes if (changed := overwritten(root, node)) is not None}
    for constant in list(graph.nodes):
        if constant in found and constant.op == "get_attr" and str(constant.target).startswith(MADE):
            readers = list(constant.users)
            with graph.inserting_after(constant):
                anew = graph.call_method("clone", (constant,))
            for reader in readers:
                reader.replace_input_with(constant, anew)


def _read_overwritten_values_from_their_writer(module: nn.Module, graph: fx.Graph) -> None:
    """Let later readers of a value that is overwritten in place read the writer's output.

    In the whole model that is the same tensor, but if a cut separates writer and reader, only the output is sent.
    """
    position = {node: index for index, node in enumerate(graph.nodes)}
    for writer in graph.nodes:
        if not is_inplace(module, writer) or not writer.args or not isinstance(writer.args[0], fx.Node):
            continue
        overwritten = writer.args[0]
        for reader in list(overwritten.users):
            if position[reader] > position[writer]:
                reader.replace_input_with(overwritten, writer)
