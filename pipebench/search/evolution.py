"""Evolution: which architecture is trained next, given the fitness of those before.

Everything random is a function of the seed and of the individual's number, so that a search depends on fitness alone:
whoever knows the same scores, on any engine and after any restart, trains the same individuals in the same order.

Papers: Real et al., Regularized Evolution for Image Classifier Architecture Search (AAAI'19), algorithm 1: the oldest
of the population dies. So et al., The Evolved Transformer (ICML'19), sections 3.1 and 3.2: the worst of a tournament
dies, and hurdles decide who is trained on. Differs: individuals share one set of weights, each trains on from what it
finds, as in Pham et al. (ENAS, ICML'18), so that cells that two of them have in common are trained by both.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pipebench.model.sampling import mix, name_hash
from pipebench.recipe.schema import OLDEST
from pipebench.search.course import Individual, SearchStrategy


@dataclass(frozen=True)
class Rules:
    """How a population evolves.

    Attributes:
        num_cells: how many there are to choose from.
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

    num_cells: int
    first: frozenset[int]
    population: int
    tournament: int
    mutations: int
    smallest: int
    removes: str
    hurdles: int
    larger_is_better: bool
    seed: int


class Evolution(SearchStrategy):
    """A search that goes on with every score that it is told.

    Attributes:
        population: numbers of those that live, in order of birth.
    """

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules.first, larger_is_better=rules.larger_is_better)
        self._rules = rules
        self.population: list[int] = []

    def _go_on(self, num_minibatches: int) -> None:
        told = self.current
        if self._gets_over(told):
            return
        self.population.append(told.number)
        if len(self.population) > self._rules.population:
            self.population.remove(self._dying())
        self._raise_hurdle()
        number = told.number + 1
        self.individuals.append(self._drawn(number) if number < self._rules.population else self._child(number))

    def _gets_over(self, told: Individual) -> bool:
        """Return whether an individual is trained for one period more."""
        num_periods = len(told.scores)
        if num_periods > len(self.hurdles):
            return False
        return self._sign * told.fitness > self._sign * self.hurdles[num_periods - 1]

    def _raise_hurdle(self) -> None:
        """Add a hurdle after each population's worth of individuals: the mean of those who were trained longest."""
        num_periods = len(self.hurdles) + 1
        if len(self.individuals) % self._rules.population or num_periods > self._rules.hurdles:
            return
        living = [self.individuals[number] for number in self.population]
        reached = [each.fitness for each in living if len(each.scores) == num_periods]
        if reached:
            self.hurdles.append(sum(reached) / len(reached))

    def _dying(self) -> int:
        """Return who makes room, once a child has joined."""
        if self._rules.removes == OLDEST:
            return self.population[0]
        drawn = self._tournament("death", len(self.individuals))
        return min(drawn, key=lambda each: (self._sign * each.fitness, each.number)).number

    def _drawn(self, number: int) -> Individual:
        """Return an individual of the first population: each cell with even chances, more where that makes too few."""
        draws, every = self._draws("cells", number), range(self._rules.num_cells)
        cells = {cell for cell in every if draws.below(2)}
        while len(cells) < self._rules.smallest:
            cells.add(draws.one_of([cell for cell in every if cell not in cells]))
        return Individual(number, None, frozenset(cells))

    def _child(self, number: int) -> Individual:
        """Return a mutation of the fittest of a tournament."""
        parent = self._fittest(self._tournament("parent", number))
        assert parent is not None  # everybody in the population has a score
        changed = self._mutated(parent.cells, self._draws("cells", number))
        return Individual(number, parent.number, parent.cells ^ changed, changed)

    def _mutated(self, parent: frozenset[int], draws: "_Draws") -> frozenset[int]:
        """Return the cells that a child has and its parent has not, or the other way round; each changes once."""
        cells, changed = set(parent), set[int]()
        for _ in range(self._rules.mutations):
            can_go = len(cells) > self._rules.smallest
            unchanged = (cell for cell in range(self._rules.num_cells) if cell not in changed)
            free = [cell for cell in unchanged if can_go or cell not in cells]
            if not free:
                break
            cell = draws.one_of(free)
            changed.add(cell)
            cells ^= {cell}
        return frozenset(changed)

    def _tournament(self, what: str, number: int) -> list[Individual]:
        """Return individuals drawn from the population for a purpose; one may be drawn twice."""
        draws = self._draws(what, number)
        return [self.individuals[draws.one_of(self.population)] for _ in range(self._rules.tournament)]

    def _draws(self, what: str, number: int) -> "_Draws":
        return _Draws(self._rules.seed, what, number)


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
