"""What the planner's reports are about: Table 1's models and clusters, and how a table is written.

Analytic profiles are those of the zoo's full-size recipes. The measured profiles aren't part of this repository:
whoever has them puts them into `../shared/profiles`. Without them the reports leave them out, and say so.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import yaml

from pipebench.cluster import Cluster
from pipebench.profile.load import load_profile
from pipebench.profile.model import Profile
from pipebench.recipe.clusters import load_cluster
from pipebench.recipe.load import load
from pipebench.recipe.schema import Recipe
from pipebench.train.profiled_model import Wanted, profile_model
from tests.profile.judging import GNMT_FILE, SENTENCES, VGG_FILE

PUBLISHED = Path(__file__).parents[1] / "published" / "pipedream_sosp19.yaml"
_CLUSTERS = {"Cluster-A": "cluster-a", "Cluster-B": "cluster-b", "Cluster-C": "cluster-c"}
# File and samples per minibatch of the models that the artifact measured.
_MEASURED = {"vgg-16": (VGG_FILE, 128), "gnmt-8": (GNMT_FILE, SENTENCES)}


@dataclass(frozen=True)
class Subject:
    """A model with its profile at one size."""

    model: str  # as in Table 1, in lower case
    source: str  # `measured` or `analytic`
    size: int  # samples per minibatch
    profile: Profile  # at that size

    @property
    def text(self) -> str:
        """Model, size and source in a few words."""
        return f"{self.model}, {self.size} samples, {self.source}"


@dataclass(frozen=True)
class TableRow:
    """A row of Table 1."""

    name: str  # its id in the published values
    model: str  # as in Table 1, in lower case
    cluster: str  # name of ours
    # servers, workers: how many
    servers: int
    workers: int
    replicas: tuple[int, ...]  # per stage
    config: str  # as printed
    speedup: float  # epoch time over data parallelism's


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
    """Return a model as the artifact measured it on a V100, or None if its file isn't there."""
    path, size = _MEASURED.get(model, (None, 0))
    if path is None or not path.is_file():
        return None
    return Subject(model, "measured", size, load_profile(path, size))


def recipe(model: str, size: int | None = None) -> Recipe:
    """Return the full-size recipe of a model on one device of the cluster that the paper trains it on.

    The model is named as in Table 1, in lower case; its recipes are in the folder of that name (`awd lm`: `awd_lm`),
    and their own size is the paper's or its artifact's.

    Raises:
        RecipeError: there is no such recipe.
    """
    overrides = ["engine.timing=analytic"] + ([] if size is None else [f"train.minibatch_size={size}"])
    return load(f"{model.replace('-', '').replace(' ', '_')}/single", overrides).recipe


@cache
def analytic(model: str, size: int | None = None) -> Subject:
    """Return a model as its full-size recipe trains it, computed for the device of the recipe's cluster.

    Arguments and errors are those of `recipe`.
    """
    own = recipe(model, size)
    profile = profile_model(own, cluster(own.cluster.name, 1), wanted=Wanted(plans=True)).profile
    return Subject(model, "analytic", own.train.minibatch_size, profile)


def missing() -> list[str]:
    """Return the models whose measured profile isn't there."""
    return [model for model in _MEASURED if measured(model) is None]


def cluster(name: str, servers: int, *, limited: bool = False) -> Cluster:
    """Return a cluster of `recipes/clusters`, with or without its limit on memory."""
    loaded = load_cluster(name, servers)
    return loaded if limited else replace(loaded, memory_bytes=None)


def flat(num_workers: int) -> Cluster:
    """Return so many workers joined by one level of links, those between cluster-a's servers."""
    outer = cluster("cluster-a", 4).levels[-1]
    return Cluster(f"flat-{num_workers}", "V100", None, (replace(outer, count=num_workers),))


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def names(counts: Mapping[str, int]) -> str:
    """Return `3 of one kind, 2 of another`, the most frequent first."""
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])))
