"""Architectures: a model with some of its cells, and what an engine needs to train it so.

Everything follows from which cells there are: the graph, what its layers cost, and under the cuts of a plan what stages
compute, keep and send. Cuts stay where they are, since layers that are left out keep their places.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

from pipebench.cluster import Cluster
from pipebench.engine.setup import Setup
from pipebench.errors import GraphError, nearest
from pipebench.model.cells import find_cells, named, without
from pipebench.model.graph import LayerGraph
from pipebench.profile.model import Profile
from pipebench.profile.shapes import output_forms
from pipebench.profile.without import profile_without
from pipebench.recipe.schema import OptimizerRecipe
from zoo.registry import Dataset

Cells = frozenset[int]  # positions among the cells that can be left out
_KEPT = 64  # architectures whose costs are remembered: a child's parent comes back now and then


class Architectures:
    """All architectures of a model.

    Args:
        graph: the model with all cells.
        profile: what it costs.
        dataset: what it is trained on.
        optimizer: what updates it.
        cluster: that it is trained on.
        patterns: of the qualified names of modules that can be left out, such as `cells.*`.

    Attributes:
        profile: see there.
        cells: those that the patterns name, in order of execution.
        form: returns the model with some of its cells, and what it costs.

    Raises:
        GraphError: a pattern names nothing, or what can't be left out.
        ProfileError: a layer can't be run without data, to know its output's shape.
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
        self.cells = find_cells(graph, patterns, output_forms(graph, dataset, max(profile.layers)))
        self._graph, self._dataset, self._optimizer, self._cluster = graph, dataset, optimizer, cluster
        self.form = lru_cache(_KEPT)(self._form)

    @property
    def all(self) -> Cells:
        """Every cell."""
        return frozenset(range(len(self.cells)))

    def named(self, patterns: Iterable[str], key: str) -> Cells:
        """Return the cells that some patterns name.

        Raises:
            GraphError: one names none; `key` says where it stands.
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
        """Return the names of some cells, in order of execution."""
        return [self.cells[index].name for index in sorted(cells)]

    def num_layers(self, cells: Cells) -> int:
        """Return how many layers an architecture has."""
        return sum(not layer.idle for layer in self.form(cells)[0].layers)

    def setup(self, setup: Setup, cells: Cells) -> Setup:
        """Return a setup of the model, under the cuts it has, with these cells."""
        graph, profile = self.form(cells)
        return replace(setup, graph=graph, profile=profile).under(setup.plan)

    def _form(self, cells: Cells) -> tuple[LayerGraph, Profile]:
        graph = without(self._graph, [cell for index, cell in enumerate(self.cells) if index not in cells])
        return graph, profile_without(self.profile, graph, self._dataset, self._optimizer, self._cluster)
