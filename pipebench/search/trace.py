"""Architectures that are decided beforehand: the changes of a trace, followed one after the other."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from pipebench.errors import GraphError
from pipebench.model.plan import Plan
from pipebench.recipe.search_trace import Event
from pipebench.search.architectures import Architectures, Cells
from pipebench.search.evolution import Individual, fittest


class Step(NamedTuple):
    """From when on an architecture holds: a minibatch of the run, or a second of its clock; and the architecture."""

    minibatch: int | None
    second: float | None
    cells: Cells


def steps_of(
    events: Sequence[Event], architectures: Architectures, first: Cells, plan: Plan, path: str
) -> tuple[Step, ...]:
    """Return what a trace's changes come to, from the first architecture on.

    Args:
        events: the trace's, in order.
        architectures: those there are.
        first: the one to begin with.
        plan: tells which layers are of which stage.
        path: the trace's file.

    Raises:
        GraphError: a cell or a stage isn't there, or has not so many layers to add or to delete.
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


def _changed(event: Event, architectures: Architectures, cells: Cells, plan: Plan, where: str) -> Cells:
    """Return an architecture with as many layers more, or fewer, in a stage: whole cells, until they are as many."""
    assert event.stage is not None
    if event.stage >= len(plan.stages):
        raise GraphError(f"{where}.stage: got {event.stage}, allowed are 0 to {len(plan.stages) - 1}")
    own, wanted, missing = plan.stages[event.stage], event.add or event.delete, event.add or event.delete
    changed = set()
    for index, cell in enumerate(architectures.cells):
        is_there = own.start <= cell.layers[0] and cell.layers[-1] < own.stop
        if missing > 0 and is_there and (index in cells) is not (event.add > 0):
            changed.add(index)
            missing -= len(cell.layers)
    if missing > 0:
        what = "left out" if event.add else "there"
        raise GraphError(
            f"{where}: got {wanted} layers to {'add' if event.add else 'delete'}, and the cells of stage {event.stage} "
            f"that are {what} have {wanted - missing}"
        )
    return cells ^ changed


class Following:
    """Follows a trace, with what `Evolution` has to show.

    Attributes:
        individuals: all there have been; the last one is trained now.
        hurdles: there are none.
    """

    def __init__(self, first: Cells, steps: Sequence[Step], *, larger_is_better: bool) -> None:
        self._steps, self._larger_is_better = [*steps], larger_is_better
        self.individuals = [Individual(0, None, first)]
        self.hurdles: list[float] = []
        self._follow(0)

    @property
    def current(self) -> Individual:
        """The individual that is trained now."""
        return self.individuals[-1]

    @property
    def best(self) -> Individual | None:
        """The fittest of all that have a score; of equals, the first."""
        return fittest(self.individuals, larger_is_better=self._larger_is_better)

    def tell(self, score: float, done: int) -> None:
        """Take the current individual's score after so many minibatches of the run."""
        self.individuals[-1] = replace(self.current, scores=(*self.current.scores, score))
        self._follow(done)

    def _follow(self, done: int) -> None:
        for cells in self._due(done):
            before = self.current
            if not before.scores:  # it never had a turn
                self.individuals.pop()
            self.individuals.append(Individual(len(self.individuals), None, cells, cells ^ before.cells))

    def _due(self, done: int) -> Iterator[Cells]:
        while self._steps and self._steps[0].minibatch is not None and self._steps[0].minibatch <= done:
            yield self._steps.pop(0).cells
