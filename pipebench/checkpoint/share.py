"""A worker's share of a model's state, under the model's own names."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipebench.model.graph import LayerGraph, attribute
from pipebench.model.slice_modules import Cut


@dataclass(frozen=True)
class Share:
    """One worker's part of a model's state."""

    # Name in the stage's module to the model's own name, of every parameter and buffer
    names: Mapping[str, str] = field(repr=False)
    replica: int = 0  # position among the replicas of its stage. The first saves parameters, optimizer and buffers
    num_replicas: int = 1  # of its stage. They take turns with the streams of a text
    # Samples of every microbatch of a minibatch of text in streams. Empty where samples don't follow each other, so
    # that no state is carried
    unit_sizes: tuple[int, ...] = ()
    elsewhere: frozenset[str] = frozenset()  # own names of tied parameters that an earlier stage has, too, and saves
    slice_index: int = 0  # position among the processes that layers are divided among. The first saves what all have
    # Own name to the part that this one has, of every divided parameter of the model
    cuts: Mapping[str, Cut] = field(default_factory=dict, repr=False)

    def holds(self, stream: int) -> bool:
        """Return whether this replica carries a stream's state: segments start at multiples of the streams."""
        return bool(self.unit_sizes) and stream % self.num_replicas == self.replica


def own_names(graph: LayerGraph) -> dict[str, str]:
    """Return the model's own name of every parameter and buffer of its layer graph.

    A tied one has several names, and which comes first in a stage depends on the cut; its own is the model's first.
    Tensors added by tracing (made in forward, second copies of random layers) keep their names.
    """
    own: dict[int, str] = {}
    for part in (graph.model, graph.root):
        for named in (part.named_parameters(remove_duplicate=False), part.named_buffers(remove_duplicate=False)):
            for name, tensor in named:
                own.setdefault(id(tensor), name)
    root, cuts = graph.root, {} if graph.slices is None else graph.slices.cuts
    tensors = (*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False))
    return {name: own[id(attribute(graph.model, name) if name in cuts else tensor)] for name, tensor in tensors}


def own_cuts(graph: LayerGraph) -> dict[str, Cut]:
    """Return the part that this process has of every divided parameter, by the model's own name."""
    if graph.slices is None:
        return {}
    own = own_names(graph)
    return {own[name]: cut for name, cut in graph.slices.cuts.items()}


def trained_names(graph: LayerGraph) -> list[str]:
    """Return the model's own names of the parameters that it trains, in an order independent of cuts."""
    own = own_names(graph)
    names = {name for layer in graph.layers for name in layer.parameters}
    return sorted({own[name] for name in names if attribute(graph.root, name).requires_grad})
