"""A recipe's search: its setup before training, and the part of the training loop that changes architectures.

An evaluation scores the individual in training, and may be followed by another individual. Checkpoints contain all
evaluations, so a resumed run continues its search. All processes have the same evaluations, so they make the same
choices without messages.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from pipebench.checkpoint.progress import SavedProgress
from pipebench.cluster import Cluster
from pipebench.engine.engine import TrainingEngine
from pipebench.engine.setup import Setup
from pipebench.errors import GraphError
from pipebench.extensions.moves.planned import cuts_of
from pipebench.extensions.search.architectures import Architectures, Cells
from pipebench.extensions.search.recipe import SearchRecipe
from pipebench.extensions.search.strategy import Evolution, Following, SearchStrategy, Step, steps_of
from pipebench.extensions.search.trace_file import VERSION, SearchFile, Trained, load_trace
from pipebench.recipe.schema import Recipe
from pipebench.schedule.notation import STRAIGHT
from pipebench.train.clock import RunClock
from pipebench.train.interfaces import LoopExtension
from pipebench.train.job import Job, JobExtension
from pipebench.train.plan import choose_plan
from pipebench.train.profiled_model import ProfiledModel
from pipebench.train.result import Point, RunResult

NAME = "search"  # of the extension


@dataclass(frozen=True)
class SearchSetup(JobExtension):
    """A job's search."""

    profiles_often = True  # each architecture, at every size
    switches = True

    recipe: SearchRecipe
    architectures: Architectures
    first: Cells  # the first individual's
    metric: str  # the score
    larger_is_better: bool  # whether larger scores are better
    seed: int  # of all draws
    steps: tuple[Step, ...] | None = None  # a trace's changes; None: evolution decides
    end_second: float | None = None  # end of a trace in seconds; None: after the run's last epoch

    @classmethod
    def of(cls, recipe: Recipe, cluster: Cluster, known: ProfiledModel) -> "SearchSetup":
        """Return a recipe's search, without the changes of a trace, since these depend on the plan.

        Raises:
            GraphError: cells don't exist, can't be left out, or are fewer than `search.smallest`.
        """
        search: SearchRecipe = getattr(recipe, NAME)
        optimizer = recipe.train.optimizer
        architectures = Architectures(known.graph, known.profile, known.dataset, optimizer, cluster, search.cells)
        if search.smallest > len(architectures.cells):
            given = f"got {search.smallest}, and the search has {len(architectures.cells)} cells"
            raise GraphError(f"search.smallest: {given}")
        change = None if search.trace is None else load_trace(search.trace).changes[0]
        if change is not None and change.minibatch == 0 and change.cells is not None:
            first = architectures.named(change.cells, f"search.trace: {search.trace}: events[0].cells")
        else:
            first = architectures.all if search.first is None else architectures.named(search.first, "search.first")
        if search.trace is None and len(first) < search.smallest:
            given = f"got {len(first)} of the cells"
            raise GraphError(f"search.first: {given}, allowed are at least search.smallest, {search.smallest}")
        target, metrics = recipe.train.target, known.dataset.metrics
        metric = search.metric or (target.metric if target is not None else next(iter(metrics), "eval_loss"))
        return cls(search, architectures, first, metric, metrics.get(metric, "min") == "max", recipe.train.seed)

    def profiled(self, known: ProfiledModel) -> ProfiledModel:
        """Return the model and its profile with the first architecture."""
        graph, profile = self.architectures.form(self.first)
        return replace(known, graph=graph, profile=profile)

    def prepared(self, setup: Setup) -> "SearchSetup":
        """Return the search with the changes of its trace, if it has one."""
        if self.recipe.trace is None:
            return self
        trace = load_trace(self.recipe.trace)
        steps = steps_of(trace.changes, self.architectures, self.first, setup.plan, str(self.recipe.trace))
        return replace(self, steps=steps, end_second=trace.end_second)

    def variants(self, job: Job) -> Iterator[Job]:
        """Yield the job with each architecture of its trace, in order, and with its first cuts."""
        if self.steps is None:
            return
        yield job
        for step in self.steps:
            job = replace(job, setup=chosen(job, self.architectures.setup(job.setup, step.cells)))
            yield job

    def begin(self) -> SearchStrategy:
        """Return the strategy, at the start of training."""
        first, better = self.first, self.larger_is_better
        if self.steps is not None:
            return Following(first, self.steps, larger_is_better=better)
        num_cells = len(self.architectures.cells)
        return Evolution(self.recipe, num_cells, first, larger_is_better=better, seed=self.seed)


def chosen(job: Job, setup: Setup) -> Setup:
    """Return the setup of a new architecture with memory policies chosen again, if the job has vPipe's.

    Cuts and depth stay (vPipe, TPDS'21, section 6.3).

    Raises:
        PlanError: a stage doesn't fit in memory under any policies.
    """
    vpipe, asked = job.recipe.parallelism.vpipe, job.recipe.parallelism
    if vpipe is None or not vpipe.policies:
        return setup
    asked = replace(asked, plan=STRAIGHT, cuts=[*cuts_of(setup.graph, setup.plan)])
    plan = choose_plan(replace(job.recipe, parallelism=asked), job.cluster, setup.graph, setup.profile, setup.dataset)
    return setup.under(replace(plan, depth=setup.plan.depth).on(setup.devices))


def search_of(job: Job) -> SearchSetup:
    """Return the search of a job that has one."""
    found = job.extensions[NAME]
    assert isinstance(found, SearchSetup)
    return found


class IndividualStart(NamedTuple):
    """When an individual's training begins."""

    minibatch: int  # minibatches of the run before
    samples: int  # samples of the run before
    clock_s: float  # the run's clock


class SearchLoop(LoopExtension):
    """Trains the individuals of a search one after the other."""

    def __init__(self, job: Job, engine: TrainingEngine, clock: RunClock, note: Callable[[str], None]) -> None:
        self._engine, self._clock, self._note = engine, clock, note
        search = search_of(job)
        self._architectures, self._metric, self._strategy = search.architectures, search.metric, search.begin()
        self._begun = [IndividualStart(0, 0, 0.0)]  # by number of the individual

    def restore(self, saved: SavedProgress) -> None:
        """Continue with the individual that follows from a checkpoint's evaluations."""
        for point in saved.points:  # the recipe may have had another period of evaluations then
            done = self._engine.setup.sampler.minibatches(point["samples"])
            self._add_score(point["metrics"], IndividualStart(done, point["samples"], point["clock_s"]))
        self._switch()

    def evaluated(self, point: Point, done: int, *, ends: bool) -> None:
        """Score the current individual, and switch to the next if there is one; `ends`: the run ends now."""
        before = self._strategy.current.number
        self._add_score(point.metrics, IndividualStart(done, point.samples, point.clock_s))
        if not ends and self._strategy.current.number > before:
            with self._clock.spending("training_s"):
                self._switch()
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

    def _switch(self) -> None:
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
        """Return the history of all individuals that have a score."""
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
