"""Runs in processes, of every mode and at random: training loop, evaluations, checkpoints and measurements.

Sharded runs once failed at their end, where measurements are merged, and a restart hid it: only segments of training
had been compared.
"""

import random
from pathlib import Path

import pytest

from pipebench.schedule.modes import MODES
from tests.processes import Processes
from tests.random_recipes.compare import RefusedError, written
from tests.random_recipes.test_random_recipes import RECIPE
from tests.random_recipes.worlds import disagreements, draw_more


@pytest.mark.sampled(5)
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in ("single", "dp-asp")])
def test_a_run_in_two_processes_equals_the_virtual_engine_s(two: Processes, mode: str, tmp_path: Path) -> None:
    train = RECIPE["train"] | {"minibatch_size": 8, "checkpoint_every": {"minibatches": 3}}
    recipe = RECIPE | {
        "dataset": RECIPE["dataset"] | {"num_train": 32},  # no microbatch of one row, of which there is no variance
        "train": train,
        "cluster": RECIPE["cluster"] | {"servers": 2},
        "parallelism": {"mode": mode},
    }
    assert not [*disagreements(two, written(recipe, tmp_path / "run"), random.Random(0))]


def test_random_runs_in_two_processes_equal_the_virtual_engine_s(two: Processes, tmp_path: Path) -> None:
    """`nox -s oracle` compares many more, in up to four processes."""
    seed, compared = 5, 0  # others in the oracle
    for number in range(1000):
        recipe = draw_more(seed, number)
        if recipe["cluster"]["servers"] != 2 or recipe["parallelism"]["mode"] == "dp-asp":
            continue
        try:
            found = [*disagreements(two, written(recipe, tmp_path / str(number)), random.Random(number))]
        except RefusedError:
            continue
        assert not found, recipe
        compared += 1
        if compared == 3:
            return
    pytest.fail("far too many are refused")
