"""Evolution: which architecture is trained next, given the fitness of those before.

Everything random is a function of the seed and of the individual's number, so that a search depends on fitness alone:
whoever knows the same scores, on any engine and after any restart, trains the same individuals in the same order.

Papers: Real et al., Regularized Evolution for Image Classifier Architecture Search (AAAI'19), algorithm 1: the oldest
of the population dies. So et al., The Evolved Transformer (ICML'19), sections 3.1 and 3.2: the worst of a tournament
dies, and hurdles decide who is trained on. Differs: individuals share one set of weights, each trains on from what it
finds, as in Pham et al. (ENAS, ICML'18), so that the cells that two of them have in common are never trained twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipebench.model.sampling import mix, name_hash

OLDEST, WORST = "oldest", "worst"  # who dies when a child joins the population


@dataclass(frozen=True)
class Rules:
    """How a population evolves.

    Attributes:
        cells: how many there are to choose from.
        first: the cells of the first individual.
        population: individuals that live together.
        tournament: of them, how many are drawn for a parent to be the best of; an individual may be drawn twice.
        mutations: cells that a child has and its parent has not, or the other way round.
        smallest: the fewest cells of an individual.
        removes: who makes room for a child: `oldest`, or the `worst` of a tournament.
        hurdles: the most hurdles there will be; who gets over one is trained for one period more.
        larger_is_better: of scores.
        seed: of all draws.
    """

    cells: int
    first: frozenset[int]
    population: int
    tournament: int
    mutations: int
    smallest: int
    removes: str
    hurdles: int
    larger_is_better: bool
    seed: int


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


def fittest(among: Sequence[Individual], *, larger_is_better: bool) -> Individual | None:
    """Return the fittest of those that have a score; of equals, the first; None if nobody has one."""
    sign = -1.0 if larger_is_better else 1.0
    scored = (each for each in among if each.scores)
    return min(scored, key=lambda each: (sign * each.fitness, each.number), default=None)


class Evolution:
    """A search that goes on with every score that it is told.

    Attributes:
        individuals: all there have been; the last one is trained now.
        population: numbers of those that live, in order of birth.
        hurdles: what a score has to exceed, by the periods that were trained before.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self.individuals = [Individual(0, None, rules.first)]
        self.population: list[int] = []
        self.hurdles: list[float] = []

    @property
    def current(self) -> Individual:
        """The individual that is trained now."""
        return self.individuals[-1]

    @property
    def best(self) -> Individual | None:
        """The fittest of all that have a score; of equals, the first."""
        return fittest(self.individuals, larger_is_better=self._rules.larger_is_better)

    def tell(self, score: float, done: int) -> None:
        """Take the current individual's score after another period; it is trained on, or another one's turn comes.

        Args:
            score: that.
            done: minibatches of the run so far, which evolution doesn't ask for.
        """
        told = replace(self.current, scores=(*self.current.scores, score))
        self.individuals[-1] = told
        if self._gets_over(told):
            return
        self.population.append(told.number)
        if len(self.population) > self._rules.population:
            self.population.remove(self._dying())
        self._raise_hurdle()
        self.individuals.append(self._next(told.number + 1))

    def _gets_over(self, told: Individual) -> bool:
        """Return whether an individual is trained for one period more."""
        periods = len(told.scores)
        return periods <= len(self.hurdles) and self._better(told.fitness, self.hurdles[periods - 1])

    def _raise_hurdle(self) -> None:
        """Add a hurdle after each population's worth of individuals: the mean of those who were trained longest."""
        count = self.individuals[-1].number + 1
        longest = len(self.hurdles) + 1
        if count % self._rules.population or longest > self._rules.hurdles:
            return
        reached = [self.individuals[n].fitness for n in self.population if len(self.individuals[n].scores) == longest]
        if reached:
            self.hurdles.append(sum(reached) / len(reached))

    def _dying(self) -> int:
        """Return who makes room, once a child has joined."""
        if self._rules.removes == OLDEST:
            return self.population[0]
        drawn = self._tournament("death", len(self.individuals))
        return max(drawn, key=lambda each: (self._badness(each), -each.number)).number

    def _next(self, number: int) -> Individual:
        """Return the individual of that number: drawn freely until the population is full, then a child."""
        draws = _Draws(self._rules.seed, "cells", number)
        if number < self._rules.population:
            return Individual(number, None, self._random(draws))
        parent = fittest(self._tournament("parent", number), larger_is_better=self._rules.larger_is_better)
        assert parent is not None
        cells = set(parent.cells)
        changed: set[int] = set()
        for _ in range(self._rules.mutations):
            can_go = len(cells) > self._rules.smallest
            free = [c for c in range(self._rules.cells) if c not in changed and (can_go or c not in cells)]
            if not free:
                break
            cell = draws.one_of(free)
            changed.add(cell)
            cells ^= {cell}
        return Individual(number, parent.number, frozenset(cells), frozenset(changed))

    def _random(self, draws: "_Draws") -> frozenset[int]:
        """Return a random architecture: each cell with even chances, and more where that makes too few."""
        cells = {cell for cell in range(self._rules.cells) if draws.below(2)}
        while len(cells) < self._rules.smallest:
            cells.add(draws.one_of([cell for cell in range(self._rules.cells) if cell not in cells]))
        return frozenset(cells)

    def _tournament(self, what: str, number: int) -> list[Individual]:
        draws = _Draws(self._rules.seed, what, number)
        return [self.individuals[draws.one_of(self.population)] for _ in range(self._rules.tournament)]

    def _badness(self, each: Individual) -> float:
        return -each.fitness if self._rules.larger_is_better else each.fitness

    def _better(self, score: float, than: float) -> bool:
        return score > than if self._rules.larger_is_better else score < than


class _Draws:
    """Draws for one purpose of one individual; every call is the next."""

    def __init__(self, seed: int, what: str, number: int) -> None:
        self._key = (seed, name_hash(f"search {what}"), number)
        self._count = 0

    def below(self, bound: int) -> int:
        """Return a number from 0 to below a bound."""
        self._count += 1
        return mix(*self._key, self._count) % bound  # of 63 bits: the bias is below bound / 2^63

    def one_of(self, choices: Sequence[int]) -> int:
        """Return one of some numbers."""
        return choices[self.below(len(choices))]
