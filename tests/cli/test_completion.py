"""Completion in the shell, by click's interface and in bash."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from pipebench.cli.main import cli
from pipebench.recipe.catalog import recipe_names


def completed(args: list[str], incomplete: str) -> list[str]:
    found = ShellComplete(cli, {}, "pipebench", "_PIPEBENCH_COMPLETE").get_completions(args, incomplete)
    return [item.value for item in found]


@pytest.mark.parametrize("command", ["run", "plan", "profile", "show", "draw", "largest"])
def test_words_become_recipes_and_keys(command: str) -> None:
    assert completed([command], "quickstart/") == [n for n in recipe_names() if n.startswith("quickstart/")]
    assert completed([command, "quickstart"], "train.min") == ["train.minibatch_size="]
    assert completed([command], "cluster.s") == ["cluster.servers="]
    assert completed([command], "model.") == ["model.name="]
    assert completed([command], "nothing-of-this") == []


def test_commands_and_options_are_completed_too() -> None:
    assert "profile" in completed([], "pro")
    assert "--seeds" in completed(["run"], "--se")


def test_the_lines_of_the_documentation_work_in_bash(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to.md").read_text()
    installed = "import sys; from pipebench.cli.main import main; sys.argv[0] = 'pipebench'; main()"
    (tmp_path / "pipebench").write_text(f'#!/bin/sh\nexec {sys.executable} -c "{installed}" "$@"\n')
    (tmp_path / "pipebench").chmod(0o755)
    lines = [line for line in page.splitlines() if "bash_source" in line or line.startswith("complete ")]
    asked = (
        "COMP_WORDS=(pipebench run quickstart/g); COMP_CWORD=2; _pipebench_completion pipebench; echo ${COMPREPLY[@]}"
    )
    script = "\n".join([f"PATH={tmp_path}:$PATH", *lines, asked])
    answer = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["quickstart/gpipe"]
    assert len(lines) == 2
