"""Models and clusters of PipeDream's Table 1, which the studies of the planner share.

Analytic profiles are computed from the zoo's full-size recipes. The profiles that the artifact measured aren't part of
this repository: they are read from `../shared/profiles`. Without them the studies leave them out, and say so.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import yaml

from pipebench.cluster import Cluster
from pipebench.profile.load import load_profile
from pipebench.profile.model import LayerProfile, Profile
from pipebench.recipe.clusters import load_cluster
from pipebench.recipe.load import load
from pipebench.recipe.schema import Recipe
from pipebench.train.profiled_model import Wanted, profile_model
from tests.profile.judging import GNMT_FILE, SENTENCES, VGG_FILE

PUBLISHED = Path(__file__).parents[1] / "published" / "pipedream_sosp19.yaml"
_CLUSTERS = {"Cluster-A": "cluster-a", "Cluster-B": "cluster-b", "Cluster-C": "cluster-c"}
# File and samples per minibatch of the models that PipeDream's artifact measured.
_MEASURED = {"vgg-16": (VGG_FILE, 128), "gnmt-8": (GNMT_FILE, SENTENCES)}


@dataclass(frozen=True)
class Subject:
    """A model with its profile at one size."""

    model: str  # as in Table 1, in lower case
    source: str  # `measured` or `analytic`
    size: int  # samples per minibatch
    profile: Profile  # at that size


@dataclass(frozen=True)
class TableRow:
    """A row of Table 1."""

    name: str  # its id in the published values
    model: str  # as in Table 1, in lower case
    cluster: str  # its name in `recipes/clusters`
    servers: int  # number of servers
    workers: int  # number of GPUs in all servers
    replicas: tuple[int, ...]  # of each stage
    config: str  # the plan as printed, such as `15-1`
    speedup: float  # data parallelism's epoch time over the plan's


def published_rows() -> list[TableRow]:
    """Return the rows of Table 1."""
    entries = [entry for entry in yaml.safe_load(PUBLISHED.read_text())["entries"] if entry["id"].startswith("t1-")]
    rows = []
    for name, values in ((entry["id"], entry["values"]) for entry in entries):
        rows.append(
            TableRow(
                *(name, values["model"].lower(), _CLUSTERS[values["cluster"]], values["servers"]),
                *(values["gpus_total"], tuple(values["stage_replicas"]), values["config"]),
                values["epoch_time_speedup"],
            )
        )
    return rows


@cache
def measured(model: str) -> Subject | None:
    """Return a model as the artifact measured it on a V100; None if it wasn't measured or its file isn't there."""
    path, size = _MEASURED.get(model, (None, 0))
    if path is None or not path.is_file():
        return None
    return Subject(model, "measured", size, load_profile(path, size))


def recipe(model: str, size: int | None = None) -> Recipe:
    """Return the full-size recipe of a model on one device of the cluster that the paper trains it on.

    Args:
        model: as in Table 1, in lower case, such as `awd lm`.
        size: samples per minibatch; the recipe's own, which is the paper's or its artifact's, by default.

    Raises:
        RecipeError: there is no such recipe.
    """
    overrides = ["engine.timing=analytic"] + ([] if size is None else [f"train.minibatch_size={size}"])
    return load(f"{model.replace('-', '').replace(' ', '_')}/single", overrides).recipe


@cache
def analytic(model: str, size: int | None = None) -> Subject:
    """Return a model with the analytic profile of its full-size recipe, on the device of the recipe's cluster.

    Args and Raises: see `recipe`.
    """
    own = recipe(model, size)
    profile = profile_model(own, cluster(own.cluster.name, 1), wanted=Wanted(plans=True)).profile
    return Subject(model, "analytic", own.train.minibatch_size, profile)


def recipe_rows(name: str, minibatch_size: int | None = None) -> Sequence[LayerProfile]:
    """Return the profiled layers of a recipe's model, and the loss, at the recipe's minibatch size or another."""
    overrides = [] if minibatch_size is None else [f"train.minibatch_size={minibatch_size}"]
    loaded = load(name, overrides)
    return profile_model(loaded.recipe, loaded.cluster).profile.layers[loaded.recipe.train.minibatch_size]


def missing() -> list[str]:
    """Return the models whose measured profile isn't in `../shared/profiles`."""
    return [model for model in _MEASURED if measured(model) is None]


def cluster(name: str, servers: int, *, limited: bool = False) -> Cluster:
    """Return a cluster of `recipes/clusters`, with its limit on memory if `limited`."""
    loaded = load_cluster(name, servers)
    return loaded if limited else replace(loaded, memory_bytes=None)


def flat(num_workers: int) -> Cluster:
    """Return a cluster of V100s joined by one level of links, those between the servers of cluster-a."""
    outer = cluster("cluster-a", 4).levels[-1]
    return Cluster(f"flat-{num_workers}", "V100", None, (replace(outer, count=num_workers),))
