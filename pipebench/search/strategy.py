"""The individuals of a search in the order in which they are trained, whatever decides which comes next."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Individual:
    """One architecture that was trained, or is.

    Attributes:
        number: the first is 0; they are trained in this order.
        parent: the number of the one it is a mutation of; None where it began with the search.
        cells: those that are active.
        changed: those that tell it from its parent.
        scores: its score after every period that it was trained for.
    """

    number: int
    parent: int | None
    cells: frozenset[int]
    changed: frozenset[int] = frozenset()
    scores: tuple[float, ...] = ()

    @property
    def fitness(self) -> float:
        """The score after its last period."""
        return self.scores[-1]


class SearchStrategy(ABC):
    """What decides whose turn it is.

    Args:
        first: the cells of the first individual.
        larger_is_better: of scores.

    Attributes:
        individuals: all there have been; the last one is trained now.
        hurdles: what a score has to exceed for a period more, by the periods that were trained before; none in a trace.
    """

    def __init__(self, first: frozenset[int], *, larger_is_better: bool) -> None:
        self.individuals = [Individual(0, None, first)]
        self.hurdles: list[float] = []
        self._sign = 1.0 if larger_is_better else -1.0

    @property
    def current(self) -> Individual:
        """The individual that is trained now."""
        return self.individuals[-1]

    @property
    def best(self) -> Individual | None:
        """The fittest of all that have a score; of equals, the first; None if nobody has one."""
        return self._fittest(each for each in self.individuals if each.scores)

    def tell(self, score: float, num_minibatches: int) -> None:
        """Take the current individual's score after another period; it is trained on, or another one's turn comes.

        Args:
            score: what the evaluation found.
            num_minibatches: of the run so far.
        """
        self.individuals[-1] = replace(self.current, scores=(*self.current.scores, score))
        self._go_on(num_minibatches)

    @abstractmethod
    def _go_on(self, num_minibatches: int) -> None:
        """Add the individual whose turn comes after so many minibatches of the run, if it is another one's."""

    def _fittest(self, among: Iterable[Individual]) -> Individual | None:
        """Return the fittest of some that have scores; of equals, the first."""
        return max(among, key=lambda each: (self._sign * each.fitness, -each.number), default=None)
