"""Training with a changing architecture: the next individual at every evaluation.

Scores are evaluations, which checkpoints contain and all processes know: a resumed run continues its search, and
processes need not agree.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from pipebench.checkpoint.progress import SavedProgress
from pipebench.engine.engine import TrainingEngine
from pipebench.extensions.search.setup import search_of
from pipebench.extensions.search.trace_file import VERSION, SearchFile, Trained
from pipebench.train.clock import RunClock
from pipebench.train.interfaces import LoopExtension
from pipebench.train.job import Job
from pipebench.train.result import Point, RunResult


class IndividualStart(NamedTuple):
    """Minibatches and samples of the run before an individual, and the run's clock."""

    minibatch: int
    samples: int
    clock_s: float


class SearchLoop(LoopExtension):
    """Trains the individuals of a search."""

    def __init__(self, job: Job, engine: TrainingEngine, clock: RunClock, note: Callable[[str], None]) -> None:
        self._engine, self._clock, self._note = engine, clock, note
        search = search_of(job)
        self._architectures, self._metric, self._strategy = search.architectures, search.metric, search.begin()
        self._begun = [IndividualStart(0, 0, 0.0)]  # by number of the individual

    def restore(self, saved: SavedProgress) -> None:
        """Continue with the individual that follows these scores."""
        for point in saved.points:  # whatever the recipe's period was then
            done = self._engine.setup.sampler.minibatches(point["samples"])
            self._add_score(point["metrics"], IndividualStart(done, point["samples"], point["clock_s"]))
        self._take_up()

    def evaluated(self, point: Point, done: int, *, ends: bool) -> None:
        """Score the current individual; begin with the next one if it's due."""
        before = self._strategy.current.number
        self._add_score(point.metrics, IndividualStart(done, point.samples, point.clock_s))
        if not ends and self._strategy.current.number > before:
            with self._clock.spending("training_s"):
                self._take_up()
            self._note(self._sentence())

    def completed(self, result: RunResult) -> RunResult:
        """Return the result with the search's history."""
        found, sentence = self._file(), result.sentence
        if found.best is not None:
            best, metric = next(each for each in found.individuals if each.number == found.best), found.metric
            sentence = (
                f"{sentence}; of {len(found.individuals)} individuals number {best.number} was the fittest: {metric} "
                f"{best.scores[-1]:.4g} with {len(best.cells)} of {len(self._architectures.cells)} cells"
            )
        return replace(result, sentence=sentence, search=found)

    def _take_up(self) -> None:
        """Switch to the current individual's architecture."""
        self._engine.switch_setup(self._architectures.setup(self._engine.setup, self._strategy.current.cells))

    def _add_score(self, metrics: Mapping[str, float], now: IndividualStart) -> None:
        """Score the current individual by an evaluation's metrics."""
        self._strategy.add_score(float(metrics[self._metric]), now.minibatch)
        if len(self._strategy.individuals) > len(self._begun):
            self._begun.append(now)

    def _sentence(self) -> str:
        it, architectures = self._strategy.current, self._architectures
        changed = ", ".join(
            f"{'+' if index in it.cells else '-'}{architectures.cells[index].name}" for index in sorted(it.changed)
        )
        how = "drawn" if it.parent is None else f"{it.parent} {changed}"
        return f"individual {it.number} ({how}): {architectures.num_layers(it.cells)} layers"

    def _file(self) -> SearchFile:
        """Return the history of all individuals with a score."""
        names, best = self._architectures.names, self._strategy.best
        rows = [
            Trained(
                number=each.number, parent=each.parent, minibatch=began.minibatch, second=began.clock_s,
                samples=began.samples, cells=names(each.cells), changed=names(each.changed),
                layers=self._architectures.num_layers(each.cells), scores=[*each.scores],
            )
            for each, began in zip(self._strategy.individuals, self._begun, strict=True)
            if each.scores
        ]  # fmt: skip
        return SearchFile(
            VERSION,
            individuals=rows,
            metric=self._metric,
            hurdles=[*self._strategy.hurdles],
            best=None if best is None else best.number,
        )
