"""What a command imports decides how long it takes to start: these need none of the large libraries."""

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "torchvision", "mlflow", "sympy", "matplotlib", "pydantic")


@pytest.mark.parametrize(
    "words",
    [
        "--help",
        "--version",
        "run --help",
        "plan --help",
        "ls",
        "ls optimizers",
        "show quickstart",
        "show quickstart/dp train.schedule.name=step_lr train.schedule.step_size=9",
        "show papers/does-not-exist",
    ],
)
def test_a_command_that_builds_nothing_imports_nothing_large(words: str, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pipebench.cli.main import cli\n"
        f"code = cli.main({words.split()!r}, standalone_mode=False)\n"
        f"sys.stderr.write(' '.join(name for name in {HEAVY!r} if name in sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert not ran.stderr.startswith(HEAVY), ran.stderr
    assert ran.stdout or "no such file" in ran.stderr


EVERYTHING = """
import sys
sys.modules.update(torch=None, torchvision=None)  # importing them raises
from pipebench.cli.group import COMMANDS
from pipebench.cli.main import cli
from pipebench.recipe.catalog import cluster_names, recipe_names
for words in (["--help"], *([name, "--help"] for name in COMMANDS), ["ls"], *(["show", name] for name in NAMES)):
    assert cli.main(words, standalone_mode=False) == 0, words
"""


@pytest.mark.parametrize("names", ["cluster_names()", "recipe_names()"])
def test_help_ls_and_show_need_no_torch(names: str) -> None:
    done = subprocess.run([sys.executable, "-c", EVERYTHING.replace("NAMES", names)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["run", "plan", "draw", "profile", "largest"])
def test_a_mistyped_key_costs_no_import_of_torch(command: str) -> None:
    code = (
        "import sys\n"
        "sys.modules.update(torch=None, mlflow=None)\n"
        "from pipebench.cli.main import cli\n"
        f"sys.exit(cli.main([{command!r}, 'quickstart', 'train.sed=1'], standalone_mode=False))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "train.sed: unknown key" in done.stderr
