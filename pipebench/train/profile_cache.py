"""Cached profiles for planning without torch.

Importing torch and tracing a model takes longer than planning. For the zoo's models and data sets with computed times,
all that a profile depends on is known: the recipe, the data set's declared sizes, the cluster's device, the code of the
zoo and of pipebench, and torch's version. A profile with the same inputs is used again.
"""

import importlib.metadata
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, NamedTuple

from pipebench.cluster import Cluster
from pipebench.profile.cache import cached, code_hash
from pipebench.profile.devices import device_of, is_computed
from pipebench.profile.model import Profile
from pipebench.recipe.load import LoadedRecipe
from pipebench.recipe.make import make_dataset
from pipebench.recipe.preflight import check_model
from pipebench.recipe.schema import Recipe
from pipebench.train.request import sizes_to_plan
from pipebench.zoo.registry import Dataset

if TYPE_CHECKING:
    from pipebench.model.graph import LayerGraph

OnProgress = Callable[[str], None] | None


class ToPlan(NamedTuple):
    """What the planner needs of a recipe."""

    profile: Profile  # also at the sizes of other modes' units
    dataset: Dataset
    graph: "LayerGraph | None"  # on the meta device; None with a cached profile


def to_plan(loaded: LoadedRecipe, on_progress: OnProgress = None, *, needs_graph: bool = False) -> ToPlan:
    """Return a recipe's profile and data set, and its layer graph if needed.

    `on_progress` gets what is profiled, in words. The model needn't have checked its options yet.

    Raises:
        RecipeError: the model rejects its options' values.
        GraphError, PlanError, ProfileError: it can't be traced or profiled, or the data set doesn't fit.
    """
    recipe, cluster = loaded.recipe, loaded.cluster
    is_file = recipe.model.get("profile") is not None
    if needs_graph or is_file or loaded.has_targets or not is_computed(recipe.engine.timing, cluster):
        return _made(loaded, on_progress)
    dataset: Dataset = make_dataset(recipe.dataset)
    profile = cached(_determining(recipe, cluster, dataset), lambda: _made(loaded, on_progress).profile)
    return ToPlan(profile, dataset, None)


def _made(loaded: LoadedRecipe, on_progress: OnProgress) -> ToPlan:
    check_model(loaded)
    from pipebench.train.profiled_model import Wanted, profile_model  # late: imports torch

    made = profile_model(loaded.recipe, loaded.cluster, on_progress, Wanted(plans=True))
    return ToPlan(made.profile, made.dataset, made.graph)


def _determining(recipe: Recipe, cluster: Cluster, dataset: Dataset) -> dict[str, object]:
    """Return all that a computed profile of a zoo model depends on."""
    return {
        "model": dict(recipe.model),
        "dataset": dict(recipe.dataset),
        "train": asdict(recipe.train),
        "mode": asdict(recipe.parallelism),  # an uncuttable model is one layer if the mode allows
        "engine": asdict(recipe.engine),
        "sizes": sizes_to_plan(recipe, cluster, dataset),
        "computed for": asdict(device_of(cluster, recipe.engine)),
        "joined by": asdict(cluster.levels[0]) if recipe.parallelism.tensor != 1 else None,
        "code": code_hash(),  # more than is needed
        "torch": importlib.metadata.version("torch"),
        "python": sys.version,
    }
