"""A recipe's search before training: architectures, metric, and the first individual."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pipebench.errors import GraphError
from pipebench.model.plan import Plan
from pipebench.recipe.schema import Recipe, SearchRecipe
from pipebench.recipe.search_trace import load_trace
from pipebench.search.architectures import Architectures, Cells
from pipebench.search.evolution import Evolution, Rules
from pipebench.search.search import Search
from pipebench.search.trace import Following, Step, steps_of


@dataclass(frozen=True)
class SearchSetup:
    """The definition of a search."""

    recipe: SearchRecipe  # how architectures are found
    architectures: Architectures
    first: Cells  # the initial architecture
    metric: str  # that scores architectures
    larger_is_better: bool  # of scores
    seed: int  # of all draws
    steps: tuple[Step, ...] | None = None  # the changes of a trace; None: evolution decides
    end_second: float | None = None  # end of a trace in seconds; None: the run's last epoch

    def with_trace(self, plan: Plan) -> "SearchSetup":
        """Return the search with the changes of its trace, if it has one, under a plan.

        Raises:
            GraphError: see `steps_of`.
        """
        if self.recipe.trace is None:
            return self
        trace = load_trace(self.recipe.trace)
        steps = steps_of(trace.events, self.architectures, self.first, plan, str(self.recipe.trace))
        return replace(self, steps=steps, end_second=trace.end_second)

    def begin(self) -> Search:
        """Return the search, before training."""
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


def search_setup(recipe: Recipe, architectures: Architectures, metrics: Mapping[str, str]) -> SearchSetup:
    """Return a recipe's search, without a trace's changes, which depend on the plan.

    `metrics` are the data set's, with their directions.

    Raises:
        GraphError: the first architecture has unknown cells, or there are fewer cells than `search.smallest`.
    """
    search, target = recipe.search, recipe.train.target
    assert search is not None
    if search.smallest > len(architectures.cells):
        raise GraphError(f"search.smallest: got {search.smallest}, and the search has {len(architectures.cells)} cells")
    change = None if search.trace is None else load_trace(search.trace).events[0]
    if change is not None and change.minibatch == 0 and change.cells is not None:
        first = architectures.named(change.cells, f"search.trace: {search.trace}: events[0].cells")
    else:
        first = architectures.all if search.first is None else architectures.named(search.first, "search.first")
    metric = search.metric or (target.metric if target is not None else next(iter(metrics), "eval_loss"))
    return SearchSetup(search, architectures, first, metric, metrics.get(metric, "min") == "max", recipe.train.seed)
