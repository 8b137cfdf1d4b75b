"""`pipebench plan` of lists in a recipe's keys: side by side, zipped, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipebench.cli.main import cli
from tests.cli.test_plan_command import answer, invoke
from tests.modes import WHOLE


def test_lists_are_planned_side_by_side(few: str) -> None:
    words = (few, "parallelism.plan=straight", "parallelism.depth=1,4")
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    found = json.loads(invoke(*words, "--json").stdout)
    assert [each["name"] for each in found] == ["depth=1", "depth=4"]
    rates = [each["recipe_plan"]["samples_per_s"] for each in found]
    assert rates[1] > 2 * rates[0]
    lines = [line.split() for line in result.stdout.splitlines() if line.strip().startswith("depth=")]
    assert [line[:5] for line in lines[:2]] == [
        ["depth=1", "straight", "pipedream", "4", "1"],
        ["depth=4", "straight", "pipedream", "4", "4"],
    ]
    assert lines[0][6] == "1.00x"
    assert float(lines[1][6].removesuffix("x")) == pytest.approx(rates[1] / rates[0], rel=0.01)


def test_a_best_plan_with_the_row_s_notation_shows_its_differences(few: str) -> None:
    """`straight` was `1.55x` as fast as `straight`: it has two stages there, and one minibatch more in flight."""
    words = (few, "cluster.bandwidth=1Gbit/s", "parallelism.plan=straight,1-1")
    printed = invoke(*words).stdout
    best = json.loads(invoke(*words, "--json").stdout)[0]
    assert (best["config"], best["replicas"], best["depth"]) == ("straight", [1, 1], 3)
    assert " straight (2 stages) " in printed
    assert " straight, depth 3 " in printed


def test_servers_and_sizes_go_together_when_zipped(few: str) -> None:
    words = (few, "model.num_layers=3", "cluster.servers=1,2", "train.minibatch_size=32,16")
    names = [line.split()[0] for line in invoke(*words).stdout.splitlines() if line.strip().startswith("servers=")]
    assert {*names} == {f"servers={count},minibatch_size={size}" for count in (1, 2) for size in (32, 16)}
    zipped = json.loads(invoke(*words, "--zip", "--json").stdout)
    assert [(each["num_workers"], each["minibatch_size"]) for each in zipped] == [(4, 32), (8, 16)]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["plan", "FEW", "--no-others"], "--zip combines lists by position, and no key has a list"),
        (
            ["plan", "--profile", "x.json", "--levels", "4@1e9"],
            "--zip goes with a recipe, whose lists it takes together",
        ),
        (["run", "FEW", "train.seed=1"], "--zip combines lists by position, and no key has a list"),
        (["run", "--resume", "small-1f0c9a7e"], "--resume goes on with one run: leave out --zip"),
    ],
    ids=str,
)
def test_zip_without_a_list_is_refused(few: str, words: list[str], sentence: str) -> None:
    result = CliRunner().invoke(cli, [*(few if word == "FEW" else word for word in words), "--zip"])
    assert result.exit_code == 2
    assert sentence in result.output


def test_a_table_of_a_sweep_plans_only_the_shown_modes(few: str, planned: list[str]) -> None:
    assert invoke(few, "parallelism.depth=1,2").exit_code == 0
    assert planned == ["dp", "pipedream"] * 2 or planned == ["pipedream", "dp"] * 2
    planned.clear()
    both: Any = answer(few, "parallelism.depth=1,2", others=True)
    assert {*(row["mode"] for row in both[0]["others"]), *both[0]["refused"]} == {*WHOLE} - {"pipedream"}
    fitting = [mode for mode in WHOLE if mode not in both[0]["refused"]]
    assert sorted(planned) == sorted(fitting * 2)


def test_a_run_of_a_sweep_without_a_plan_is_reported_below_the_others(few: str) -> None:
    words = (few, "parallelism.mode=dp", "dataset.num_train=100000000", "train.minibatch_size=64,100000000")
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    assert "minibatch_size=100000000  no plan of mode dp fits" in " ".join(result.stdout.split("\n"))
    assert "refused" in json.loads(invoke(*words, "--json").stdout)[-1]


def test_files_are_for_one_plan(tmp_path: Path) -> None:
    result = invoke("quickstart", "parallelism.depth=1,2", "--out", str(tmp_path / "plan.json"))
    assert result.exit_code == 2
    assert "--out is for one plan, and the recipe makes 2" in result.output
