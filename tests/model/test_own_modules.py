"""Where users' modules are found, and which of two with one name."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pipebench.errors import TracingError
from pipebench.model.graph import trace
from pipebench.recipe.load import load
from pipebench.recipe.preflight import preflight
from pipebench.recipe.targets import import_target
from pipebench.train.profiled_model import arguments_of, initial_model
from pipebench.zoo.measures import squared_error
from pipebench.zoo.plain import DatasetPair
from tests.lengths import Reader, texts
from tests.model.conftest import CODE, OWN, RECIPE
from tests.model.test_own_code import run


def test_modules_are_found_beside_the_recipe_and_in_the_working_directory(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    preflight(load("mine/r.yaml"))
    monkeypatch.delitem(sys.modules, OWN)
    (project / "base.yaml").write_text("extends: mine/r.yaml\nname: other\n")
    preflight(load("base.yaml"))
    monkeypatch.delitem(sys.modules, OWN)
    (project / "elsewhere").mkdir()
    (project / "elsewhere" / "r.yaml").write_text(RECIPE)
    monkeypatch.chdir(project / "mine")
    preflight(load("../elsewhere/r.yaml"))


def test_two_modules_of_one_name_are_not_mixed_up(project: Path) -> None:
    (project / "other").mkdir()
    (project / "other" / f"{OWN}.py").write_text(CODE)
    (project / "other" / "r.yaml").write_text(RECIPE.replace("stranger\n", "other\n"))
    result = run("../other/r.yaml")
    assert result.exit_code == 2
    assert f"has the name of another module in use, {project}/mine/{OWN}.py: rename one of them" in result.stderr


def test_a_module_beside_the_recipe_comes_before_one_in_the_working_directory(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "elsewhere").mkdir()
    (project / "elsewhere" / f"{OWN}.py").write_text("raise RuntimeError('not this one')\n")
    monkeypatch.chdir(project / "elsewhere")
    monkeypatch.delitem(sys.modules, OWN, raising=False)
    loaded = load("../mine/r.yaml")
    preflight(loaded)
    assert type(initial_model(loaded.recipe)).__name__ == "Net"


def test_a_module_finds_its_neighbours_before_what_is_installed(project: Path) -> None:
    (project / "mine" / "omegaconf_of_mine.py").write_text("import colorsys_of_mine\nvalue = colorsys_of_mine.value\n")
    (project / "mine" / "colorsys_of_mine.py").write_text("def value():\n    return 7\n")
    assert import_target("omegaconf_of_mine:value")() == 7


@pytest.mark.usefixtures("project")
def test_a_model_is_the_same_in_every_process_whatever_it_draws_from() -> None:
    loaded = load("r.yaml")
    preflight(loaded)
    first, second = (initial_model(loaded.recipe).state_dict() for _ in range(2))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_code_is_found_while_another_thread_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python iterates over its finders without a lock; a run's import of MLflow added one, and the command failed."""

    class Disturbed(dict[str, Any]):
        left = 2

        def items(self) -> Any:
            Disturbed.left -= 1
            if Disturbed.left >= 0:
                raise RuntimeError("dictionary changed size during iteration")
            return super().items()

    monkeypatch.setattr(sys, "path_importer_cache", Disturbed(sys.path_importer_cache))
    (tmp_path / "found_meanwhile.py").write_text("def made():\n    return 1\n")
    assert import_target("found_meanwhile:made", [tmp_path])() == 1
    assert Disturbed.left < 0


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(("precision", "types"), [("fp32", {None}), ("bf16", {None, torch.bfloat16})])
def test_examples_have_the_types_of_the_precision(precision: str, types: set[torch.dtype | None]) -> None:
    recipe = load("r.yaml", [f"train.precision={precision}"]).recipe
    examples = arguments_of(recipe, DatasetPair([(torch.ones(3), 1)], [(torch.ones(3), 1)], squared_error, {})).examples
    assert {example.low_type for example in examples} == types


class Unrolled(Reader):
    """Goes through a text token by token."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        return self.out(torch.stack([hidden[:, place] for place in range(ids.shape[1])]).sum(0))


@pytest.mark.usefixtures("project")
def test_a_length_that_varies_decides_nothing_while_tracing() -> None:
    given = arguments_of(load("r.yaml").recipe, texts())
    assert len({example.tensors[0].shape[1] for example in given.examples}) == 2
    assert trace(Reader(), fed=given.fed, examples=given.examples)
    with pytest.raises(TracingError, match="Unrolled"):
        trace(Unrolled(), fed=given.fed, examples=given.examples)
