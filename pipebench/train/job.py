"""A recipe that is ready to run, and what all its processes must agree on."""

from dataclasses import dataclass
from typing import NamedTuple

from pipebench.cluster import Cluster
from pipebench.engine.setup import Setup
from pipebench.planner.plans import Comparison
from pipebench.profile.model import Profile
from pipebench.recipe.plan_file import PlanForm
from pipebench.recipe.schema import Recipe
from pipebench.search.setup import SearchSetup
from pipebench.train.moves import PlannedMove


@dataclass(frozen=True)
class Job:
    """A recipe, ready to run."""

    recipe: Recipe
    cluster: Cluster  # with the recipe's number of servers
    setup: Setup  # of the first architecture
    comparison: Comparison | None = None  # of modes, if the recipe left the mode to the planner
    left_over: int = 0  # samples of an epoch that aren't run, if the profile has times of whole minibatches only
    search: SearchSetup | None = None  # None: the architecture stays
    moves: tuple[PlannedMove, ...] = ()  # plans that the recipe asks for

    @property
    def profile(self) -> Profile:
        """Layer costs at every size of a unit."""
        return self.setup.profile

    @property
    def whole_profile(self) -> Profile:
        """Layer costs of the model with all cells."""
        return self.profile if self.search is None else self.search.architectures.profile


class Decision(NamedTuple):
    """What all processes of a run must agree on."""

    plan: PlanForm
    profile: Profile  # for which the plan was made
    source: str  # the plan's file
