"""Which layers' backwards can be split: first the gradient of the input, later those of the parameters.

These layers are one torch operation each, whose backward can compute either part alone in about its share of the time.
A fused recurrent layer, or a module of several operations, would repeat work for the second part. So would a
normalisation, whose input gradient requires its parameters' gradients.
"""

from collections.abc import Iterator

from torch import fx, nn

from pipebench.formats import listed
from pipebench.model.graph import Layer, LayerGraph
from pipebench.model.split_kinds import BY_THE_WAY, SPLITTABLE, is_kind_of

_NAMED = 8  # layers in a message
_SPLIT: tuple[type[nn.Module], ...] = tuple(getattr(nn, name) for name in SPLITTABLE)
_BY_THE_WAY = (nn.modules.batchnorm._NormBase, *(getattr(nn, name) for name in BY_THE_WAY))


def splittable(root: nn.Module, graph: fx.Graph) -> Iterator[str]:
    """Yield the qualified names of a graph's modules whose backwards can be split."""
    calls = {node.target: list(graph.find_nodes(op="call_module", target=node.target)) for node in graph.nodes}
    for target, nodes in calls.items():
        takes_one = all(len(node.args) == 1 and not node.kwargs for node in nodes)
        if nodes and takes_one and can_split(root.get_submodule(str(target))):
            yield str(target)


def unsplit(graph: LayerGraph) -> str:
    """Return, in words, the layers with parameters whose backwards can't be split, except normalisations."""
    split = {*splittable(graph.root, graph.graph)}

    def is_whole(layer: Layer) -> bool:
        if layer.node.op != "call_module":  # a function, or a profile's layer, of which only the kind is known
            return not is_kind_of(layer.kind, (*SPLITTABLE, *BY_THE_WAY))
        target = str(layer.node.target)
        return target not in split and not isinstance(graph.root.get_submodule(target), _BY_THE_WAY)

    found = [f"{layer.name} ({layer.kind})" for layer in graph.layers if layer.parameters and is_whole(layer)]
    return listed(found, _NAMED)


def can_split(module: nn.Module) -> bool:
    """Return whether a module's backward can be split: it is of a splittable class and has trained parameters.

    It can't if a hook computes the weight before the forward, as torch's old `weight_norm` does.
    """
    is_plain = isinstance(module, _SPLIT) and "weight" not in vars(module)
    return is_plain and any(parameter.requires_grad for parameter in module.parameters())
