"""A recipe that is ready to run, and what all processes of its run must agree on."""

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
    """A recipe, ready to run.

    Attributes:
        recipe: the recipe.
        cluster: the cluster, with as many servers as the recipe asks for.
        setup: what the engine takes.
        comparison: the modes that were compared, if the recipe left the mode to the planner.
        left_over: samples of an epoch that aren't run, since the profile has times of whole minibatches only.
        search: how the model's architecture changes; the setup is that of the first one. None: it stays.
        moves: plans that the recipe asks for while it goes on.
    """

    recipe: Recipe
    cluster: Cluster
    setup: Setup
    comparison: Comparison | None = None
    left_over: int = 0
    search: SearchSetup | None = None
    moves: tuple[PlannedMove, ...] = ()

    @property
    def profile(self) -> Profile:
        """Layer costs at every size that travels."""
        return self.setup.profile

    @property
    def whole_profile(self) -> Profile:
        """The same of the model with all that a search may leave out."""
        return self.profile if self.search is None else self.search.architectures.profile


class Decision(NamedTuple):
    """What all processes of a run must agree on.

    Attributes:
        plan: the plan.
        profile: the layer costs that it was made for.
        source: the plan's file.
    """

    plan: PlanForm
    profile: Profile
    source: str
