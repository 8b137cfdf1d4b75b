"""A recipe's search before training: architectures, metric, and the first individual."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pipebench.cluster import Cluster
from pipebench.engine.setup import Setup
from pipebench.errors import GraphError
from pipebench.extensions.moves.planned import cuts_of
from pipebench.extensions.search.architectures import Architectures, Cells
from pipebench.extensions.search.recipe import SearchRecipe
from pipebench.extensions.search.strategy import Evolution, SearchStrategy
from pipebench.extensions.search.trace import Following, Step, steps_of
from pipebench.extensions.search.trace_file import load_trace
from pipebench.recipe.schema import Recipe
from pipebench.schedule.notation import STRAIGHT
from pipebench.train.job import Job, JobExtension
from pipebench.train.plan import choose_plan
from pipebench.train.profiled_model import ProfiledModel

NAME = "search"  # of the extension


@dataclass(frozen=True)
class SearchSetup(JobExtension):
    """The definition of a search."""

    profiles_often = True  # each architecture, at every size
    switches = True

    recipe: SearchRecipe  # how architectures are found
    architectures: Architectures
    first: Cells  # the initial architecture
    metric: str  # that scores architectures
    larger_is_better: bool  # of scores
    seed: int  # of all draws
    steps: tuple[Step, ...] | None = None  # the changes of a trace; None: evolution decides
    end_second: float | None = None  # end of a trace in seconds; None: the run's last epoch

    @classmethod
    def of(cls, recipe: Recipe, cluster: Cluster, known: ProfiledModel) -> "SearchSetup":
        """Return a recipe's search without a trace's changes, which depend on the plan.

        Raises:
            GraphError: cells that don't exist or can't be left out, or too few for `search.smallest`.
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
        """Return the first architecture."""
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
        """Yield a job under each architecture of its trace, in order, with its first cuts."""
        if self.steps is None:
            return
        yield job
        for step in self.steps:
            job = replace(job, setup=chosen(job, self.architectures.setup(job.setup, step.cells)))
            yield job

    def begin(self) -> SearchStrategy:
        """Return the search, before training."""
        first, better = self.first, self.larger_is_better
        if self.steps is not None:
            return Following(first, self.steps, larger_is_better=better)
        num_cells = len(self.architectures.cells)
        return Evolution(self.recipe, num_cells, first, larger_is_better=better, seed=self.seed)


def chosen(job: Job, setup: Setup) -> Setup:
    """Return a new architecture's setup with the memory policies that vPipe's stages choose under their cuts.

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
