"""Profiles for planning that are read from the cache before torch is imported."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipebench.cli.main import cli
from pipebench.errors import RecipeError
from pipebench.profile import cache
from pipebench.recipe.catalog import find
from pipebench.recipe.load import LoadedRecipe, load_each
from pipebench.train import profile_cache, profiled_model
from pipebench.train.profile_cache import to_plan
from tests.patience import without_phases


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIPEBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the recipes whose models are built, in order."""
    names: list[str] = []
    real = profiled_model.profile_model

    def profile_model(recipe: Any, *arguments: Any, **options: Any) -> Any:
        names.append(recipe.name)
        return real(recipe, *arguments, **options)

    monkeypatch.setattr(profiled_model, "profile_model", profile_model)
    return names


def recipe(*overrides: str) -> LoadedRecipe:
    return load_each(find("quickstart", list), overrides, builds=False)[0]


def test_a_cached_profile_equals_a_computed_one(built: list[str]) -> None:
    made, again = to_plan(recipe()), to_plan(recipe())
    assert len(built) == 1
    assert (made.profile, made.dataset.num_train) == (again.profile, again.dataset.num_train)
    whole = profiled_model.profile_model(recipe().recipe, recipe().cluster, wanted=profiled_model.Wanted(plans=True))
    assert again.profile == whole.profile
    assert again.graph is None
    graph = to_plan(recipe(), needs_graph=True).graph
    assert graph is not None
    assert [layer.name for layer in graph.layers] == [row.name for row in again.profile.rows[:-1]]


def test_options_that_a_profile_depends_on_invalidate_it(built: list[str]) -> None:
    every = (
        (),
        ("model.width=0.25",),
        ("dataset.image_size=48", "model.image_size=48"),
        ("train.minibatch_size=16",),
        ("train.precision=bf16",),
        ("train.optimizer.momentum=0",),
        ("cluster.name=cluster-c",),
    )
    for count, options in enumerate(every, 1):
        for _ in range(2):
            to_plan(recipe(*options))
            assert len(built) == count, options


def test_changed_code_or_torch_invalidates_a_profile(built: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    to_plan(recipe())
    monkeypatch.setattr(profile_cache, "code_hash", lambda: "another")
    to_plan(recipe())
    monkeypatch.setattr("importlib.metadata.version", lambda _name: "9.9")
    to_plan(recipe())
    assert len(built) == 3


@pytest.mark.parametrize("package", ["pipebench", "pipebench.zoo"])
def test_all_code_of_a_package_counts(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "copy" / "inner").mkdir(parents=True)
    (tmp_path / "copy" / "__init__.py").write_text("")
    (tmp_path / "copy" / "inner" / "part.py").write_text("a = 1\n")
    monkeypatch.setattr(f"{package}.__file__", str(tmp_path / "copy" / "__init__.py"))
    before = cache.code_hash.__wrapped__()
    assert cache.code_hash.__wrapped__() == before
    (tmp_path / "copy" / "inner" / "part.py").write_text("a = 2\n")
    assert cache.code_hash.__wrapped__() != before


def test_measured_profiles_and_user_models_are_not_read_from_this_cache(
    built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object) -> None:
        raise AssertionError("the cache was asked")

    monkeypatch.setattr(profile_cache, "cached", refuse)
    loaded = recipe()
    own = replace(loaded.recipe, model={"target": "torch.nn:Identity"})
    for each in (
        replace(loaded, recipe=replace(loaded.recipe, engine=replace(loaded.recipe.engine, timing="p.json"))),
        replace(loaded, recipe=own),
    ):
        with pytest.raises(Exception, match=r"p\.json|quickstart|Identity|forward|traced|inputs"):
            to_plan(each)


def test_a_model_s_notes_on_its_options_are_printed_by_plan_and_not_by_show() -> None:
    with pytest.raises(RecipeError, match=r"model: vgg16: width is -1\.0, allowed is more than 0") as built:
        load_each(find("quickstart", list), ["model.width=-1.0"])
    with pytest.raises(RecipeError) as planned:
        to_plan(recipe("model.width=-1.0"))
    assert planned.value.faults == built.value.faults
    said = CliRunner().invoke(cli, ["plan", "quickstart", "model.width=-1.0"])
    message = without_phases(said.stderr)
    assert (said.exit_code, said.stdout, message) == (2, "", f"pipebench: error: {built.value}\n")
    assert CliRunner().invoke(cli, ["show", "quickstart", "model.width=-1.0"]).exit_code == 0
    several = CliRunner().invoke(cli, ["plan", "quickstart", "model.width=0.25,-1.0"])
    assert "model: vgg16: width is -1.0, allowed is more than 0 (with width=-1.0)" in several.stderr


def test_a_plan_with_a_cached_profile_imports_neither_torch_nor_mlflow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "quickstart", "--json", "--no-others"]
    assert cli.main(words, standalone_mode=False) == 0
    first = capsys.readouterr().out
    code = (
        "import sys\nfrom pipebench.cli.main import cli\n"
        f"assert cli.main({words}, standalone_mode=False) == 0\n"
        "sys.stderr.write(str({'torch', 'pipebench.tracking'} & {*sys.modules}))"
    )
    second = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    # The last line: above it, a slow machine's command may have said that it is starting.
    assert second.stderr.splitlines()[-1] == "set()"
    answers = [json.loads(each) for each in (first, second.stdout)]
    for answer in answers:
        del answer["took_s"], answer["solve_s"]
    assert answers[0] == answers[1]
