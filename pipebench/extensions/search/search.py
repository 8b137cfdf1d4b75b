"""A search in progress: the current individual, when each began, and the results."""

from collections.abc import Mapping
from typing import NamedTuple

from pipebench.extensions.search.architectures import Architectures
from pipebench.extensions.search.strategy import Individual, SearchStrategy
from pipebench.extensions.search.trace_file import VERSION, SearchFile, Trained


class IndividualStart(NamedTuple):
    """Minibatches and samples of the run before an individual, and the run's clock."""

    minibatch: int
    samples: int
    clock_s: float


class Search:
    """A search that advances with every evaluation, scored by `metric`."""

    def __init__(self, strategy: SearchStrategy, architectures: Architectures, metric: str) -> None:
        self._strategy, self._architectures, self._metric = strategy, architectures, metric
        self._begun = [IndividualStart(0, 0, 0.0)]  # by number of the individual

    @property
    def current(self) -> Individual:
        """The individual in training."""
        return self._strategy.current

    def add_score(self, metrics: Mapping[str, float], now: IndividualStart) -> None:
        """Score the current individual by an evaluation's metrics."""
        self._strategy.add_score(float(metrics[self._metric]), now.minibatch)
        if len(self._strategy.individuals) > len(self._begun):
            self._begun.append(now)

    def sentence(self) -> str:
        """Describe the current individual."""
        it, architectures = self.current, self._architectures
        changed = ", ".join(
            f"{'+' if index in it.cells else '-'}{architectures.cells[index].name}" for index in sorted(it.changed)
        )
        how = "drawn" if it.parent is None else f"{it.parent} {changed}"
        return f"individual {it.number} ({how}): {architectures.num_layers(it.cells)} layers"

    def file(self) -> SearchFile:
        """Return the history of all individuals with a score."""
        names, best = self._architectures.names, self._strategy.best
        rows = [
            Trained(
                number=each.number, parent=each.parent, minibatch=began.minibatch, second=began.clock_s,
                samples=began.samples, cells=names(each.cells), changed=names(each.changed),
                layers=self._architectures.num_layers(each.cells), scores=[*each.scores],
            )
            for each, began in zip(self._strategy.individuals, self._begun, strict=True)
            if each.scores
        ]  # fmt: skip
        return SearchFile(
            VERSION,
            individuals=rows,
            metric=self._metric,
            hurdles=[*self._strategy.hurdles],
            best=None if best is None else best.number,
        )
