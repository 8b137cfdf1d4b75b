"""A list where a key takes one value: its runs, their names, and refusals."""

import pytest

from pipebench.errors import RecipeError
from pipebench.recipe.load import LoadedRecipe, load, load_each
from pipebench.recipe.sweep import MOST_RUNS, elements
from tests.recipe.conftest import VALID, Write

ADAM = VALID.replace("{name: sgd, lr: 0.02, momentum: 0.9}", "{name: adam, lr: 0.02}")


def runs(write: Write, *overrides: str, zipped: bool = False, content: str = VALID) -> list[LoadedRecipe]:
    return load_each(write(content), list(overrides), zipped=zipped)


def names(loaded: list[LoadedRecipe]) -> list[str]:
    return [each.varied_name for each in loaded]


def test_a_list_is_a_run_per_element_named_by_it(write: Write) -> None:
    loaded = runs(write, "parallelism.plan=straight", "parallelism.depth=1,2,4,7")
    assert [each.recipe.parallelism.depth for each in loaded] == [1, 2, 4, 7]
    assert [each.run_name for each in loaded] == [f"small-depth={depth}" for depth in (1, 2, 4, 7)]
    assert {each.recipe.name for each in loaded} == {"small"}
    assert [each.flat["parallelism.depth"] for each in loaded] == ["1", "2", "4", "7"]
    assert loaded[2].varied == {"parallelism.depth": "4"}


@pytest.mark.parametrize("written", ["1,2", "[1,2]", " 1, 2", "1,2,"])
def test_ways_to_write_it(write: Write, written: str) -> None:
    assert names(runs(write, f"train.seed={written}")) == ["seed=1", "seed=2"]


def test_a_recipe_s_file_may_hold_the_list(write: Write) -> None:
    content = VALID.replace("servers: 1", "").replace("plan: 2-1-1}", "plan: [2-1-1, straight], depth: [2, 3]}")
    loaded = runs(write, content=content)
    assert names(loaded) == [f"plan={plan},depth={d}" for plan in ("2-1-1", "straight") for d in (2, 3)]
    assert names(runs(write, "parallelism.depth=4", content=content)) == ["plan=2-1-1", "plan=straight"]


def test_several_lists_are_every_combination_and_the_last_named_varies_fastest(write: Write) -> None:
    found = runs(write, "train.seed=0,1", "train.minibatch_size=8,16,32")
    assert names(found) == [f"seed={seed},minibatch_size={size}" for seed in (0, 1) for size in (8, 16, 32)]


def test_zipped_lists_go_together(write: Write) -> None:
    loaded = runs(write, "cluster.servers=1,2,4", "train.minibatch_size=32,16,8", "parallelism.plan=auto", zipped=True)
    pairs = [(each.recipe.cluster.servers, each.recipe.train.minibatch_size) for each in loaded]
    assert pairs == [(1, 32), (2, 16), (4, 8)]


def test_a_key_that_takes_a_list_takes_a_list_of_lists(write: Write) -> None:
    betas = "train.optimizer.betas"
    assert runs(write, f"{betas}=[0.9, 0.99]", content=ADAM)[0].varied == {}
    for written in ("[0.9, 0.99],[0.8, 0.9]", "[[0.9, 0.99], [0.8, 0.9]]"):
        loaded = runs(write, f"{betas}={written}", content=ADAM)
        assert [each.recipe.train.optimizer.betas for each in loaded] == [[0.9, 0.99], [0.8, 0.9]]
    cuts = runs(write, "parallelism.plan=straight", "parallelism.cuts=[a,b,c],[d,e,f]")
    assert [each.recipe.parallelism.cuts for each in cuts] == [["a", "b", "c"], ["d", "e", "f"]]


def test_options_of_a_model_take_lists_unless_they_are_lists_themselves(write: Write) -> None:
    for written in ("0.125,0.25", "[0.125,0.25]"):
        assert [each.recipe.model["width"] for each in runs(write, f"model.width={written}")] == [0.125, 0.25]
    (leaves,) = runs(write, "model.leaves=[Conv2d,ReLU]")
    assert leaves.recipe.model["leaves"] == ["Conv2d", "ReLU"]


def test_the_overrides_of_a_sweep_s_run_give_the_same_run(write: Write) -> None:
    """Processes of a run get their recipe as overrides."""
    overrides = ["train.seed=0,1", "parallelism.plan=2-1-1,straight", "train.optimizer.betas=[0.9,0.99],[0.8,0.9]"]
    for each in runs(write, *overrides, content=ADAM):
        (again,) = runs(write, *overrides, *each.words, content=ADAM)
        assert (again.run_name, again.varied, again.flat) == (each.run_name, each.varied, each.flat)


def test_every_run_of_a_sweep_has_its_command(write: Write) -> None:
    overrides = ["parallelism.mode=dp,gpipe", "train.seed=3", "parallelism.plan=auto"]
    commands = [each.words_with(overrides) for each in runs(write, *overrides)]
    assert commands == [
        ["train.seed=3", "parallelism.plan=auto", f"parallelism.mode={mode}"] for mode in ("dp", "gpipe")
    ]


def test_a_list_is_refused_if_one_recipe_is_needed(write: Write) -> None:
    with pytest.raises(RecipeError, match=r"command line: train.seed: got a list, one value is needed here"):
        load(str(write()), ["train.seed=0,1,2"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.seed=0,x", r"command line: train.seed: got 'x', allowed is a whole number \(element 2 of 2\)"),
        ("train.optimizer.lr=0,01", r"train.optimizer.lr: got '01', allowed is a number \(element 2 of 2\)"),
        ("train.seed=0,-1", r"train.seed: got -1, allowed is a whole number from 0 on \(element 2 of 2\)"),
        ("parallelism.mode=pipedream,pipedrem", r"got 'pipedrem', .* did you mean 'pipedream'\? \(element 2 of 2\)"),
        ("model.width=0.5,wide", r"model.width: got 'wide', allowed is a number \(element 2 of 2\)"),
        ("model.name=[vgg16,vgg17]", r"model.name: got 'vgg17', .*did you mean 'vgg16'\? \(element 2 of 2\)"),
        ("train.seed=1,2,1", r"train.seed: got 1 twice in a list with one run per element"),
        ("train.seed=[]", r"train.seed: got an empty list, allowed is a value, or a list"),
        ("train.seed=1,,2", r"train.seed: got '1,,2', a list with an empty element; null takes a value away"),
        ("parallelism.plan=[2, 2]", r"parallelism.plan: got 2 twice in a list with .*; did you mean 2-2\?"),
        ("parallelism.cuts=a,b", r"cuts: got 'a,b', allowed is a list of text or null; did you mean .*cuts=\[a,b\]'\?"),
        ("name=a,b", r"name: got a list, allowed is text"),
        ("train.sede=1,2", r"train.sede: unknown key, .*did you mean 'seed'"),
        ("train=1,2", r"train: got .*allowed is a mapping"),
        (f"train.seed={','.join(map(str, range(65)))}", rf"the lists make 65 runs, allowed are at most {MOST_RUNS}"),
    ],
)
def test_a_wrong_list_is_refused_in_one_sentence(write: Write, override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        runs(write, override)
    assert len(caught.value.faults) == 1, str(caught.value)


def test_a_fault_of_some_runs_names_the_first_of_them(write: Write) -> None:
    with pytest.raises(RecipeError, match=r"plan: got 4-4, .*the cluster has 4 .*\(with servers=1\)") as caught:
        runs(write, "parallelism.plan=4-4", "cluster.servers=2,1")
    assert len(caught.value.faults) == 1


def test_zipped_lists_are_equally_long(write: Write) -> None:
    message = r"--zip takes the lists' elements together, .* train.seed has 2, train.minibatch_size has 3"
    with pytest.raises(RecipeError, match=message):
        runs(write, "train.seed=0,1", "train.minibatch_size=8,16,32", zipped=True)


def test_a_fault_of_every_run_is_reported_once(write: Write) -> None:
    with pytest.raises(RecipeError) as caught:
        runs(write, "train.seed=0,1,2", "train.max_epochs=0")
    assert [str(fault) for fault in caught.value.faults] == [
        "command line: train.max_epochs: got 0, allowed is a whole number of at least 1, at most 2147483648"
    ]


@pytest.mark.parametrize(
    ("written", "parts"),
    [
        ("4", None),
        ("'a,b'", None),
        ("[a, b]", None),
        ("${oc.env:X,3}", None),
        ("it's", None),
        ("4,", ["4"]),
        ("a,'b,c'", ["a", "'b,c'"]),
        ("[a, ']'],[b]", ["[a, ']']", "[b]"]),
    ],
)
def test_commas_outside_brackets_and_quotes_separate_elements(written: str, parts: list[str] | None) -> None:
    assert elements(written) == parts


def test_a_run_with_a_mode_is_named_by_the_mode(write: Write) -> None:
    loaded = runs(write, "parallelism.plan=auto", "train.seed=1,2", "parallelism.mode=dp,dp-asp")
    assert [each.run_name for each in loaded] == [
        "small-seed=1,dp",
        "small-seed=1,dp-asp",
        "small-seed=2,dp",
        "small-seed=2,dp-asp",
    ]
