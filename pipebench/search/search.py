"""A search under way: whose turn it is, when everybody's came, and what came of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pipebench.errors import GraphError
from pipebench.recipe.schema import Recipe, SearchRecipe
from pipebench.recipe.search_trace import VERSION, SearchFile, Trace, Trained, load_trace
from pipebench.search.architectures import Architectures, Cells
from pipebench.search.evolution import Evolution, Individual, Rules
from pipebench.search.trace import Following, Step

FILE_NAME = "search.json"


class Moment(NamedTuple):
    """When an individual's turn begins: minibatches and samples of the run before it, and the run's clock."""

    minibatch: int
    samples: int
    clock_s: float


class Course(Protocol):
    """What decides whose turn it is."""

    individuals: list[Individual]
    hurdles: list[float]

    @property
    def current(self) -> Individual:
        """The individual that is trained now."""

    @property
    def best(self) -> Individual | None:
        """The fittest of all that have a score."""

    def tell(self, score: float, done: int) -> None:
        """Take the current individual's score after so many minibatches of the run."""


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

    def begin(self) -> "Search":
        """Return the search, before anything is trained."""
        given = self.recipe
        if self.steps is not None:
            return Search(self, Following(self.first, self.steps, larger_is_better=self.larger_is_better))
        rules = Rules(
            cells=len(self.architectures.cells), first=self.first, population=given.population,
            tournament=given.tournament, mutations=given.mutations, smallest=given.smallest, removes=given.removes,
            hurdles=given.hurdles, larger_is_better=self.larger_is_better, seed=self.seed,
        )  # fmt: skip
        return Search(self, Evolution(rules))


class Search:
    """A search that goes on with every evaluation."""

    def __init__(self, setup: SearchSetup, course: Course) -> None:
        self._setup, self._course = setup, course
        self._begun = [Moment(0, 0, 0.0)]  # by number of the individual

    @property
    def cells(self) -> Cells:
        """What is trained now."""
        return self._course.current.cells

    @property
    def current(self) -> Individual:
        """The individual that is trained now."""
        return self._course.current

    def tell(self, metrics: Mapping[str, float], now: Moment) -> None:
        """Take what an evaluation found."""
        self._course.tell(float(metrics[self._setup.metric]), now.minibatch)
        if len(self._course.individuals) > len(self._begun):
            self._begun.append(now)

    def sentence(self) -> str:
        """Say whose turn it is."""
        it, architectures = self._course.current, self._setup.architectures
        changed = ", ".join(
            f"{'+' if index in it.cells else '-'}{architectures.cells[index].name}" for index in sorted(it.changed)
        )
        how = "drawn" if it.parent is None else f"{it.parent} {changed}"
        return f"individual {it.number} ({how}): {architectures.num_layers(it.cells)} layers"

    def file(self) -> SearchFile:
        """Return the history of those that have a score."""
        names, best = self._setup.architectures.names, self._course.best
        rows = [
            Trained(
                number=each.number, parent=each.parent, minibatch=began.minibatch, second=began.clock_s,
                samples=began.samples, cells=names(each.cells), changed=names(each.changed),
                layers=self._setup.architectures.num_layers(each.cells), scores=[*each.scores],
            )
            for each, began in zip(self._course.individuals, self._begun, strict=False)
            if each.scores
        ]  # fmt: skip
        return SearchFile(
            VERSION,
            individuals=rows,
            metric=self._setup.metric,
            hurdles=[*self._course.hurdles],
            best=None if best is None else best.number,
        )


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


def first_of(search: SearchRecipe, trace: Trace | None, architectures: Architectures) -> Cells:
    """Return the architecture that a recipe's search begins with.

    Raises:
        GraphError: it names cells that aren't there, or more are asked for than there are.
    """
    if search.smallest > len(architectures.cells):
        raise GraphError(f"search.smallest: got {search.smallest}, and the search has {len(architectures.cells)} cells")
    given = None if trace is None or trace.events[0].minibatch != 0 else trace.events[0].cells
    if given is not None:
        return architectures.named(given, f"search.trace: {search.trace}: events[0].cells")
    return architectures.all if search.first is None else architectures.named(search.first, "search.first")
