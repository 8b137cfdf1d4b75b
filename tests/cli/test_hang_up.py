"""A terminal that is closed while a command runs."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from reports.studies.watched_run import end, recorded
from tests.patience import PATIENCE_S, within_patience
from tests.recipes import uniform_recipe

ROOT = Path(__file__).parents[2]
# A shell's work: the terminal becomes the session's, whose leader gets SIGHUP when it is closed.
IN_TERMINAL = """\
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGHUP, signal.SIG_DFL)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "pipebench", *sys.argv[1:]])
"""


@pytest.mark.parametrize("kind", ["virtual", "distributed"])
def test_a_run_whose_terminal_is_closed_stops_with_a_checkpoint(kind: str, tmp_path: Path) -> None:
    """What it goes on to print is dropped."""
    (tmp_path / "small.yaml").write_text(uniform_recipe(2, 64, 8, 8, "mode: gpipe, plan: 1-1"))
    words = ["run", "small.yaml", f"engine.kind={kind}", "train.max_epochs=1000000", "train.target=null"]
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", IN_TERMINAL, *words],
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "xterm"},
    )  # fmt: skip
    try:
        os.close(theirs)
        said = b""
        with within_patience():
            while not re.search(rb"epoch +\d+.*train_loss", said):
                said += os.read(ours, 1 << 16)
        os.close(ours)
        assert process.wait(PATIENCE_S) == 130, said
    finally:
        end(process.pid)
    (run,) = recorded(tmp_path)["runs"]
    assert (run["status"], run["tags"]["outcome"]) == ("KILLED", "interrupted")
    assert list(tmp_path.glob("pipebench-runs/*/checkpoints/*/manifest.json"))
