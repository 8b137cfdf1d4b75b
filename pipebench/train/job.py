"""A recipe that is ready to run, and what all its processes must agree on."""

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
from pipebench.train.profiled_model import ProfiledModel


class JobExtension(ABC):
    """An extension's part in a job."""

    profiles_often: ClassVar[bool] = False  # whether a simulation profiles many models: then of whole minibatches only
    switches: ClassVar[bool] = False  # whether engines must be able to switch to other setups at drains

    @classmethod
    @abstractmethod
    def of(cls, recipe: Recipe, cluster: Cluster, known: ProfiledModel) -> Self:
        """Return the part in a recipe's job; `known` is its whole model."""

    def profiled(self, known: ProfiledModel) -> ProfiledModel:
        """Return the model that the run begins with."""
        return known

    def prepared(self, setup: Setup) -> Self:
        """Return the part under the setup that the run begins with."""
        return self

    def refused(self, setup: Setup) -> Iterable[tuple[str, str]]:
        """Return key and problem of what a recipe asks for and its run can't come to, under that setup."""
        return ()

    def notes(self, setup: Setup) -> Mapping[str, str]:
        """Return notes on a recipe's numbers, by the fact in the summary."""
        return {}

    def variants(self, job: "Job") -> Iterable["Job"]:
        """Return the jobs that a run goes through, if they are known before it: memory must suffice for each."""
        return ()


@dataclass(frozen=True)
class Job:
    """A recipe, ready to run."""

    recipe: Recipe
    cluster: Cluster  # with the recipe's number of servers
    setup: Setup  # that the run begins with
    comparison: Comparison | None = None  # of modes, if the recipe left the mode to the planner
    left_over: int = 0  # samples of an epoch that aren't run, if the profile has times of whole minibatches only
    extensions: Mapping[str, JobExtension] = field(default_factory=dict)  # their parts, by name
    of_all_layers: Profile | None = None  # None: the setup's
    began_s: float = field(default_factory=time.perf_counter)  # when its preparation did, by the host's counter
    chosen: str = ""  # columns that the planner chose besides the plan, as memory binds

    @property
    def profile(self) -> Profile:
        """Layer costs at every size of a unit."""
        return self.setup.profile

    @property
    def whole_profile(self) -> Profile:
        """Layer costs of the model with all its layers."""
        return self.of_all_layers or self.profile


class Decision(NamedTuple):
    """What all processes of a run must agree on."""

    plan: PlanForm
    profile: Profile  # for which the plan was made
    source: str  # the plan's file
