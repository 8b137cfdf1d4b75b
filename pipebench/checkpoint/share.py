"""A worker's share of a model's state, under the model's own names."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipebench.model.graph import LayerGraph, attribute
from pipebench.model.slice_modules import Cut


@dataclass(frozen=True)
class Share:
    """One worker's part of a model's state."""

    # The name in the stage's module of every parameter and buffer, to the model's own name
    names: Mapping[str, str] = field(repr=False)
    replica: int = 0  # index among the replicas of its stage; the first one saves parameters, optimizer and buffers
    num_replicas: int = 1  # of its stage; they take turns with the streams of a text
    # Samples of every microbatch, for text in streams; empty for other data, where no state is carried
    unit_sizes: tuple[int, ...] = ()
    elsewhere: frozenset[str] = frozenset()  # own names of tied parameters that an earlier stage saves
    slice_index: int = 0  # index among the processes of a worker's tensor slices; the first one saves what all have
    # Own name to this process's slice, of every parameter of the model that is divided
    cuts: Mapping[str, Cut] = field(default_factory=dict, repr=False)

    def holds(self, stream: int) -> bool:
        """Return whether this replica carries a stream's state.

        Replicas take turns with minibatches, and minibatches with streams. Segments begin at multiples of the streams.
        """
        return bool(self.unit_sizes) and stream % self.num_replicas == self.replica


def own_names(graph: LayerGraph) -> dict[str, str]:
    """Return the model's own name of every parameter and buffer of its layer graph.

    A tied one has several names, and which of them comes first in a stage depends on the cuts. Its own name is the
    first in the model. Tensors added by tracing (made in `forward`, second copies of random layers) keep their names.
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
    """Return this process's slice of every parameter that is divided, by the model's own name."""
    if graph.slices is None:
        return {}
    own = own_names(graph)
    return {own[name]: cut for name, cut in graph.slices.cuts.items()}


def trained_names(graph: LayerGraph) -> list[str]:
    """Return the model's own names of the parameters that it trains, in an order independent of cuts."""
    own = own_names(graph)
    names = {name for layer in graph.layers for name in layer.parameters}
    return sorted({own[name] for name in names if attribute(graph.root, name).requires_grad})
