"""Training with a changing architecture: the next individual at every evaluation.

Scores are evaluations, which checkpoints contain and all processes know: a resumed run continues its search, and
processes need not agree.
"""

from collections.abc import Callable
from dataclasses import replace

from pipebench.checkpoint.progress import SavedProgress
from pipebench.engine.engine import TrainingEngine
from pipebench.extensions.search.search import IndividualStart
from pipebench.extensions.search.setup import search_of
from pipebench.train.clock import RunClock
from pipebench.train.interfaces import LoopExtension
from pipebench.train.job import Job
from pipebench.train.periods import Periods
from pipebench.train.result import Point, RunResult


class SearchLoop(LoopExtension):
    """Trains the individuals of a search."""

    def __init__(self, job: Job, engine: TrainingEngine, clock: RunClock, note: Callable[[str], None]) -> None:
        self._engine, self._clock, self._note = engine, clock, note
        self._periods = Periods.of(job.recipe.train, job.setup.sampler.minibatches_per_epoch)
        self._architectures = search_of(job).architectures
        self._search = search_of(job).begin()

    def restore(self, saved: SavedProgress) -> None:
        """Go on with the individual that follows these scores."""
        for index, point in enumerate(saved.points):
            done = min((index + 1) * self._periods.evaluation, self._periods.total)
            self._search.add_score(point["metrics"], IndividualStart(done, point["samples"], point["clock_s"]))
        self._take_up()

    def evaluated(self, point: Point, done: int, *, ends: bool) -> None:
        """Score the current individual; begin with the next one if it's due."""
        before = self._search.current.number
        self._search.add_score(point.metrics, IndividualStart(done, point.samples, point.clock_s))
        if not ends and self._search.current.number > before:
            with self._clock.spending("training_s"):
                self._take_up()
            self._note(self._search.sentence())

    def completed(self, result: RunResult) -> RunResult:
        """Return the result with the search's history."""
        found, sentence = self._search.file(), result.sentence
        if found.best is not None:
            best, metric = next(each for each in found.individuals if each.number == found.best), found.metric
            sentence = (
                f"{sentence}; of {len(found.individuals)} individuals number {best.number} was the fittest: {metric} "
                f"{best.scores[-1]:.4g} with {len(best.cells)} of {len(self._architectures.cells)} cells"
            )
        return replace(result, sentence=sentence, search=found)

    def _take_up(self) -> None:
        """Switch to the current individual's architecture."""
        self._engine.switch_setup(self._architectures.setup(self._engine.setup, self._search.current.cells))
