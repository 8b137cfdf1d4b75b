"""Traces of architecture searches: which cells of a model there are when, decided beforehand or recorded by a run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

from pipebench.typed_json import Count, Seconds, Within, read_file

VERSION = 1


@dataclass(frozen=True)
class ArchitectureChange:
    """A change of architecture.

    Attributes:
        minibatch: of the run, from which on it holds; or
        second: of the run's clock: from the first drain after it.
        cells: the cells there are from then on, by name; or
        add, delete: how many layers more, or fewer: whole cells of a stage, in its order, until there are so many.
        stage: which stage of the run's first plan gets or loses them.
    """

    minibatch: Count | None = None
    second: Seconds | None = None
    cells: list[str] | None = None
    add: Count = 0
    delete: Count = 0
    stage: Count | None = None


@dataclass(frozen=True)
class Trained:
    """One individual of a search that was run.

    Attributes:
        number: the first is 0.
        parent: the number of the one it is a mutation of.
        minibatch: the first of the run that it was trained on.
        second: the run's clock then.
        samples: trained on before.
        cells: the cells it has, by name.
        changed: those of them that its parent lacks, and those that its parent has and it lacks.
        layers: how many it has.
        scores: after every period that it was trained for.
    """

    number: Count
    parent: Count | None
    minibatch: Count
    second: Seconds
    samples: Count
    cells: list[str]
    changed: list[str]
    layers: Count
    scores: list[float]


@dataclass(frozen=True)
class SearchFile:
    """The file of a trace, `events`, or of a search that was run, `individuals`.

    Attributes:
        pipebench_search: the version of its form.
        end_second: of a trace in seconds: when the run ends, if not with its last epoch.
        metric: what scores are.
        hurdles: that there were in the end.
        best: the number of the fittest individual.
    """

    pipebench_search: Annotated[int, Within(VERSION, VERSION, str(VERSION))]
    events: list[ArchitectureChange] = field(default_factory=list)
    individuals: list[Trained] = field(default_factory=list)
    end_second: Seconds | None = None
    metric: str = ""
    hurdles: list[float] = field(default_factory=list)
    best: Count | None = None

    @property
    def changes(self) -> Sequence[ArchitectureChange]:
        """The trace's, or those that the search made."""
        return self.events or [ArchitectureChange(each.minibatch, cells=each.cells) for each in self.individuals]


class Trace(NamedTuple):
    """Changes decided beforehand, and when the run ends; None for its last epoch."""

    events: Sequence[ArchitectureChange]
    end_second: float | None


def load_trace(path: str) -> Trace:
    """Read a trace, or the history of a search as one.

    Raises:
        RecipeError: it can't be read, or isn't one; says what is wrong with it.
    """
    found = read_file(SearchFile, path, _problems)
    return Trace(found.changes, found.end_second)


def _problems(file: SearchFile) -> Iterator[tuple[str, str]]:
    events, end_second = file.changes, file.end_second
    if not events:
        yield "events", "got none, allowed is at least one"
    units = {event.second is None for event in events}
    last = -1.0
    for index, event in enumerate(events):
        where = f"events[{index}]"
        if (event.minibatch is None) == (event.second is None) or len(units) > 1:
            yield (
                where,
                "got neither, both, or not always the same of minibatch and second, allowed is one of them",
            )
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
