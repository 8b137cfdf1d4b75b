"""Random recipes end with the weights of a plain loop over minibatches; `nox -s oracle` compares many more."""

import os
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipebench.engine.virtual import VirtualEngine
from pipebench.schedule.modes import MODES
from tests.random_recipes.compare import differences, expected_of, of_clock, of_plan, prepared, run_virtual, written
from tests.random_recipes.drawing import draw_recipe
from tests.random_recipes.main import MOST_REFUSED, Campaign
from tests.random_recipes.shrinking import shrunk

SEED = int(os.environ.get("PIPEBENCH_ORACLE_SEED") or time.strftime("%Y%m%d"))  # another one every day

RECIPE: dict[str, Any] = {
    "name": "small",
    "model": {
        "target": "tests.random_recipes.nets:net",
        "steps": ["linear", "norm", "dropout 0.3", "add 0", "lstm"],
        "dtype": "float64",
    },
    "dataset": {
        "target": "tests.random_recipes.nets:Rows",
        "steps": "${model.steps}",
        "dtype": "${model.dtype}",
        "num_train": 26,
        "num_eval": 6,
    },
    "train": {
        "seed": 4,
        "minibatch_size": 4,
        "max_epochs": 2,
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "clip_norm": 0.3},
    },
    "cluster": {"name": "free-links", "servers": 3},
    "parallelism": {"mode": "pipedream", "plan": "2-1", "cuts": ["add"]},
}


DRAWN = 12  # `nox -s oracle` draws 500


def test_random_recipes_end_with_a_plain_loop_s_weights(tmp_path: Path) -> None:
    print(f"to repeat: PIPEBENCH_ORACLE_SEED={SEED}")
    campaign = Campaign(SEED, tmp_path)
    campaign.run(DRAWN)
    assert not campaign.failures, f"PIPEBENCH_ORACLE_SEED={SEED}\n" + "\n".join(campaign.failures)
    assert campaign.agreed.total() == DRAWN, campaign.summary("with the plain loop")
    assert campaign.refused_share <= MOST_REFUSED, campaign.summary("with the plain loop")


@pytest.mark.parametrize(
    ("section", "changed", "seen_in"),
    [
        ("parallelism", {"weights": "none"}, "linear0.weight"),
        ("parallelism", {"weights": "stash-vertical-sync"}, "lstm4.lstm.weight_ih_l0"),
        ("parallelism", {"depth": 1}, "linear0.weight"),
        ("train", {"seed": 5}, "samples of a minibatch"),
        ("train", {"max_epochs": 1}, "evaluations"),
        ("optimizer", {"momentum": 0.8}, "linear0.weight"),
        ("optimizer", {"clip_norm": 0.31}, "linear0.weight"),
        ("optimizer", {"lr_scaling": "none"}, "lstm4.lstm.weight_ih_l0"),
    ],
    ids=str,
)
def test_a_loop_with_another_meaning_of_a_key_is_detected(
    section: str, changed: dict[str, Any], seen_in: str, tmp_path: Path
) -> None:
    """Otherwise the comparison of random recipes would prove nothing."""
    loaded, job = prepared(written(RECIPE, tmp_path))
    ran = run_virtual(loaded, job)
    assert not [*differences(ran, expected_of(job, ran.pushes), job)]

    recipe = job.recipe
    if section == "optimizer":
        other = replace(recipe, train=replace(recipe.train, optimizer=replace(recipe.train.optimizer, **changed)))
    else:
        other = replace(recipe, **{section: replace(getattr(recipe, section), **changed)})
    found = [*differences(ran, expected_of(replace(job, recipe=other), ran.pushes), job)]
    assert any(each.startswith(seen_in) for each in found), found


def test_a_dropped_average_of_running_statistics_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, job = prepared(written(RECIPE, tmp_path))
    ran = run_virtual(loaded, job)
    monkeypatch.setattr("tests.oracles.per_minibatch.Loop._average_buffers", lambda self: None)
    found = [*differences(ran, expected_of(job, ran.pushes), job)]
    assert any(each.startswith("norm1.2.running_mean") for each in found), found


def test_averages_at_drains_that_take_no_time_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    average = VirtualEngine._average
    for changed in (average, lambda engine: min(average(engine), engine.clock_s)):
        monkeypatch.setattr(VirtualEngine, "_average", changed)
        # Links so slow that the sums are still on them when the next segment sends.
        loaded, job = prepared(written(RECIPE | {"cluster": {"name": "vpipe-unlimited", "servers": 3}}, tmp_path))
        metrics = run_virtual(loaded, job).metrics
        assert metrics is not None
        found = [*of_clock(metrics, job)]
        assert bool(found) == (changed is not average), found


def test_a_plan_for_another_recipe_is_detected(tmp_path: Path) -> None:
    asked = {"mode": "pipedream-flush", "plan": "2-1", "cuts": ["add"], "microbatches": 1}
    cluster = {"name": "cluster-c", "servers": 3}
    _, job = prepared(written(RECIPE | {"parallelism": asked, "cluster": cluster}, tmp_path))
    assert not [*of_plan(job)]
    recipe = job.recipe
    optimizer = replace(recipe.train.optimizer, clip_norm=None)
    unclipped = replace(recipe, train=replace(recipe.train, optimizer=optimizer))
    assert [each.split(":")[0] for each in of_plan(replace(job, recipe=unclipped))] == ["seconds of a minibatch"]
    larger = replace(recipe, parallelism=replace(recipe.parallelism, accumulate=2))
    assert any(each.startswith("bytes of all-reduce") for each in of_plan(replace(job, recipe=larger)))


def test_drawn_recipes_cover_every_mode_and_are_a_function_of_the_seed() -> None:
    recipes = [draw_recipe(1, number) for number in range(600)]
    assert recipes == [draw_recipe(1, number) for number in range(600)]
    assert recipes != [draw_recipe(2, number) for number in range(600)]
    modes = Counter(recipe["parallelism"]["mode"] for recipe in recipes)
    assert modes.keys() == MODES.keys()
    assert min(modes.values()) > 10
    keys = {key for recipe in recipes for key in (*recipe["parallelism"], *recipe["train"], *recipe["dataset"])}
    assert {"cuts", "depth", "accumulate", "weights", "backward", "sync", "recompute", "recompute_layers"} <= keys
    assert {"swap_layers", "chunks", "checkpoint_every", "schedule", "uneven", "noise", "buckets"} <= keys
    steps = {step.split()[0] for recipe in recipes for step in recipe["model"]["steps"]}
    assert {"norm", "mean", "aux", "halves", "detach", "twice", "tied"} <= steps


def test_shrinking_keeps_only_the_keys_that_are_needed_to_fail() -> None:
    def fails(recipe: dict[str, Any]) -> bool:
        optimizer = recipe["train"]["optimizer"]
        return "clip_norm" in optimizer and "dropout 0.3" in recipe["model"]["steps"]

    small = shrunk(RECIPE, fails)
    optimizer = {"name": "sgd", "lr": 0.1, "clip_norm": 0.3}
    assert small["train"] == {"minibatch_size": 2, "max_epochs": 1, "optimizer": optimizer}
    assert small["model"]["steps"] == ["linear", "linear", "dropout 0.3"]
    assert small["parallelism"] == {"mode": "pipedream"}
    assert (small["dataset"]["num_train"], small["dataset"]["num_eval"]) == (8, 2)
