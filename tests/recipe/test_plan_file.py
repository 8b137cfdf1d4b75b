"""A plan's file is read back as it was written, and every fault in it is a separate sentence."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipebench.errors import RecipeError
from pipebench.recipe.load import load
from pipebench.recipe.plan_file import PlanForm, StageForm, form_problems, load_plan, parse_plan_file
from pipebench.recipe.schema import ParallelismRecipe

FORM = PlanForm(
    "pipedream",
    3,
    1,
    (
        StageForm(2, (0, 2), {"features_0": "keep", "features_1": "keep"}),
        StageForm(1, (1,), {"classifier_0": "recompute"}),
    ),
)
INTERLEAVED = ParallelismRecipe("interleaved")
Change = Callable[[dict[str, Any]], object]


def read(data: Any) -> PlanForm:
    return parse_plan_file(json.dumps(data), "plan.json")


def test_a_plan_is_read_back_as_it_was_written() -> None:
    assert parse_plan_file(FORM.text(), "plan.json") == FORM
    assert json.loads(FORM.text()) == json.loads(json.dumps(FORM.data()))


def test_every_layer_has_a_line_so_that_it_can_be_moved() -> None:
    lines = FORM.text().splitlines()
    source, target = lines.index('    "features_1": "keep"'), lines.index('    "classifier_0": "recompute"')
    moved = [*lines[:target], lines[source] + ",", *lines[target:]]
    moved[source - 1] = moved[source - 1].rstrip(",")
    del moved[source]
    found = parse_plan_file("\n".join(moved), "plan.json")
    assert [list(stage.layers) for stage in found.stages] == [["features_0"], ["features_1", "classifier_0"]]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "plan.json: isn't JSON: "),
        ("[]", "plan.json: got a list, allowed is an object"),
        ("{}", "plan.json: isn't a pipebench plan: an object with the key 'pipebench_plan' is expected"),
        ('{"pipebench_plan": 2}', "plan.json: pipebench_plan: got 2, allowed is 1, the version of this form"),
        ('{"pipebench_plan": 1.0}', "plan.json: pipebench_plan: got 1.0, allowed is 1"),
        (FORM.text().replace('"depth"', '"deptt"'), "plan.json: unknown key 'deptt'; did you mean 'depth'?"),
        (FORM.text().replace('"features_1"', '"features_0"'), "plan.json: stages: 'features_0' stands twice in one"),
        (FORM.text().replace('"keep"', "1", 1), "plan.json: stages[0].layers.features_0: got 1, allowed is text"),
        (FORM.text().replace("[0, 2]", "[0, -2]"), "stages[0].devices[1]: got -2, allowed is a whole number from 0"),
    ],
)
def test_a_file_without_a_plan_is_refused_in_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(RecipeError) as refused:
        parse_plan_file(text, "plan.json")
    assert len(refused.value.faults) == 1
    assert sentence in str(refused.value)


def test_a_missing_file_is_reported_with_the_most_similar_name_beside_it(tmp_path: Path) -> None:
    (tmp_path / "my-plan.json").write_text(FORM.text())
    with pytest.raises(RecipeError, match=r"can't be read: No such file or directory; did you mean 'my-plan.json'\?"):
        load_plan(str(tmp_path / "my-paln.json"))
    with pytest.raises(RecipeError, match=r"can.t be read: Is a directory"):
        load_plan(str(tmp_path))


STAGES = FORM.stages


@pytest.mark.parametrize(
    ("form", "sentence"),
    [
        (FORM, []),
        (
            replace(FORM, mode="gpipe", depth=2**40),
            ["mode: got 'gpipe', allowed is pipedream, the recipe's mode; to run it, give parallelism.mode=gpipe"],
        ),
        (replace(FORM, mode="gpip"), ["mode: got 'gpip', allowed is pipedream, the recipe's mode"]),
        (replace(FORM, chunks=2), ["chunks: got 2, in mode pipedream allowed is 1, the stages per worker"]),
        (replace(FORM, stages=()), ["stages: got 0 stages, allowed is at least one"]),
        (
            replace(FORM, stages=(STAGES[0], replace(STAGES[1], layers={}))),
            ["stages[1].layers: got no layer, allowed is at least one in every stage"],
        ),
        (
            replace(FORM, stages=(STAGES[0], replace(STAGES[1], layers={"a": "swap", "b": "kep"}))),
            ["stages[1].layers['b']: got 'kep', allowed are keep, recompute, swap; did you mean 'keep'?"],
        ),
        (
            replace(FORM, stages=(replace(STAGES[0], replicas=9), STAGES[1])),
            ["stages: got 9-1, which needs 10 workers; the cluster has 4 (mode pipedream, 4 workers)"],
        ),
        (
            replace(FORM, stages=(replace(STAGES[0], devices=(0, 4)), replace(STAGES[1], devices=(0,)))),
            [
                "stages[0].devices: got 4, allowed are 0 to 3, the cluster's devices",
                "stages[1].devices: got 0, which stage 0 stands on: allowed is every device once",
            ],
        ),
        (
            replace(FORM, depth=2**40, stages=(replace(STAGES[0], devices=(0,)), STAGES[1])),
            [
                "stages[0].devices: got 1 devices, [0], allowed is 2, one for each replica",
                "depth: got 1099511627776, allowed is a whole number from 1 to 2147483648",
            ],
        ),
    ],
)
def test_all_faults_of_a_plan_are_reported_together(form: PlanForm, sentence: list[str]) -> None:
    found = [f"{where}: {problem}" for where, problem in form_problems(form, ParallelismRecipe("pipedream"), 4)]
    assert found == sentence


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"depth": 2}, "depth: got 3, allowed is 2, the recipe's parallelism.depth"),
        ({"recompute": True}, "stages[0].layers: got keep, allowed is recompute, as the recipe says"),
        ({"recompute": False}, "stages[1].layers: got recompute, allowed is keep, as the recipe says"),
    ],
)
def test_a_recipe_that_contradicts_its_plan_is_a_fault(options: dict[str, Any], sentence: str) -> None:
    (problem,) = form_problems(FORM, ParallelismRecipe("pipedream", **options), 4)
    assert sentence in ": ".join(problem)


def test_a_mode_with_a_fixed_depth_refuses_others() -> None:
    form = PlanForm("model", 2, 1, (StageForm(1, (0,), {"a": "keep"}),))
    assert [*form_problems(form, ParallelismRecipe("model"), 4)] == [("depth", "got 2, in mode model allowed is 1")]


def test_stages_of_one_worker_share_its_devices() -> None:
    stages = [StageForm(1, (index % 2,), {f"layer{index}": "keep"}) for index in range(4)]
    form = PlanForm("interleaved", 2, 2, tuple(stages))
    assert [*form_problems(form, INTERLEAVED, 4)] == []
    assert form.replicas == (1, 1)
    torn = replace(form, stages=(*stages[:3], replace(stages[3], devices=(3,))))
    sentence = "got 1 replicas on [3], allowed is 1 on [1], as stage 1, whose workers run it too"
    assert [*form_problems(torn, INTERLEAVED, 4)] == [("stages[3]", sentence)]
    odd = replace(form, stages=tuple(stages[:3]))
    sentence = "got 3 stages, allowed is a multiple of 2, the stages per worker"
    assert [*form_problems(odd, INTERLEAVED, 4)] == [("stages", sentence)]
    once = replace(form, chunks=1)
    assert ("chunks", "got 1, in mode interleaved allowed is 2 or more stages per worker") in form_problems(
        once, INTERLEAVED, 4
    )


def test_a_recipe_names_a_file_beside_it_and_the_command_line_one_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("recipes", "here"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "plan.json").write_text(replace(FORM, depth=len(name)).text())
    recipe = tmp_path / "recipes" / "mine.yaml"
    recipe.write_text("extends: quickstart/pipedream\nparallelism: {plan: plan.json}\n")
    monkeypatch.chdir(tmp_path / "here")
    assert load(str(recipe)).recipe.parallelism.plan == str(tmp_path / "recipes" / "plan.json")
    loaded = load(str(recipe), ["parallelism.plan=plan.json"]).recipe.parallelism.plan
    assert loaded == str(tmp_path / "here" / "plan.json")


def test_faults_of_a_plan_are_reported_with_those_of_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plan.json").write_text(replace(FORM, chunks=3).text())
    with pytest.raises(RecipeError) as refused:
        load("quickstart/pipedream", ["parallelism.plan=plan.json", "train.max_epochs=0", "parallelism.cuts=[a]"])
    sentence = str(refused.value)
    for part in (
        "train.max_epochs: got 0",
        "parallelism.cuts: got ['a'] with a plan's file, which says itself where stages begin: allowed is null",
        "plan.json:5: chunks: got 3, in mode pipedream allowed is 1",
    ):
        assert part in sentence
    with pytest.raises(RecipeError, match=r"got .* with mode auto, which plans every mode"):
        load("quickstart/pipedream", ["parallelism.plan=plan.json", "parallelism.mode=auto"])
