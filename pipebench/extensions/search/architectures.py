"""Architectures: a model with some of its cells, its costs and its setup.

Cuts stay, since left-out layers keep their places; graph, costs, and what stages compute, keep and send follow from the
cells.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

from pipebench.cluster import Cluster
from pipebench.engine.setup import Setup
from pipebench.errors import GraphError, nearest
from pipebench.extensions.search.cells import find_cells, named, without
from pipebench.extensions.search.costs import profile_without
from pipebench.model.graph import LayerGraph
from pipebench.profile.model import Profile
from pipebench.profile.shapes import output_forms
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
