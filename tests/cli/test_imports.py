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
