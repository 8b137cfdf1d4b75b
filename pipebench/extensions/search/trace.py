"""Architectures from a trace, one after the other."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pipebench.errors import GraphError
from pipebench.extensions.search.architectures import Architectures, Cells
from pipebench.extensions.search.strategy import Individual, SearchStrategy
from pipebench.extensions.search.trace_file import ArchitectureChange
from pipebench.model.plan import Plan


class Step(NamedTuple):
    """An architecture, and its start: a minibatch of the run, or a second of its clock."""

    minibatch: int | None
    second: float | None
    cells: Cells


def steps_of(
    events: Sequence[ArchitectureChange], architectures: Architectures, first: Cells, plan: Plan, path: str
) -> tuple[Step, ...]:
    """Return the architectures of a trace's changes, beginning with `first`; `plan` maps layers to stages.

    Raises:
        GraphError: unknown cell or stage, or too few layers to add or to delete; names `path`.
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
    """Return an architecture with more or fewer layers in a stage, changed by whole cells."""
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
    """Follows a trace, whose steps begin at minibatches: seconds are not known in advance where scores are."""

    def __init__(self, first: Cells, steps: Sequence[Step], *, larger_is_better: bool) -> None:
        super().__init__(first, larger_is_better=larger_is_better)
        self._steps = [*steps]
        self._go_on(0)

    def _go_on(self, num_minibatches: int) -> None:
        for cells in self._due(num_minibatches):
            before = self.current
            if not before.scores:  # it was never trained
                self.individuals.pop()
            self.individuals.append(Individual(len(self.individuals), None, cells, cells ^ before.cells))

    def _due(self, num_minibatches: int) -> Iterator[Cells]:
        while self._steps and self._steps[0].minibatch is not None and self._steps[0].minibatch <= num_minibatches:
            yield self._steps.pop(0).cells
