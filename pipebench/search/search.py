"""A search under way: whose turn it is, when everybody's came, and what came of it."""

from collections.abc import Mapping
from typing import NamedTuple

from pipebench.recipe.search_trace import VERSION, SearchFile, Trained
from pipebench.search.architectures import Architectures
from pipebench.search.course import Individual, SearchStrategy

FILE_NAME = "search.json"


class IndividualStart(NamedTuple):
    """When an individual's turn begins: minibatches and samples of the run before it, and the run's clock."""

    minibatch: int
    samples: int
    clock_s: float


class Search:
    """A search that goes on with every evaluation.

    Args:
        course: decides whose turn it is.
        architectures: those there are.
        metric: what scores them.
    """

    def __init__(self, course: SearchStrategy, architectures: Architectures, metric: str) -> None:
        self._course, self._architectures, self._metric = course, architectures, metric
        self._begun = [IndividualStart(0, 0, 0.0)]  # by number of the individual

    @property
    def current(self) -> Individual:
        """The individual that is trained now."""
        return self._course.current

    def tell(self, metrics: Mapping[str, float], now: IndividualStart) -> None:
        """Take what an evaluation found."""
        self._course.tell(float(metrics[self._metric]), now.minibatch)
        if len(self._course.individuals) > len(self._begun):
            self._begun.append(now)

    def sentence(self) -> str:
        """Say whose turn it is."""
        it, architectures = self.current, self._architectures
        changed = ", ".join(
            f"{'+' if index in it.cells else '-'}{architectures.cells[index].name}" for index in sorted(it.changed)
        )
        how = "drawn" if it.parent is None else f"{it.parent} {changed}"
        return f"individual {it.number} ({how}): {architectures.num_layers(it.cells)} layers"

    def file(self) -> SearchFile:
        """Return the history of those that have a score."""
        names, best = self._architectures.names, self._course.best
        rows = [
            Trained(
                number=each.number, parent=each.parent, minibatch=began.minibatch, second=began.clock_s,
                samples=began.samples, cells=names(each.cells), changed=names(each.changed),
                layers=self._architectures.num_layers(each.cells), scores=[*each.scores],
            )
            for each, began in zip(self._course.individuals, self._begun, strict=True)
            if each.scores
        ]  # fmt: skip
        return SearchFile(
            VERSION,
            individuals=rows,
            metric=self._metric,
            hurdles=[*self._course.hurdles],
            best=None if best is None else best.number,
        )
