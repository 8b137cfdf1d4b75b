"""The lock on a run's folder: held by one process, freed by its death."""

import errno
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pipebench.errors import UserError
from pipebench.run.lock import locked
from tests.patience import PATIENCE_S

HOLDER = """
import sys
from pathlib import Path
from pipebench.run.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def hold(folder: Path) -> "subprocess.Popen[str]":
    """Start a process that holds a folder until its input ends."""
    words = [sys.executable, "-c", HOLDER, str(folder)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_one_process_holds_a_folder_until_it_dies(tmp_path: Path) -> None:
    folder = tmp_path / "small-1f0c9a7e"
    folder.mkdir()
    with hold(folder) as holder:
        said = f"^run small-1f0c9a7e is running: process {holder.pid} on {socket.gethostname()} trains it; wait until"
        with pytest.raises(UserError, match=said), locked(folder):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with locked(folder), locked(folder):  # what a process has it may take again
            pass
    with hold(folder) as holder:
        holder.communicate()


def test_a_restarted_process_waits_for_the_one_before(tmp_path: Path) -> None:
    with hold(tmp_path) as holder:
        assert holder.stdin is not None
        with pytest.raises(UserError, match="is running"), locked(tmp_path, patience_s=0.3):
            pass
        holder.stdin.close()
        with locked(tmp_path, patience_s=PATIENCE_S):
            pass


def test_a_remaining_forked_process_holds_no_lock(tmp_path: Path) -> None:
    """A loader's processes notice only after seconds that the one they load for is dead."""
    program = HOLDER.replace(
        'print("held"',
        f"""import os, time
    child = os.fork()
    if child == 0:
        os.close(1)
        time.sleep({PATIENCE_S})
    print(child""",
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True
    )
    left = int(done.stdout)
    try:
        with locked(tmp_path):
            os.kill(left, 0)  # it is there still
    finally:
        os.kill(left, signal.SIGKILL)


def test_a_file_system_without_locks_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", no_locks)
    with locked(tmp_path):
        pass
    (line,) = capsys.readouterr().err.splitlines()
    assert "lock: the file system has no locks (No locks available): take care" in line


def test_a_folder_that_cant_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none/lock: can't be locked: No such file"), locked(tmp_path / "none"):
        pass
