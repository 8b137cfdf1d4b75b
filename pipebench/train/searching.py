"""Training with a changing architecture: the training loop, with the next individual at every evaluation.

Scores are evaluations, which checkpoints contain and all processes know: a resumed run continues its search, and
processes need not agree.
"""

from dataclasses import replace

from pipebench.search.search import IndividualStart
from pipebench.simulate.timeline import Timeline
from pipebench.train.checkpointing import NO_CHECKPOINTS, CheckpointPolicy, ResumePoint
from pipebench.train.interfaces import MakeEngine, OnPoint, ProgressSink
from pipebench.train.job import Job
from pipebench.train.loop import TrainingLoop
from pipebench.train.result import RunResult


def loop_for(
    job: Job,
    make_engine: MakeEngine,
    progress: ProgressSink,
    on_point: OnPoint,
    policy: CheckpointPolicy = NO_CHECKPOINTS,
) -> TrainingLoop:
    """Return a job's training loop; see `TrainingLoop`."""
    loop = TrainingLoop if job.search is None else SearchLoop
    return loop(job, make_engine, progress, on_point, policy)


class SearchLoop(TrainingLoop):
    """Trains a job whose recipe searches."""

    def __init__(
        self,
        job: Job,
        make_engine: MakeEngine,
        progress: ProgressSink,
        on_point: OnPoint,
        policy: CheckpointPolicy = NO_CHECKPOINTS,
    ) -> None:
        super().__init__(job, make_engine, progress, on_point, policy)
        assert job.search is not None
        self._asked, self._search = job.search, job.search.begin()

    def _restore(self, found: ResumePoint) -> None:
        for index, point in enumerate(found.progress.points):
            done = min((index + 1) * self._periods.evaluation, self._periods.total)
            self._search.tell(point["metrics"], IndividualStart(done, point["samples"], point["clock_s"]))
        self._take_up()
        self._job = replace(self._job, setup=self._engine.setup)
        super()._restore(found)

    def _evaluate(self) -> None:
        super()._evaluate()
        before, point = self._search.current.number, self._curves.points[-1]
        self._search.tell(point.metrics, IndividualStart(self._done, point.samples, point.clock_s))
        if self._done < self._periods.total and self._curves.reached is None and self._search.current.number > before:
            with self._clock.spending("training_s"):
                self._take_up()
            self._progress.note(self._search.sentence())

    def _take_up(self) -> None:
        """Switch to the current individual's architecture."""
        self._engine.switch_setup(self._asked.architectures.setup(self._engine.setup, self._search.current.cells))

    def _result(self, outcome: str, sentence: str, total_s: float, wall_s: float) -> tuple[RunResult, Timeline]:
        result, timeline = super()._result(outcome, sentence, total_s, wall_s)
        found = self._search.file()
        if found.best is not None:
            best, metric = next(each for each in found.individuals if each.number == found.best), found.metric
            sentence = (
                f"{sentence}; of {len(found.individuals)} individuals number {best.number} was the fittest: {metric} "
                f"{best.scores[-1]:.4g} with {len(best.cells)} of {len(self._asked.architectures.cells)} cells"
            )
        return replace(result, sentence=sentence, search=found), timeline
