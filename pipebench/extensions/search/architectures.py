"""Architectures: a model with some of its cells, its costs and its setup.

Cuts stay, since left-out layers keep their places; graph, costs, and what stages compute, keep and send follow from the
cells.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import lru_cache

import torch

from pipebench.cluster import Cluster
from pipebench.engine.setup import Setup
from pipebench.errors import GraphError, nearest
from pipebench.extensions.search.cells import find_cells, named, without
from pipebench.model.graph import LayerGraph
from pipebench.profile.analytic import analytic_profile
from pipebench.profile.cache import cached, own_hash
from pipebench.profile.devices import DEVICES, device_of
from pipebench.profile.model import LayerProfile, Profile
from pipebench.profile.request import ProfileRequest
from pipebench.profile.shapes import output_forms
from pipebench.profile.stored import write_profile
from pipebench.recipe.schema import OptimizerRecipe
from pipebench.zoo.registry import Dataset

Cells = frozenset[int]  # positions among the cells that can be left out
_CACHED = 64  # architectures: a child's parent returns now and then


class Architectures:
    """All architectures of a model: `patterns`, such as `cells.*`, are qualified names of modules that can be left out.

    Raises:
        GraphError: a pattern matches nothing, or what can't be left out.
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
        """Every cell."""
        return frozenset(range(len(self.cells)))

    def named(self, patterns: Iterable[str], key: str) -> Cells:
        """Return the cells that patterns match.

        Raises:
            GraphError: a pattern matches none; names `key`.
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
        """Return names of cells, in order of execution."""
        return [self.cells[index].name for index in sorted(cells)]

    def num_layers(self, cells: Cells) -> int:
        """Return an architecture's number of layers."""
        return sum(not layer.idle for layer in self.form(cells)[0].layers)

    def setup(self, setup: Setup, cells: Cells) -> Setup:
        """Return the setup with these cells, under its cuts."""
        graph, profile = self.form(cells)
        return replace(setup, graph=graph, profile=profile).under(setup.plan)

    def _form(self, cells: Cells) -> tuple[LayerGraph, Profile]:
        graph = without(self._graph, [cell for index, cell in enumerate(self.cells) if index not in cells])
        return graph, profile_without(self.profile, graph, self._dataset, self._optimizer, self._cluster)


Rows = Mapping[int, tuple[LayerProfile, ...]]


def profile_without(
    profile: Profile, graph: LayerGraph, dataset: Dataset, optimizer: OptimizerRecipe, cluster: Cluster
) -> Profile:
    """Return the profile of `graph`, some of whose layers are idle and cost nothing; `profile` is of the whole model.

    Seconds are the whole model's unless it is analytic; bytes are computed again, as what a layer saves for its
    backward depends on what its neighbours save.

    Raises:
        ProfileError: a layer needs data that isn't there.
    """
    idle = {layer.index for layer in graph.layers if layer.idle}
    if not idle:
        return profile
    is_computed = profile.source == "analytic"
    # Any device will do where only bytes are taken: they are the same on all.
    device = device_of(cluster) if is_computed else next(iter(DEVICES.values()))
    request = ProfileRequest(graph, dataset, sorted(profile.layers), optimizer, profile.model)
    # What the whole model costs tells its options, data and precision; the graph, which of its cells are there.
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
    """Return rows with the seconds of `theirs`; idle layers take none."""
    return {
        size: tuple(
            row if index in idle else row.with_times_of(other)
            for index, (row, other) in enumerate(zip(rows, theirs[size], strict=True))
        )
        for size, rows in ours.items()
    }
