"""What groups runs in MLflow is named by where their recipes are."""

from pathlib import Path

import pytest

from pipebench.recipe.load import LoadedRecipe, load, load_file
from pipebench.run.suite import suite_name


@pytest.mark.parametrize(
    ("references", "name"),
    [
        (["gnmt8/single"], "gnmt8"),
        (["small/gnmt8/single", "small/gnmt8/dp"], "small/gnmt8"),
        (["small/gnmt8/single", "small/vgg16/single"], "small"),
        (["gnmt8/single", "small/gnmt8/single"], "gnmt8, small/gnmt8"),
        (["quickstart"], "quickstart"),
    ],
)
def test_shipped_recipes_are_named_by_their_path(references: list[str], name: str) -> None:
    assert suite_name([load(each) for each in references]) == name


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    return tmp_path / "work" / "mine"


def own(path: Path) -> LoadedRecipe:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("extends: quickstart/dp.yaml\nname: own\n")
    return load_file(path)


def test_own_recipes_are_named_by_their_folder_below_the_working_directory(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine.mkdir(parents=True)
    monkeypatch.chdir(mine)
    assert suite_name([own(mine / "try.yaml")]) == "try"
    assert suite_name([own(mine / "gnmt8" / "a.yaml"), own(mine / "gnmt8" / "b.yaml")]) == "gnmt8"
    assert suite_name([own(mine / "wide" / "gnmt8" / "a.yaml")]) == "wide/gnmt8"
    assert suite_name([own(Path("try.yaml"))]) == "try"
    assert suite_name([own(mine / "try.yaml"), own(mine / "again.yaml")]) == "mine", "0.1.0 said `comparison`"
    assert suite_name([own(mine / "try.yaml"), own(mine / "gnmt8" / "a.yaml")]) == "try, gnmt8"


def test_recipes_elsewhere_are_named_by_the_end_of_their_path(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine.mkdir(parents=True)
    elsewhere = own(mine.parent / "other" / "gnmt8" / "a.yaml")
    monkeypatch.chdir(mine)
    assert suite_name([elsewhere]) == "other/gnmt8"


def test_a_recipe_that_a_run_has_kept_goes_by_its_own_name(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine.mkdir(parents=True)
    monkeypatch.chdir(mine)
    assert suite_name([own(mine / "mlartifacts" / "suite" / "1f0c9a7e" / "artifacts" / "recipe.yaml")]) == "own"
