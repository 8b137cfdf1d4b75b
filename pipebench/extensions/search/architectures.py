"""Architectures of a search: a model with some of its cells, as a graph with a profile.

Cells are modules that a search leaves out of a traced model and puts back. A cell that is left out passes on an input
that has the shape of its output. Its layers become idle, but keep their indices, so that a plan's cuts hold for every
architecture. What stages compute, save and send follows from the graph.
"""

import fnmatch
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

import torch
from torch import fx

from pipebench.cluster import Cluster
from pipebench.engine.setup import Setup
from pipebench.errors import GraphError, nearest
from pipebench.model.graph import LayerGraph, carries_state, inputs_of, reads_of
from pipebench.model.in_place import make_cuttable
from pipebench.model.tracing import CALLS
from pipebench.profile.analytic import analytic_profile
from pipebench.profile.cache import cached, own_hash
from pipebench.profile.devices import DEVICES, device_of
from pipebench.profile.model import LayerProfile, Profile
from pipebench.profile.request import ProfileRequest
from pipebench.profile.shapes import output_forms
from pipebench.profile.stored import write_profile
from pipebench.recipe.schema import OptimizerRecipe
from pipebench.zoo.registry import Dataset


@dataclass(frozen=True)
class SkippableCell:
    """A module that can be left out."""

    name: str  # qualified
    layers: tuple[int, ...]  # indices of its layers, ascending
    passes: str  # name of the node whose value takes the place of its output


def find_cells(
    graph: LayerGraph, patterns: Sequence[str], forms: Mapping[str, Sequence[str]]
) -> tuple[SkippableCell, ...]:
    """Return the modules that patterns of qualified names match, in order of execution.

    Args:
        graph: the whole model.
        patterns: such as `cells.*`; a star matches one name between dots, or a part of it.
        forms: dtypes and shapes of the tensors of every model input and layer, by the node's name.

    Raises:
        GraphError: no module matches a pattern, or a module can't be left out; says why.
    """
    exits = _exits(graph.graph)
    found: dict[str, SkippableCell] = {}
    for pattern in patterns:
        names = [name for name in exits if named(name, pattern)]
        if not names:
            raise GraphError(
                f"search.cells: no module of the model that is given a value and puts one out is called {pattern!r}"
                f"{nearest(pattern, list(exits))}"
            )
        found |= {name: _cell(graph, name, exits[name], forms) for name in names}
    return tuple(sorted(found.values(), key=lambda cell: (cell.layers[0], cell.name)))


def without(graph: LayerGraph, cells: Collection[SkippableCell]) -> LayerGraph:
    """Return the model without `cells`, in training and in evaluation; it shares modules with the whole model."""
    passes = {cell.name: cell.passes for cell in cells}
    if not passes:
        return graph
    evaluation = None if graph.evaluation is None else _without(graph.evaluation, passes)
    return replace(_without(graph, passes), evaluation=evaluation)


def named(name: str, pattern: str) -> bool:
    """Return whether a pattern matches a qualified name; both are compared part by part between dots."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def _cell(graph: LayerGraph, name: str, exits: Sequence[fx.Node], forms: Mapping[str, Sequence[str]]) -> SkippableCell:
    """Return a module as a cell; raises a GraphError if it can't be left out."""
    why = f"search.cells: {name} of the model can't be left out: "
    if len(exits) > 1:
        raise GraphError(f"{why}it is called {len(exits)} times")
    (last,) = exits
    for form in (graph, graph.evaluated):
        inside = {node for node in form.graph.nodes if name in _modules_around(node)}
        for node in inside - {n for n in inside if n.meta.get(CALLS, {}).get(name)}:
            reader = next((user for user in node.users if user not in inside), None)
            if reader is not None:
                raise GraphError(f"{why}{node.name} inside it is read by {reader.name} outside it")
    if any(carries_state(part) for part in graph.root.get_submodule(name).modules()):
        raise GraphError(f"{why}it carries a state from minibatch to minibatch, which would be lost meanwhile")
    passes = next((given for given in last.meta[CALLS][name] if forms.get(given) == forms[last.name]), None)
    if passes is None:
        shape = ", ".join(forms[last.name])
        raise GraphError(f"{why}nothing that it is given has the shape of what it puts out, {shape}")
    layers = tuple(layer.index for layer in graph.layers if name in _modules_around(layer.node))
    return SkippableCell(name, layers, passes)


def _exits(graph: fx.Graph) -> dict[str, list[fx.Node]]:
    """Return the nodes that compute each module's outputs, one per call, by the module's name."""
    found: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        for name in node.meta.get(CALLS, {}):
            found.setdefault(name, []).append(node)
    return found


def _modules_around(node: fx.Node) -> set[str]:
    """Return the qualified names of the modules in whose forward a node is."""
    return {path for path, _ in node.meta.get("nn_module_stack", {}).values()}


def _without(graph: LayerGraph, passes: Mapping[str, str]) -> LayerGraph:
    """Return a model, in training or in evaluation, without some cells.

    Layers that read a cell's output read the value that it passes on instead.

    Args:
        graph: the whole model, in that mode.
        passes: the name of the node whose value each cell passes on, by the cell's name.
    """
    by_name = {node.name: node for node in graph.graph.nodes}
    made = fx.Graph(owning_module=graph.root)  # type: ignore[arg-type] # it asks it for its modules only
    env: dict[fx.Node, fx.Node] = {}  # what stands for a node's value: its copy, or the value passed on
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.graph.nodes:
        around = passes.keys() & _modules_around(node)
        if not around:
            env[node] = copies[node] = made.node_copy(node, env.__getitem__)
            continue
        # Of cells inside each other the outer one, of the shorter name, comes first: values inside of it are not there.
        passed_on = (by_name[passes[name]] for name in sorted(around, key=len) if name in node.meta.get(CALLS, {}))
        known = next((value for value in passed_on if value in env), None)
        if known is not None:
            env[node] = env[known]
    make_cuttable(graph.root, made)
    left = {*made.nodes}
    nodes = {layer.index: copies[layer.node] for layer in graph.layers if copies.get(layer.node) in left}
    index = {node: position for position, node in nodes.items()}
    layers = tuple(
        replace(layer, node=own, reads=reads_of(own, index), inputs=inputs_of(own))
        if (own := nodes.get(layer.index)) is not None
        else replace(layer, reads=(), inputs=(), idle=True)
        for layer in graph.layers
    )
    (output,) = made.find_nodes(op="output")
    return replace(graph, graph=made, layers=layers, outputs=reads_of(output, index))


Cells = frozenset[int]  # an architecture: indices of the cells that it has
_CACHED = 64  # architectures: evolution draws the same parent several times


class Architectures:
    """All architectures of a model.

    Args:
        graph: the whole model.
        profile: the whole model's.
        dataset: feeds the model.
        optimizer: whose state counts in profiles.
        cluster: whose device analytic profiles are for.
        patterns: of the modules that can be left out; see `find_cells`.

    Raises:
        GraphError: a pattern matches nothing, or a module that can't be left out.
        ProfileError: a layer's output shape can't be found without data.
    """

    def __init__(
        self,
        graph: LayerGraph,
        profile: Profile,
        dataset: Dataset,
        optimizer: OptimizerRecipe,
        cluster: Cluster,
        patterns: Sequence[str],
    ) -> None:
        self.profile = profile
        forms = output_forms(graph, dataset, max(profile.layers))
        self.cells = find_cells(graph, patterns, forms)  # in order of execution
        self._graph, self._dataset, self._optimizer, self._cluster = graph, dataset, optimizer, cluster
        self.form = lru_cache(_CACHED)(self._form)  # an architecture's graph and profile

    @property
    def all(self) -> Cells:
        """The architecture with every cell."""
        return frozenset(range(len(self.cells)))

    def named(self, patterns: Iterable[str], key: str) -> Cells:
        """Return the cells that patterns match.

        Raises:
            GraphError: a pattern matches none; names `key`, the place of the patterns in a recipe or file.
        """
        names = [cell.name for cell in self.cells]
        found: set[int] = set()
        for pattern in patterns:
            matching = {index for index, name in enumerate(names) if named(name, pattern)}
            if not matching:
                raise GraphError(f"{key}: no cell of the search is called {pattern!r}{nearest(pattern, names)}")
            found |= matching
        return frozenset(found)

    def names(self, cells: Iterable[int]) -> list[str]:
        """Return the cells' names, in order of execution."""
        return [self.cells[index].name for index in sorted(cells)]

    def num_layers(self, cells: Cells) -> int:
        """Return an architecture's number of layers."""
        return sum(not layer.idle for layer in self.form(cells)[0].layers)

    def setup(self, setup: Setup, cells: Cells) -> Setup:
        """Return a setup with these cells; its cuts stay."""
        graph, profile = self.form(cells)
        return replace(setup, graph=graph, profile=profile).under(setup.plan)

    def _form(self, cells: Cells) -> tuple[LayerGraph, Profile]:
        graph = without(self._graph, [cell for index, cell in enumerate(self.cells) if index not in cells])
        return graph, profile_without(self.profile, graph, self._dataset, self._optimizer, self._cluster)


Rows = Mapping[int, tuple[LayerProfile, ...]]


def profile_without(
    profile: Profile, graph: LayerGraph, dataset: Dataset, optimizer: OptimizerRecipe, cluster: Cluster
) -> Profile:
    """Return the profile of a model without some of its cells.

    Times are those of the whole model's profile; an analytic one is computed again. Bytes are always computed again,
    since what a layer saves for its backward depends on its neighbours. Idle layers cost nothing.

    Args:
        profile: the whole model's.
        graph: the model, in which layers of cells that are left out are idle.
        dataset: feeds the model.
        optimizer: whose state counts.
        cluster: whose device an analytic profile is for.

    Raises:
        ProfileError: a layer needs data that isn't there.
    """
    idle = {layer.index for layer in graph.layers if layer.idle}
    if not idle:
        return profile
    is_computed = profile.source == "analytic"
    # Bytes are the same on all devices, so any will do if only bytes are used.
    device = device_of(cluster) if is_computed else next(iter(DEVICES.values()))
    request = ProfileRequest(graph, dataset, sorted(profile.layers), optimizer, profile.model)
    # The whole model's profile stands for its options, data and precision; the graph, for the cells that it has.
    key = {
        "whole": write_profile(profile), "graph": str(graph.graph), "optimizer": asdict(optimizer),
        "computed for": asdict(device), "by": own_hash(), "torch": torch.__version__,
    }  # fmt: skip
    found = cached(key, lambda: analytic_profile(request, device))
    if is_computed:
        return replace(found, precision=profile.precision)
    lengths = tuple(
        replace(theirs, layers=_timed(ours.layers, theirs.layers, idle))
        for ours, theirs in zip(found.lengths, profile.lengths, strict=True)
    )
    return replace(profile, layers=_timed(found.layers, profile.layers, idle), lengths=lengths)


def _timed(ours: Rows, theirs: Rows, idle: Container[int]) -> dict[int, tuple[LayerProfile, ...]]:
    """Return `ours` with the times of `theirs`; idle layers take none."""
    return {
        size: tuple(
            row if index in idle else row.with_times_of(other)
            for index, (row, other) in enumerate(zip(rows, theirs[size], strict=True))
        )
        for size, rows in ours.items()
    }
