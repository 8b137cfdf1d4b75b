"""Imports decide how long a command takes to start: these commands need none of the large libraries.

One process runs them one after the other: modules of the first remain for the others, but none needs a large one.
"""

import subprocess
import sys
from pathlib import Path

HEAVY = ("torch", "torchvision", "mlflow", "sympy", "matplotlib", "pydantic")
COMMANDS = [
    "--version",
    "run --help",
    "plan --help",
    "ls optimizers",
    "show quickstart/dp train.schedule.name=step_lr train.schedule.step_size=9",
    "show papers/does-not-exist",
]


def python(code: str, folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_command_that_builds_nothing_imports_nothing_large(tmp_path: Path) -> None:
    code = f"""
import sys
from pipebench.cli.main import cli
for words in {COMMANDS!r}:
    code = cli.main(words.split(), standalone_mode=False)
    assert code == (2 if "does-not-exist" in words else 0), words
    found = [name for name in {HEAVY!r} if name in sys.modules]
    assert not found, (words, found)
"""
    python(code, tmp_path)


def test_help_ls_and_show_need_no_torch(tmp_path: Path) -> None:
    """Of all clusters and a recipe of each folder; nor does a mistyped key."""
    code = """
import sys
sys.modules.update(torch=None, torchvision=None, mlflow=None)  # importing them raises
from pipebench.cli.group import COMMANDS
from pipebench.cli.main import cli
from pipebench.recipe.catalog import cluster_names, recipe_names
recipes = {name.rpartition("/")[0]: name for name in recipe_names()}.values()
shown = [*cluster_names(), *recipes]
assert len(shown) > 20
for words in (["--help"], *([name, "--help"] for name in COMMANDS), ["ls"], *(["show", name] for name in shown)):
    assert cli.main(words, standalone_mode=False) == 0, words
for command in ("run", "plan", "draw", "profile", "largest"):
    assert cli.main([command, "quickstart", "train.sed=1"], standalone_mode=False) == 2, command
"""
    python(code, tmp_path)
