"""The file of a trace: which cells a model has from when on, written by hand or recorded by a search."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from pipebench.typed_json import Count, Seconds, Within, read_file

FILE_NAME = "search.json"
VERSION = 1


@dataclass(frozen=True)
class ArchitectureChange:
    """A change of architecture: when, and to which cells."""

    minibatch: Count | None = None  # the first one of the run with it; or
    second: Seconds | None = None  # of the run's clock: the change is made at the next drain
    cells: list[str] | None = None  # names of all cells from then on; or
    add: Count = 0  # layers to add in whole cells of the stage, in their order; or
    delete: Count = 0  # layers to delete in whole cells of the stage, in their order
    stage: Count | None = None  # for `add` and `delete`: a stage of the run's first plan


@dataclass(frozen=True)
class Trained:
    """An individual of a search."""

    number: Count  # from 0
    parent: Count | None  # number of the individual it is a mutation of
    minibatch: Count  # the first one of the run that it was trained on
    second: Seconds  # of the run's clock at the start of its training
    samples: Count  # of the run before its training
    cells: list[str]  # names of its cells
    changed: list[str]  # names of the cells that only it or only its parent has
    layers: Count  # its number of layers
    scores: list[float]  # after each period of training


@dataclass(frozen=True)
class SearchFile:
    """The file: of a trace, which has `events`, or of a recorded search, which has `individuals`."""

    pipebench_search: Annotated[int, Within(VERSION, VERSION, str(VERSION))]  # format version
    events: list[ArchitectureChange] = field(default_factory=list)
    individuals: list[Trained] = field(default_factory=list)
    end_second: Seconds | None = None  # end of a run whose trace is in seconds; None: after its last epoch
    metric: str = ""  # of the scores
    hurdles: list[float] = field(default_factory=list)  # at the end
    best: Count | None = None  # number of the fittest individual

    @property
    def changes(self) -> Sequence[ArchitectureChange]:
        """The changes of the trace or of the recorded search."""
        return self.events or [ArchitectureChange(each.minibatch, cells=each.cells) for each in self.individuals]


def load_trace(path: str) -> SearchFile:
    """Read a trace, or a recorded search as a trace.

    Raises:
        RecipeError: it can't be read, or isn't such a file; has every fault.
    """
    return read_file(SearchFile, path, _problems)


def _problems(file: SearchFile) -> Iterator[tuple[str, str]]:
    events, end_second = file.changes, file.end_second
    if not events:
        yield "events", "got none, allowed is at least one"
        return
    units = {event.second is None for event in events}
    last = -1.0
    for index, event in enumerate(events):
        where = f"events[{index}]"
        if (event.minibatch is None) == (event.second is None) or len(units) > 1:
            yield (where, "got neither, both, or not always the same of minibatch and second, allowed is one of them")
            return
        moment = event.minibatch if event.second is None else event.second
        assert moment is not None
        if moment <= last:
            yield where, f"got {moment:g} after {last:g}, allowed are moments that ascend"
        last = moment
        given = [event.cells is not None, event.add > 0, event.delete > 0]
        if sum(given) != 1:
            yield where, "allowed is exactly one of cells, add and delete"
        elif (event.stage is None) == (event.cells is None):
            yield f"{where}.stage", "is for add and delete, which need it, and not for cells"
    if end_second is not None and (events[-1].second is None or end_second <= events[-1].second):
        yield "end_second", f"got {end_second:g}, allowed is one after the last event's second, or null"
