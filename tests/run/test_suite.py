"""Experiments in MLflow are named by the folders of recipes."""

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
def project(tmp_path: Path) -> Path:
    return tmp_path / "work" / "project"


def own(path: Path) -> LoadedRecipe:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("extends: quickstart/dp.yaml\nname: own\n")
    return load_file(path)


def test_users_recipes_are_named_by_their_folder_below_the_working_directory(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.mkdir(parents=True)
    monkeypatch.chdir(project)
    assert suite_name([own(project / "try.yaml")]) == "try"
    assert suite_name([own(project / "gnmt8" / "a.yaml"), own(project / "gnmt8" / "b.yaml")]) == "gnmt8"
    assert suite_name([own(project / "wide" / "gnmt8" / "a.yaml")]) == "wide/gnmt8"
    assert suite_name([own(Path("try.yaml"))]) == "try"
    assert suite_name([own(project / "try.yaml"), own(project / "again.yaml")]) == "project", "0.1.0 said `comparison`"
    assert suite_name([own(project / "try.yaml"), own(project / "gnmt8" / "a.yaml")]) == "try, gnmt8"


def test_recipes_elsewhere_are_named_by_the_end_of_their_path(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project.mkdir(parents=True)
    elsewhere = own(project.parent / "other" / "gnmt8" / "a.yaml")
    monkeypatch.chdir(project)
    assert suite_name([elsewhere]) == "other/gnmt8"


def test_a_recipe_stored_by_a_run_is_named_by_its_name(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project.mkdir(parents=True)
    monkeypatch.chdir(project)
    assert suite_name([own(project / "mlartifacts" / "suite" / "1f0c9a7e" / "artifacts" / "recipe.yaml")]) == "own"
