"""Folders of distributed runs: created, changed, and found by parts of a run's name."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipebench.errors import UserError
from pipebench.run.folder import RunFacts, RunFolder, create, find, new_run_id, resumed
from pipebench.tracking.record import RecordFolder, Sent
from tests.recipe.conftest import VALID


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make(recipe: str = "small", digits: str | None = None, text: str = "name: small\n") -> RunFolder:
    with pytest.MonkeyPatch.context() as patch:
        if digits is not None:
            patch.setattr("pipebench.run.folder.secrets.token_hex", lambda _: digits)
        facts = RunFacts(
            new_run_id(recipe), f"{recipe}-seed3", "study", seed=3, words=("small.yaml", "train.seed=3"),
            parent_mlflow_run_id="p1", verbose=True, started_at_s=None,
        )  # fmt: skip
        return create(facts, text)


def test_a_folder_names_its_run() -> None:
    folder = make()
    assert folder.path.parent == Path("pipebench-runs").absolute()
    assert folder.run_id.startswith("small-")
    assert len(folder.run_id) == len("small-") + 8
    assert json.loads((folder.path / "run.json").read_text()) == {
        "run_id": folder.run_id, "name": "small-seed3", "suite": "study", "seed": 3,
        "words": ["small.yaml", "train.seed=3"], "parent_mlflow_run_id": "p1", "verbose": True,
            "code_folders": [], "silent": False, "started_at_s": None,
    }  # fmt: skip
    assert folder.recipe_path.read_text() == "name: small\n"
    assert folder.read().words == ("small.yaml", "train.seed=3")
    assert folder.checkpoints.latest() == (None, [])
    assert (folder.result(), folder.mlflow_run_id) == (None, None)


def test_two_runs_have_two_folders() -> None:
    assert make().run_id != make().run_id


def test_facts_are_changed_and_stored() -> None:
    folder = make()
    folder.update(started_at_s=7.5)
    assert find(folder.run_id).read().started_at_s == 7.5
    assert folder.read().seed == 3
    assert sorted(path.name for path in folder.path.iterdir()) == ["recipe.yaml", "run.json"]


def test_a_run_is_found_by_any_of_its_names(tmp_path: Path) -> None:
    first, second = make("small", "aa000000"), make("small", "ab000000")
    other = make("small-gpipe", "cc000000")
    RecordFolder(second.record_path).write_sent(Sent("0123456789abcdef", 0))
    assert find("small-aa000000") == first
    assert find("small-ab") == second
    assert find("0123456789abcdef") == second
    assert find("small-g") == other
    assert find("pipebench-runs/small-aa000000/") == first
    assert find(str(first.path)) == first


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ("small-a", r"^run: got 'small-a', with which 2 runs begin: small-aa000000, small-ab000000$"),
        ("smal-aa000000", r"allowed are the runs in pipebench-runs/ \(.*\) and .* did you mean 'small-aa000000'\?$"),
        ("", r"^run: got '', allowed are the runs in pipebench-runs/"),
        ("../elsewhere", r"^run: got '../elsewhere', allowed are"),
    ],
)
def test_an_ambiguous_or_unknown_run_is_one_sentence(run: str, message: str) -> None:
    make("small", "aa000000"), make("small", "ab000000")
    with pytest.raises(UserError, match=message) as caught:
        find(run)
    assert "\n" not in str(caught.value)


def test_no_run_at_all() -> None:
    with pytest.raises(
        UserError, match=r"^run: got 'small', but pipebench-runs/ in the working directory holds no run$"
    ):
        find("small")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"run_id": 3}', '{"unknown": 1}', "\xff"])
def test_a_damaged_description_is_named_and_hides_no_other_run(content: str) -> None:
    damaged, other = make("small", "aa000000"), make("small", "ab000000")
    RecordFolder(other.record_path).write_sent(Sent("m2", 0))
    (damaged.path / "run.json").write_bytes(content.encode("latin-1"))
    assert find("m2") == other
    with pytest.raises(UserError, match=r"run\.json: isn't the description of a run"):
        find("small-aa").read()


def test_a_working_directory_that_isnt_writable_is_named() -> None:
    Path("pipebench-runs").write_text("a file in the way")
    with pytest.raises(UserError, match=r"the run's folder can't be made: "):
        make()


def test_a_recipe_s_full_name_matches_only_its_run() -> None:
    """0.1.0: `quickstart` was answered with two runs, though only one was of the recipe of that name."""
    own = make("small", "aa000000")
    make("small-gpipe", "bb000000"), make("smaller", "cc000000")
    assert find("small") == own
    make("small", "dd000000")
    with pytest.raises(UserError, match=r"'small', with which 2 runs begin: small-aa000000, small-dd000000$"):
        find("small")


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("train.optimizer.name=adam", "train.optimizer.name: a run that goes on keeps it, .*"),
        ("train.optimizer={name: adam, lr: 1}", "train.optimizer.name: a run that goes on keeps it, .*"),
        ("model.width=0.5", "model: a run that goes on keeps it, .*"),
        (
            "train.optimizer.lr=1,2",
            "train.optimizer.lr: got a list, one value is needed here: --resume goes on with .*",
        ),
        ("train.optimizer.lr=x", "train.optimizer.lr: got 'x', allowed is a number"),
        ("train.optimizer={name: sgd, lr: x}", "train.optimizer.lr: got 'x', allowed is a number"),
    ],
)
def test_options_that_a_resumed_run_can_t_take_are_one_sentence(
    word: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.2.0: another optimizer was reported by the options of the stored one, a list as a sweep of `pipebench run`."""
    folder = make(text=VALID.replace("momentum: 0.9", "momentum: 0.9, dampening: 0, nesterov: false"))
    monkeypatch.setattr(RunFolder, "checkpoints", SimpleNamespace(steps=lambda: [8], epochs=lambda: 1.0))
    with pytest.raises(UserError) as raised:
        resumed(folder.run_id, [word])
    assert re.fullmatch(f"command line: {problem}", str(raised.value))
