"""Whether all processes of a run have made the same model of the user's, by digests that stand in for theirs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from pipebench.distributed.world import World
from pipebench.errors import RecipeError
from pipebench.recipe.load import load
from pipebench.run.agreement import check_made_alike
from tests.support import Blobs, Mlp, make_setup

RECIPE = {
    "name": "own",
    "model": {"target": "pipebench.zoo.gpt2:gpt2", "num_layers": 1},
    "dataset": {"name": "synthetic_text", "columns": 17, "vocabulary": 1000},
    "train": {"minibatch_size": 4, "optimizer": {"lr": 0.1}, "max_epochs": 1},
    "cluster": {"name": "local", "count": 4},
    "parallelism": {"mode": "dp"},
}


class Found:
    """A world whose ranks say what is given."""

    def __init__(self, digests: str) -> None:
        self.digests = [*digests]

    def exchange(self, _: Any) -> list[str]:
        return self.digests


@pytest.mark.parametrize(
    ("digests", "slices", "other"),
    [
        ("aaaa", 1, None),
        ("abab", 2, None),
        ("abab", 1, "rank 1 than for rank 0"),
        ("abac", 2, "rank 3 than for rank 1"),
    ],
)
def test_slices_of_a_worker_may_differ_but_workers_may_not(
    digests: str, slices: int, other: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(json.dumps(RECIPE))
    setup = make_setup(Mlp(), ([2], [1, 1]), dataset=Blobs())
    setup = replace(setup, costs=replace(setup.costs, slices=slices))
    world = cast("World", Found(digests))
    if other is None:
        check_made_alike(world, load(str(path)), setup, "")
        return
    with pytest.raises(RecipeError, match=rf"model.target: pipebench.zoo.gpt2:gpt2 makes other weights for {other}"):
        check_made_alike(world, load(str(path)), setup, "")
