"""Which layers' backwards can be split: the gradient of the input now, those of the parameters later.

Each of them is one operation of torch's, which computes either alone for about its share of the whole. What a fused
recurrent layer, or several operations in one module, would compute for the second it would compute for the first again.
So would a normalisation, whose parameters' gradients are sums that its input's needs anyway.
"""

from collections.abc import Iterator

from torch import fx, nn

from pipebench.model.graph import LayerGraph
from pipebench.model.split_kinds import SPLITTABLE

_NAMED = 8  # layers in a message
_SPLIT: tuple[type[nn.Module], ...] = tuple(getattr(nn, name) for name in SPLITTABLE)
_BY_THE_WAY = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)


def splittable(root: nn.Module, graph: fx.Graph) -> Iterator[str]:
    """Yield the qualified names of the modules that a graph calls whose backwards can be split."""
    calls = {node.target: list(graph.find_nodes(op="call_module", target=node.target)) for node in graph.nodes}
    for target, nodes in calls.items():
        takes_one = all(len(node.args) == 1 and not node.kwargs for node in nodes)
        if nodes and takes_one and splits(root.get_submodule(str(target))):
            yield str(target)


def unsplit(graph: LayerGraph) -> str:
    """Return the layers whose backwards would take two parts and can't: some of them, and how many more."""
    split = {*splittable(graph.root, graph.graph)}
    modules = {
        layer: graph.root.get_submodule(str(layer.node.target)) if layer.node.op == "call_module" else None
        for layer in graph.layers
        if layer.parameters
    }
    found = [
        f"{layer.name} ({layer.kind})"
        for layer, module in modules.items()
        if not (isinstance(module, _BY_THE_WAY) or (module is not None and layer.node.target in split))
    ]
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return ", ".join(found[:_NAMED]) + more


def splits(module: nn.Module) -> bool:
    """Return whether a module's backward can be split: it is one of torch's own, or derived from one, and it trains."""
    return isinstance(module, _SPLIT) and any(parameter.requires_grad for parameter in module.parameters())
