"""Architectures that are decided beforehand: the changes of a trace, followed one after the other."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pipebench.errors import GraphError
from pipebench.model.plan import Plan
from pipebench.recipe.search_trace import ArchitectureChange
from pipebench.search.architectures import Architectures, Cells
from pipebench.search.course import Individual, SearchStrategy


class Step(NamedTuple):
    """From when on an architecture holds: a minibatch of the run, or a second of its clock; and the architecture."""

    minibatch: int | None
    second: float | None
    cells: Cells


def steps_of(
    events: Sequence[ArchitectureChange], architectures: Architectures, first: Cells, plan: Plan, path: str
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


def _changed(event: ArchitectureChange, architectures: Architectures, cells: Cells, plan: Plan, where: str) -> Cells:
    """Return an architecture with as many layers more, or fewer, in a stage: whole cells, until they are as many."""
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
    """Follows a trace.

    Args:
        first: the architecture to begin with.
        steps: from which minibatch on others hold, in order: where scores are told, nobody knows the second beforehand.
        larger_is_better: of scores.
    """

    def __init__(self, first: Cells, steps: Sequence[Step], *, larger_is_better: bool) -> None:
        super().__init__(first, larger_is_better=larger_is_better)
        self._steps = [*steps]
        self._go_on(0)

    def _go_on(self, num_minibatches: int) -> None:
        for cells in self._due(num_minibatches):
            before = self.current
            if not before.scores:  # it never had a turn
                self.individuals.pop()
            self.individuals.append(Individual(len(self.individuals), None, cells, cells ^ before.cells))

    def _due(self, num_minibatches: int) -> Iterator[Cells]:
        while self._steps and self._steps[0].minibatch is not None and self._steps[0].minibatch <= num_minibatches:
            yield self._steps.pop(0).cells
