"""Search strategies: which architecture is trained next, from a trace or by evolution."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pipebench.errors import GraphError
from pipebench.extensions.search.architectures import Architectures, Cells
from pipebench.extensions.search.recipe import OLDEST, SearchRecipe
from pipebench.extensions.search.trace_file import ArchitectureChange
from pipebench.model.plan import Plan
from pipebench.model.sampling import mix, name_hash


@dataclass(frozen=True)
class Individual:
    """One trained architecture."""

    number: int  # in order of training, from 0
    parent: int | None  # number of the individual that it is a mutation of; None: drawn, given, or of a trace
    cells: Cells
    changed: Cells = frozenset()  # cells that only it or only its parent has
    scores: tuple[float, ...] = ()  # after each period of its training

    @property
    def fitness(self) -> float:
        """The score after its last period."""
        return self.scores[-1]


class SearchStrategy(ABC):
    """Decides which individual is trained next; the first one has the cells `first`."""

    def __init__(self, first: Cells, *, larger_is_better: bool) -> None:
        self.individuals = [Individual(0, None, first)]  # the last one is in training
        self.hurdles: list[float] = []  # hurdle i: the score to exceed after i + 1 periods; none in a trace
        self._sign = 1.0 if larger_is_better else -1.0

    @property
    def current(self) -> Individual:
        """The individual in training."""
        return self.individuals[-1]

    @property
    def best(self) -> Individual | None:
        """The fittest individual that has a score, the first of equals; None if there is none."""
        return self._fittest(each for each in self.individuals if each.scores)

    def add_score(self, score: float, num_minibatches: int) -> None:
        """Add the current individual's score; add the next individual, if its training is over.

        `num_minibatches` are those of the run so far.
        """
        self.individuals[-1] = replace(self.current, scores=(*self.current.scores, score))
        self._go_on(num_minibatches)

    @abstractmethod
    def _go_on(self, num_minibatches: int) -> None:
        """Add the next individual, if the training of the current one is over after `num_minibatches` of the run."""

    def _fittest(self, among: Iterable[Individual]) -> Individual | None:
        """Return the fittest of individuals that have scores, the first of equals, or None."""
        return max(among, key=lambda each: (self._sign * each.fitness, -each.number), default=None)


class Evolution(SearchStrategy):
    """Evolution with tournaments, one individual after the other.

    Draws are functions of the seed and the individual's number. So a search depends on the scores alone: the same
    scores, on any engine and after any restart, give the same individuals in the same order.

    Papers: Real et al., Regularized Evolution for Image Classifier Architecture Search (AAAI'19), algorithm 1: the
    oldest of the population dies. So et al., The Evolved Transformer (ICML'19), sections 3.1 and 3.2: the worst of a
    tournament dies, and hurdles decide which individuals train on. Differs: individuals share one set of weights and
    continue from its current state, as in Pham et al. (ENAS, ICML'18), so cells common to two of them are trained by
    both.

    Args:
        rules: the recipe's section.
        num_cells: cells that can be left out.
        first: the first individual's cells.
        larger_is_better: whether larger scores are better.
        seed: of all draws.
    """

    def __init__(self, rules: SearchRecipe, num_cells: int, first: Cells, *, larger_is_better: bool, seed: int) -> None:
        super().__init__(first, larger_is_better=larger_is_better)
        self._rules, self._cells, self._seed = rules, range(num_cells), seed
        self.population: list[int] = []  # numbers of the living, in order of birth

    def _go_on(self, num_minibatches: int) -> None:
        scored = self.current
        if self._passes_hurdle(scored):
            return
        self.population.append(scored.number)
        if len(self.population) > self._rules.population:
            self.population.remove(self._replaced())
        self._raise_hurdle()
        number = scored.number + 1
        self.individuals.append(self._drawn(number) if number < self._rules.population else self._child(number))

    def _passes_hurdle(self, scored: Individual) -> bool:
        """Return whether an individual is trained for another period."""
        num_periods = len(scored.scores)
        if num_periods > len(self.hurdles):
            return False
        return self._sign * scored.fitness > self._sign * self.hurdles[num_periods - 1]

    def _raise_hurdle(self) -> None:
        """Add a hurdle whenever as many individuals as a population has are done.

        It is the mean fitness of the living that have been trained for the most periods.
        """
        num_periods = len(self.hurdles) + 1
        if len(self.individuals) % self._rules.population or num_periods > self._rules.hurdles:
            return
        living = [self.individuals[number] for number in self.population]
        reached = [each.fitness for each in living if len(each.scores) == num_periods]
        if reached:
            self.hurdles.append(sum(reached) / len(reached))

    def _replaced(self) -> int:
        """Return the number of the individual that leaves the population."""
        if self._rules.removes == OLDEST:
            return self.population[0]
        drawn = self._tournament("death", len(self.individuals))
        return min(drawn, key=lambda each: (self._sign * each.fitness, each.number)).number

    def _drawn(self, number: int) -> Individual:
        """Draw an individual of the first population: each cell with probability 1/2, and more if they are too few."""
        draws = self._draws("cells", number)
        cells = {cell for cell in self._cells if draws.below(2)}
        while len(cells) < self._rules.smallest:
            cells.add(draws.one_of([cell for cell in self._cells if cell not in cells]))
        return Individual(number, None, frozenset(cells))

    def _child(self, number: int) -> Individual:
        """Return a mutation of the fittest of a tournament."""
        parent = self._fittest(self._tournament("parent", number))
        assert parent is not None  # all of the population have a score
        changed = self._mutated(parent.cells, self._draws("cells", number))
        return Individual(number, parent.number, parent.cells ^ changed, changed)

    def _mutated(self, parent: Cells, draws: "_RandomSequence") -> Cells:
        """Draw the cells by which a child differs from its parent."""
        cells, changed = set(parent), set[int]()
        for _ in range(self._rules.mutations):
            can_go = len(cells) > self._rules.smallest
            free = [cell for cell in self._cells if cell not in changed and (can_go or cell not in cells)]
            if not free:
                break
            cell = draws.one_of(free)
            changed.add(cell)
            cells ^= {cell}
        return frozenset(changed)

    def _tournament(self, what: str, number: int) -> list[Individual]:
        """Draw individuals from the population with replacement, for the purpose `what`."""
        draws = self._draws(what, number)
        return [self.individuals[draws.one_of(self.population)] for _ in range(self._rules.tournament)]

    def _draws(self, what: str, number: int) -> "_RandomSequence":
        return _RandomSequence(self._seed, what, number)


class _RandomSequence:
    """A sequence of draws for one purpose of one individual."""

    def __init__(self, seed: int, what: str, number: int) -> None:
        self._key = (seed, name_hash(f"search {what}"), number)
        self._count = 0

    def below(self, bound: int) -> int:
        """Return a number in [0, bound)."""
        self._count += 1
        return mix(*self._key, self._count) % bound  # `mix` has 63 bits, so the bias is below bound / 2^63

    def one_of(self, choices: Sequence[int]) -> int:
        """Return one of the choices."""
        return choices[self.below(len(choices))]


class Step(NamedTuple):
    """An architecture, and when it begins: at a minibatch of the run, or at a second of its clock."""

    minibatch: int | None
    second: float | None
    cells: Cells


def steps_of(
    events: Sequence[ArchitectureChange], architectures: Architectures, first: Cells, plan: Plan, path: str
) -> tuple[Step, ...]:
    """Return the architectures of a trace.

    Args:
        events: the trace's changes.
        architectures: of the model.
        first: the architecture before the first change.
        plan: says which layers are in the stage that a change names.
        path: the trace's file, for errors.

    Raises:
        GraphError: unknown cell or stage, or too few layers to add or to delete.
    """
    cells, found = first, []
    for index, event in enumerate(events):
        where = f"search.trace: {path}: events[{index}]"
        if event.cells is not None:
            cells = architectures.named(event.cells, f"{where}.cells")
        else:
            cells = _changed(event, architectures, cells, plan, where)
        found.append(Step(event.minibatch, event.second, cells))
    return tuple(found)


def _changed(event: ArchitectureChange, architectures: Architectures, cells: Cells, plan: Plan, where: str) -> Cells:
    """Return the architecture after a change that adds layers to a stage, or deletes some, by whole cells."""
    assert event.stage is not None
    if event.stage >= len(plan.stages):
        raise GraphError(f"{where}.stage: got {event.stage}, allowed are 0 to {len(plan.stages) - 1}")
    stage, wanted = plan.stages[event.stage], event.add or event.delete
    changed, num_changed = set(), 0
    for index, cell in enumerate(architectures.cells):
        is_own = stage.start <= cell.layers[0] and cell.layers[-1] < stage.stop
        if num_changed < wanted and is_own and (index in cells) is not (event.add > 0):
            changed.add(index)
            num_changed += len(cell.layers)
    if num_changed < wanted:
        what = "left out" if event.add else "there"
        raise GraphError(
            f"{where}: got {wanted} layers to {'add' if event.add else 'delete'}, and the cells of stage {event.stage} "
            f"that are {what} have {num_changed}"
        )
    return cells ^ changed


class Following(SearchStrategy):
    """Follows a trace whose steps begin at minibatches; steps at seconds are for simulations only."""

    def __init__(self, first: Cells, steps: Sequence[Step], *, larger_is_better: bool) -> None:
        super().__init__(first, larger_is_better=larger_is_better)
        self._steps = [*steps]
        self._go_on(0)

    def _go_on(self, num_minibatches: int) -> None:
        while self._steps and self._steps[0].minibatch is not None and self._steps[0].minibatch <= num_minibatches:
            before, cells = self.current, self._steps.pop(0).cells
            if not before.scores:  # replaced before its first minibatch
                self.individuals.pop()
            self.individuals.append(Individual(len(self.individuals), None, cells, cells ^ before.cells))
