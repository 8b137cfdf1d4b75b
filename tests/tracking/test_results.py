"""Results found again: by recipe and code, in a real SQLite store, and by a file of what the recipe names."""

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

import pipebench
from pipebench.errors import UserError
from pipebench.recipe.load import load
from pipebench.tracking import RunLog, Tracking, recipe_hash, source_version
from pipebench.tracking.results import RecordedRuns
from pipebench.train.result import DIVERGED, INTERRUPTED, RunResult
from tests.tracking.records import RESULT

VERSION = "0+abc"


def recorded(tracking: Tracking, recipe: str, result: RunResult | None, **more: str) -> RunLog:
    """Return a finished run of a recipe."""
    tags: Mapping[str, str] = {"recipe_hash": recipe, "pipebench_version": VERSION, **more}
    run = tracking.start("found", params={}, tags=tags)
    run.finish(result, status=None if result else "KILLED")
    return run


def test_the_newest_run_of_a_recipe_is_found(tracking: Tracking) -> None:
    recorded(tracking, "two", replace(RESULT, sentence="the first"))
    second = recorded(tracking, "two", replace(RESULT, sentence="the second"))
    recorded(tracking, "three", RESULT)
    runs = RecordedRuns()
    found = runs.newest("two", VERSION)
    assert found is not None
    assert (found.run_id, found.experiment_id) == (second.run_id, tracking.store.experiment_id)
    assert (found.name, found.result) == ("found", replace(RESULT, sentence="the second"))
    assert found.result.points == RESULT.points
    assert runs.newest("two", "0+other") is None
    assert runs.newest("none", VERSION) is None
    assert runs.newest("two", VERSION) == found
    assert runs.result_of(found.run_id) == found.result


def test_what_has_no_result_of_this_recipe_is_passed_over(tracking: Tracking, folder: Path) -> None:
    good = recorded(tracking, "passed", RESULT)
    recorded(tracking, "passed", None)
    recorded(tracking, "passed", replace(RESULT, outcome=INTERRUPTED))
    recorded(tracking, "passed", RESULT, **{"resumed.recipe_hash": "another"})
    lost = recorded(tracking, "passed", RESULT)
    shutil.rmtree(folder / "mlartifacts" / "suite" / str(lost.run_id))
    goes_on = tracking.start("found", params={}, tags={"recipe_hash": "passed", "pipebench_version": VERSION})
    goes_on.result(RESULT)
    found = RecordedRuns().newest("passed", VERSION)
    assert found is not None
    assert found.run_id == good.run_id
    goes_on.finish()
    assert RecordedRuns().newest("passed", VERSION) != found


def test_a_run_that_diverged_is_found_because_it_would_again(tracking: Tracking) -> None:
    run = recorded(tracking, "diverged", replace(RESULT, outcome=DIVERGED))
    found = RecordedRuns().newest("diverged", VERSION)
    assert found is not None
    assert found.run_id == run.run_id


def test_where_nothing_was_recorded_nothing_is_made(tmp_path: Path) -> None:
    assert RecordedRuns(f"sqlite:///{tmp_path}/mlflow.db").newest("two", VERSION) is None
    assert not any(tmp_path.iterdir())


def test_a_store_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    path.write_text("no database")
    with pytest.raises(UserError, match=rf"MLflow at sqlite:///{path} can't be read: .*not a database"):
        RecordedRuns(f"sqlite:///{path}").newest("two", VERSION)


def test_a_recipe_s_hash_is_of_all_but_its_name(tmp_path: Path) -> None:
    own = recipe_hash(load("quickstart"))
    assert len(own) == 16
    assert own == recipe_hash(load("quickstart", ["name=other"]))
    others = (["train.seed=1"], ["parallelism.depth=1"], ["cluster.servers=2"], ["train.optimizer.lr=0.03"])
    assert len({own, *(recipe_hash(load("quickstart", each)) for each in others)}) == 5


def test_files_count_by_what_is_in_them(tmp_path: Path) -> None:
    cluster, plan = tmp_path / "mine.yaml", tmp_path / "profile.json"
    text = (Path(pipebench.__file__).parent.parent / "recipes" / "clusters" / "cluster-a.yaml").read_text()

    def hashed(bandwidth: str, profile: str) -> str:
        cluster.write_text(text.replace("value: 10 GB/s", f"value: {bandwidth}"))
        plan.write_text(profile)
        return recipe_hash(load("quickstart", [f"cluster.name={cluster}", f"engine.timing={plan}"]))

    first = hashed("10 GB/s", "{}")
    assert hashed("10 GB/s", "{}") == first
    assert len({first, hashed("11 GB/s", "{}"), hashed("10 GB/s", "{ }")}) == 3


def test_data_may_lie_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = set()
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv("PIPEBENCH_DATA", str(tmp_path / name))
        hashes.add(recipe_hash(load("vgg16/4x4-a-pipedream", ["dataset.root=${oc.env:PIPEBENCH_DATA}/imagenet"])))
    assert len(hashes) == 1


def test_a_version_is_of_all_source_files() -> None:
    number, _, digits = source_version().partition("+")
    root = Path(pipebench.__file__).parent.parent
    files = sorted((root / "pipebench").rglob("*.py")) + sorted((root / "zoo").rglob("*.py"))
    content = b"".join(f"{path.relative_to(root)}\0".encode() + path.read_bytes() for path in files)
    assert (number, digits) == (pipebench.__version__, hashlib.sha256(content).hexdigest()[:12])


def test_own_code_counts_by_the_module_that_a_target_names(tmp_path: Path) -> None:
    code = "from torch import nn\n\n\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))\n"
    (tmp_path / "own_counted.py").write_text(code)
    recipe = tmp_path / "own.yaml"
    recipe.write_text("extends: quickstart/dp\nmodel: {name: null, target: 'own_counted:net', width: null}\n")
    # What the base gives to its own model an own one doesn't take.
    extended = load("quickstart/dp").recipe.model
    nothing = [f"model.{key}=null" for key in extended if key not in ("name", "target", "width")]
    before = recipe_hash(load(str(recipe), nothing, builds=False))
    assert before == recipe_hash(load(str(recipe), nothing, builds=False))
    (tmp_path / "own_counted.py").write_text(f"{code}\n")
    assert before != recipe_hash(load(str(recipe), nothing, builds=False))
