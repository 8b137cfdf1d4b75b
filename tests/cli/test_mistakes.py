"""Mistakes with what commands write, list and read, each with the one sentence that says so; exit code 2."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from pipebench.cli.main import cli
from tests.recipes import uniform_recipe

MISTAKES = [
    ("plan small.yaml --picture plan.txt", "--picture: got plan.txt, allowed is a name such as plan.png, of a picture"),
    ("draw small.yaml --picture memory.jpg", "--picture: got memory.jpg, allowed is a name such as memory.png"),
    ("draw small.yaml --of occupancy", "--of occupancy says what --picture draws: add --picture occupancy.png"),
    ("profile small.yaml --out layers.csv", "--out: got layers.csv, allowed is a name such as layers.json"),
    ("profile small.yaml --picture p.svg", "--picture: got p.svg, allowed is a name such as p.png"),
    ("ls recipes gnmt99", "none of the recipes has 'gnmt99' in its name or its description"),
    (f"show {'a' * 300}", f"{'a' * 77}...: no such file, folder or short name"),
    ("report small.yaml", "small.yaml: is a recipe, not a report: `pipebench run small.yaml`"),
]


@pytest.mark.parametrize(("words", "told"), MISTAKES)
def test_a_mistake_is_one_sentence(words: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(uniform_recipe(8, 2000, 250, minibatch_size=250))
    done = CliRunner().invoke(cli, words.split())
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith(f"pipebench: error: {told}")
    assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["small.yaml"], "nothing has run"


def test_a_link_to_itself_in_a_folder_of_recipes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop.yaml").symlink_to("loop.yaml")
    done = CliRunner().invoke(cli, ["run", "."])
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith("pipebench: error: loop.yaml: can't be read: Too many levels of symbolic links")
