"""What a recipe's search comes to before anything is trained: its architectures, its scores, and how it begins."""

from collections.abc import Mapping
from dataclasses import dataclass

from pipebench.errors import GraphError
from pipebench.recipe.schema import Recipe, SearchRecipe
from pipebench.recipe.search_trace import Trace, load_trace
from pipebench.search.architectures import Architectures, Cells
from pipebench.search.evolution import Evolution, Rules
from pipebench.search.search import Search
from pipebench.search.trace import Following, Step


@dataclass(frozen=True)
class SearchSetup:
    """What a search needs to know.

    Attributes:
        recipe: how architectures are found.
        architectures: those there are.
        first: the one to begin with.
        metric: what scores them.
        larger_is_better: of scores.
        seed: of all draws.
        steps: the changes of a trace; None: evolution decides.
        end_second: when a trace in seconds ends; None: with the run's last epoch.
    """

    recipe: SearchRecipe
    architectures: Architectures
    first: Cells
    metric: str
    larger_is_better: bool
    seed: int
    steps: tuple[Step, ...] | None = None
    end_second: float | None = None

    def begin(self) -> Search:
        """Return the search, before anything is trained."""
        given = self.recipe
        if self.steps is not None:
            following = Following(self.first, self.steps, larger_is_better=self.larger_is_better)
            return Search(following, self.architectures, self.metric)
        rules = Rules(
            num_cells=len(self.architectures.cells), first=self.first, population=given.population,
            tournament=given.tournament, mutations=given.mutations, smallest=given.smallest, removes=given.removes,
            hurdles=given.hurdles, larger_is_better=self.larger_is_better, seed=self.seed,
        )  # fmt: skip
        return Search(Evolution(rules), self.architectures, self.metric)


def metric_of(recipe: Recipe, metrics: Mapping[str, str]) -> tuple[str, bool]:
    """Return what a recipe's search is scored by, and whether more of it is better.

    Args:
        recipe: has a search.
        metrics: of the data set, with their directions.
    """
    assert recipe.search is not None
    target = recipe.train.target
    name = recipe.search.metric or (target.metric if target is not None else next(iter(metrics), "eval_loss"))
    return name, metrics.get(name, "min") == "max"


def trace_of(search: SearchRecipe) -> Trace | None:
    """Return a recipe's trace; None if evolution decides."""
    return None if search.trace is None else load_trace(search.trace)


def check_smallest(search: SearchRecipe, architectures: Architectures) -> None:
    """Refuse a search for more cells than there are.

    Raises:
        GraphError: says how many there are.
    """
    if search.smallest > len(architectures.cells):
        raise GraphError(f"search.smallest: got {search.smallest}, and the search has {len(architectures.cells)} cells")


def first_of(search: SearchRecipe, trace: Trace | None, architectures: Architectures) -> Cells:
    """Return the architecture that a recipe's search begins with.

    Raises:
        GraphError: it names cells that aren't there.
    """
    given = None if trace is None or trace.events[0].minibatch != 0 else trace.events[0].cells
    if given is not None:
        return architectures.named(given, f"search.trace: {search.trace}: events[0].cells")
    return architectures.all if search.first is None else architectures.named(search.first, "search.first")
