"""The check that all processes of a run have equal models and samples, with digests in place of other ranks'."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from pipebench.distributed.slices import ProcessSlices
from pipebench.distributed.world import World
from pipebench.errors import RecipeError
from pipebench.model.graph import trace
from pipebench.model.sliced import ProcessSlicer
from pipebench.recipe.load import load
from pipebench.run.agreement import check_made_alike
from pipebench.run.identity import digest
from tests.support import Blobs, Mlp, make_setup

RECIPE: dict[str, Any] = {
    "name": "own",
    "model": {"target": "pipebench.zoo.gpt2:gpt2", "num_layers": 1},
    "dataset": {"target": "tests.distributed.sliced:text"},
    "train": {"minibatch_size": 4, "optimizer": {"lr": 0.1}, "max_epochs": 1},
    "cluster": {"name": "local", "count": 4},
    "parallelism": {"mode": "dp"},
}
OTHER_WEIGHTS = "model.target: pipebench.zoo.gpt2:gpt2 makes other weights for rank 1 than for rank 0"


class Ranks:
    """A world whose first ranks have found other digests than this one, the last; of weights or of samples."""

    def __init__(self, **first: list[str]) -> None:
        self.first = [first.get(what, []) for what in ("samples", "weights")]

    def exchange(self, own: str) -> list[str]:
        return [*self.first.pop(0), own]


def check(folder: Path, world: Ranks, model: nn.Module, group: ProcessSlices | None = None) -> None:
    """Check that this rank's model and samples are those of rank 0."""
    path = folder / "r.yaml"
    path.write_text(json.dumps(RECIPE))
    setup = make_setup(Mlp(), ([2], [1, 1]), dataset=Blobs())
    graph = trace(model) if group is None else trace(model, rewrite=ProcessSlicer(group))
    costs = replace(setup.costs, slices=1 if group is None else group.size)
    check_made_alike(cast("World", world), load(str(path)), replace(setup, graph=graph, costs=costs), "samples")


def own(seed: int) -> nn.Module:
    """Return a user's model that draws its weights from a seed of its own."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def test_workers_have_the_weights_of_rank_0(tmp_path: Path) -> None:
    same, other = digest(own(0).parameters()), digest(own(1).parameters())
    check(tmp_path, Ranks(weights=[same, same]), own(0))
    with pytest.raises(RecipeError, match=OTHER_WEIGHTS):
        check(tmp_path, Ranks(weights=[same, other]), own(0))


def test_slices_of_a_worker_are_of_one_model(tmp_path: Path) -> None:
    """0.2.0 in its beginnings compared slices with those of other workers only, so one worker's were of any models."""
    weights = [digest(own(0).parameters())]
    check(tmp_path, Ranks(weights=weights), own(0), ProcessSlices(2, 1))
    with pytest.raises(RecipeError, match=OTHER_WEIGHTS):
        check(tmp_path, Ranks(weights=weights), own(1), ProcessSlices(2, 1))


def test_slices_of_a_worker_read_the_same_samples(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"dataset.target: .*:text makes other samples for rank 1 than for rank 0"):
        check(tmp_path, Ranks(samples=["others"]), own(0), ProcessSlices(2, 1))
