"""Search strategies: individuals in the order of training."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Individual:
    """One trained architecture."""

    number: int  # in order of training, from 0
    parent: int | None  # number of the individual it is a mutation of; None: a first one
    cells: frozenset[int]
    changed: frozenset[int] = frozenset()  # cells that differ from the parent's
    scores: tuple[float, ...] = ()  # one per training period

    @property
    def fitness(self) -> float:
        """The score after its last period."""
        return self.scores[-1]


class SearchStrategy(ABC):
    """Decides which individual is trained, beginning with the cells `first`."""

    def __init__(self, first: frozenset[int], *, larger_is_better: bool) -> None:
        self.individuals = [Individual(0, None, first)]  # the last one is in training
        # The score to exceed for another period, by the number of periods before; none in a trace.
        self.hurdles: list[float] = []
        self._sign = 1.0 if larger_is_better else -1.0

    @property
    def current(self) -> Individual:
        """The individual in training."""
        return self.individuals[-1]

    @property
    def best(self) -> Individual | None:
        """The fittest individual with a score, of equals the first, or None."""
        return self._fittest(each for each in self.individuals if each.scores)

    def add_score(self, score: float, num_minibatches: int) -> None:
        """Add the current individual's score; it is trained on, or the next one begins.

        `num_minibatches` are those of the run so far.
        """
        self.individuals[-1] = replace(self.current, scores=(*self.current.scores, score))
        self._go_on(num_minibatches)

    @abstractmethod
    def _go_on(self, num_minibatches: int) -> None:
        """Add the next individual if the current one has ended after `num_minibatches` of the run."""

    def _fittest(self, among: Iterable[Individual]) -> Individual | None:
        """Return the fittest of individuals with scores; of equals, the first."""
        return max(among, key=lambda each: (self._sign * each.fitness, -each.number), default=None)
