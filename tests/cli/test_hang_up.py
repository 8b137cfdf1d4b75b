"""A terminal that is closed while a command runs."""

import os
import pty
import re
from pathlib import Path

import pytest

from reports.studies.watched_run import recorded
from tests.commands import CopiedCommand
from tests.patience import within_patience
from tests.recipes import uniform_recipe


@pytest.mark.parametrize("kind", ["virtual", "distributed"])
def test_a_run_whose_terminal_is_closed_stops_with_a_checkpoint(kind: str, tmp_path: Path) -> None:
    """Its further output is dropped."""
    (tmp_path / "small.yaml").write_text(uniform_recipe(2, 64, 8, 8, "mode: gpipe, plan: 1-1"))
    words = ["run", "small.yaml", f"engine.kind={kind}", "train.max_epochs=1000000", "train.target=null"]
    ours, theirs = pty.openpty()
    terminal = Path(os.ttyname(theirs))  # becomes the session's, whose leader gets SIGHUP when it is closed
    with CopiedCommand(words, tmp_path, terminal, terminal, {"TERM": "xterm"}) as process:
        said = b""
        with within_patience():
            while not re.search(rb"epoch +\d+.*train_loss", said):
                said += os.read(ours, 1 << 16)
        os.close(theirs)
        os.close(ours)
        assert process.wait() == 130, said
    (run,) = recorded(tmp_path)["runs"]
    assert (run["status"], run["tags"]["outcome"]) == ("KILLED", "interrupted")
    assert list(tmp_path.glob("pipebench-runs/*/checkpoints/*/manifest.json"))
