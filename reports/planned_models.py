"""What the planner's reports are about: four models, the clusters of PipeDream's Table 1, and how a table is written.

The measured profiles and the published values aren't part of this repository: whoever has them puts them into
`../shared/profiles` and `../shared/published`. Without them the reports leave those models out, and say so.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
import torchvision

from pipebench.cluster import Cluster
from pipebench.graph import trace
from pipebench.profile import DEVICES
from pipebench.profile.analytic import analytic_profile
from pipebench.profile.choose import load_profile
from pipebench.profile.model import Profile
from pipebench.recipe.clusters import load_cluster
from pipebench.recipe.schema import OptimizerRecipe
from tests.profile.judging import GNMT_FILE, SENTENCES, VGG_FILE, Images

PUBLISHED = Path(__file__).parents[2] / "shared" / "published" / "pipedream_sosp19.yaml"
# Samples per GPU of the paper's runs (the artifact's scripts).
ARTIFACT_SIZES = {"vgg-16": 64, "resnet-50": 128, "alexnet": 256, "gnmt-8": 64}
MEASURED_SIZES = {"vgg-16": 128, "gnmt-8": SENTENCES}
_FILES = {"vgg-16": VGG_FILE, "gnmt-8": GNMT_FILE}
_TORCHVISION = {"vgg-16": "vgg16", "resnet-50": "resnet50", "alexnet": "alexnet"}


@dataclass(frozen=True)
class Subject:
    """A model with its profile at one size.

    Attributes:
        model: as in Table 1, in lower case.
        source: `measured` or `analytic`.
        size: samples per minibatch.
        profile: at that size.
    """

    model: str
    source: str
    size: int
    profile: Profile

    @property
    def text(self) -> str:
        """Model, size and source in a few words."""
        return f"{self.model}, {self.size} samples, {self.source}"


@cache
def measured(model: str) -> Subject | None:
    """Return a model as the artifact measured it on a V100, or None if its file isn't there."""
    path = _FILES.get(model)
    if path is None or not path.is_file():
        return None
    size = MEASURED_SIZES[model]
    return Subject(model, "measured", size, load_profile(path, size))


@cache
def analytic(model: str, size: int) -> Subject | None:
    """Return a torchvision model on a V100 of the catalogue, with momentum; None if torchvision has no such model."""
    if model not in _TORCHVISION:
        return None
    with torch.device("meta"):
        graph = trace(getattr(torchvision.models, _TORCHVISION[model])(weights=None).train())
    profile = analytic_profile(
        graph, Images(), [size], DEVICES["V100"], OptimizerRecipe(name="sgd", lr=0.01, momentum=0.9), model
    )
    return Subject(model, "analytic", size, profile)


def missing() -> list[str]:
    """Return the models whose measured profile isn't there."""
    return [model for model in _FILES if measured(model) is None]


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
