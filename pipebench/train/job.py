"""A job: a recipe that is ready to run. And what all processes of a run must agree on."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Self

from pipebench.cluster import Cluster
from pipebench.engine.setup import Setup
from pipebench.planner.plans import Comparison
from pipebench.profile.model import Profile
from pipebench.recipe.plan_file import PlanForm
from pipebench.recipe.schema import Recipe
from pipebench.train.periods import Periods
from pipebench.train.profiled_model import ProfiledModel


class JobExtension(ABC):
    """An extension's part in a job."""

    profiles_often: ClassVar[bool] = False  # a simulation profiles many models, so of whole minibatches only
    switches: ClassVar[bool] = False  # engines must be able to switch to other setups at drains

    @classmethod
    @abstractmethod
    def of(cls, recipe: Recipe, cluster: Cluster, known: ProfiledModel) -> Self:
        """Return the extension's part in a recipe's job; `known` is the recipe's model with all its layers."""

    def profiled(self, known: ProfiledModel) -> ProfiledModel:
        """Return the model that the run begins with, given the one with all layers."""
        return known

    def prepared(self, setup: Setup) -> Self:
        """Return this part, given the setup that the run begins with."""
        return self

    def refused(self, setup: Setup) -> Iterable[tuple[str, str]]:
        """Return what the run can't do under a setup although the recipe asks for it: (key, problem)."""
        return ()

    def notes(self, setup: Setup) -> Mapping[str, str]:
        """Return notes on the run's numbers, by the fact in the summary."""
        return {}

    def variants(self, job: "Job") -> Iterable["Job"]:
        """Return the jobs that a run goes through, if they are known before it. Memory must suffice for each."""
        return ()


@dataclass(frozen=True)
class Job:
    """A recipe, ready to run."""

    recipe: Recipe
    cluster: Cluster  # with the recipe's number of servers
    setup: Setup  # that the run begins with
    comparison: Comparison | None = None  # of modes, if the recipe left the mode to the planner
    left_over: int = 0  # samples of an epoch that aren't run, if the profile has times of whole minibatches only
    extensions: Mapping[str, JobExtension] = field(default_factory=dict)  # extensions' parts, by name
    of_all_layers: Profile | None = None  # None: the setup's profile is
    began_s: float = field(default_factory=time.perf_counter)  # start of its preparation, by `time.perf_counter`
    chosen: str = ""  # what the planner chose besides the plan, to fit in memory, in words

    @property
    def profile(self) -> Profile:
        """Layer costs at every size of a unit."""
        return self.setup.profile

    @property
    def periods(self) -> Periods:
        """The run's drains."""
        return Periods.of(self.recipe.train, self.setup.sampler.minibatches_per_epoch)

    @property
    def whole_profile(self) -> Profile:
        """Layer costs of the model with all its layers."""
        return self.of_all_layers or self.profile


class Decision(NamedTuple):
    """A plan and a profile that an earlier preparation decided on, and all processes of a run must have."""

    plan: PlanForm
    profile: Profile  # for which the plan was made
    source: str  # the plan's file
