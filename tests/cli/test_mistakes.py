"""Mistakes with files that commands write, list and read: one sentence each, and exit code 2."""

import errno
import importlib
import os
import subprocess
import sys
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import Mock

import pytest
from click.testing import CliRunner

from pipebench.cli.main import cli
from pipebench.cli.run import _started_as_worker
from pipebench.distributed.launch import worth_restart
from pipebench.distributed.launch_failure import of_exception, report
from pipebench.distributed.launch_template import _fork
from pipebench.errors import limit_text
from pipebench.profile.cache import code_hash
from tests.patience import without_phases
from tests.recipes import uniform_recipe

MISTAKES = [
    ("plan small.yaml --picture plan.txt", "--picture: got plan.txt, allowed is a name such as plan.png, of a picture"),
    ("draw small.yaml --picture memory.jpg", "--picture: got memory.jpg, allowed is a name such as memory.png"),
    ("draw small.yaml --of occupancy", "--of occupancy says what --picture draws: add --picture occupancy.png"),
    ("profile small.yaml --out layers.csv", "--out: got layers.csv, allowed is a name such as layers.json"),
    ("profile small.yaml --picture p.svg", "--picture: got p.svg, allowed is a name such as p.png"),
    ("ls recipes gnmt99", "none of the recipes has 'gnmt99' in its name or its description"),
    ("plan small.yml", "small.yml: no such file, folder or short name; did you mean 'small.yaml'?"),
    ("report smal.yaml", "report 'smal.yaml': no such file; did you mean 'small.yaml'?"),
    (f"show {'a' * 300}", f"{'a' * 77}...: no such file, folder or short name"),
    ("run ours.yaml", "ours.yaml: is a cluster, not a recipe: a recipe names it, `cluster.name=ours.yaml`"),
    ("run table.yaml", "table.yaml: is a report, not a recipe: `pipebench report table.yaml`"),
    ("plan small.yaml cluster.name=small.yaml", "command line: cluster.name: small.yaml: is a recipe, not a cluster"),
    ("report small.yaml", "small.yaml: is a recipe, not a report: `pipebench run small.yaml`"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES)
def test_a_mistake_is_one_sentence(words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(uniform_recipe(8, 2000, 250, minibatch_size=250))
    Path("ours.yaml").write_text("device: {value: V100, assumed: by us}\nlevels: []\n")
    Path("table.yaml").write_text("title: A table\nrows: []\n")
    done = CliRunner().invoke(cli, words.split())
    assert done.exit_code == 2, done.output
    said = without_phases(done.stderr)
    assert said.startswith(f"pipebench: error: {message}")
    assert said.count("\n") == 1
    assert len([*tmp_path.iterdir()]) == 3, "nothing has run"


def test_the_program_without_arguments_prints_its_help() -> None:
    """Once every line of it was printed as an error."""
    done = CliRunner().invoke(cli, [])
    assert done.exit_code == 2
    assert done.output == CliRunner().invoke(cli, ["--help"]).output


@pytest.mark.parametrize(
    ("size", "expected"), [("four", True), ("0", True), ("2", True), ("1", False), ("", False)], ids=repr
)
def test_an_invalid_number_of_processes_is_reported_by_the_workers(
    size: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers report a launcher's wrong variable in one sentence; it was a traceback."""
    monkeypatch.delenv("PIPEBENCH_RUN", raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", size)
    assert _started_as_worker() is expected


def test_a_link_to_itself_in_a_folder_of_recipes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop.yaml").symlink_to("loop.yaml")
    done = CliRunner().invoke(cli, ["run", "."])
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith("pipebench: error: loop.yaml: can't be read: Too many levels of symbolic links")


@pytest.mark.parametrize(
    ("shell", "code", "message"),
    [
        ("show >&-", 0, ""),
        ("show 2>&- >&-", 0, ""),
        (
            "show >/dev/full",
            2,
            "pipebench: error: what was to be written can't be: [Errno 28] No space left on device\n",
        ),
        (
            "--help >/dev/full",
            2,
            "pipebench: error: what was to be written can't be: [Errno 28] No space left on device\n",
        ),
        ("plan --no-others | true; exit ${PIPESTATUS[0]}", 141, ""),
    ],
)
def test_a_closed_or_full_output_is_one_sentence(shell: str, code: int, message: str, tmp_path: Path) -> None:
    """A closed one was a traceback, a full one, too, and rich ended with 1, a missed target, for a reader that left."""
    (tmp_path / "small.yaml").write_text(uniform_recipe(8, 2000, 250, minibatch_size=250))
    command, _, rest = shell.partition(" ")
    words = command if command.startswith("-") else f"{command} {tmp_path}/small.yaml"
    if "/dev/full" in shell and not Path("/dev/full").exists():
        pytest.skip("this system has no disk that is always full")
    line = f"{sys.executable} -m pipebench {words} {rest}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == code, done.stderr
    if message or not code:
        assert without_phases(done.stderr) == message
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "`ulimit -n`"),
        (OSError(errno.EFBIG, os.strerror(errno.EFBIG)), "`ulimit -f`"),
        (RuntimeError("can't start new thread"), "`ulimit -u`"),
        (RuntimeError(os.strerror(errno.EAGAIN)), "`ulimit -u`"),  # of a thread of Gloo's
    ],
)
def test_a_limit_of_the_system_is_named(error: Exception, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a traceback. A run that trains when it meets one starts again, and its checkpoints are there to resume."""
    monkeypatch.setattr(importlib.import_module("pipebench.cli.ls"), "_rows", Mock(side_effect=error))
    done = CliRunner().invoke(cli, ["ls"])
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert message in done.stderr
    failure = of_exception(error, rank=1)
    assert (failure.exit_code, worth_restart(failure, started=False)) == (3, False)
    assert worth_restart(failure, started=True)
    assert message in report(failure)


def test_only_starting_a_process_meets_the_limit_on_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock that another process has, and a pipe that is full or empty, fail by the same number, EAGAIN."""
    reads, _ = os.pipe()
    os.set_blocking(reads, False)
    busy = partial(os.read, reads, 1)
    with pytest.raises(BlockingIOError) as waiting:
        busy()
    assert limit_text(waiting.value) is None
    monkeypatch.setattr(os, "fork", busy)
    for start in (_fork, get_context("fork").Process().start):
        with pytest.raises(BlockingIOError) as full:
            start()
        assert "`ulimit -u`" in str(limit_text(full.value))


def test_a_working_directory_that_was_removed_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a traceback, or the end of torch, which finds its own libraries by it."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    done = CliRunner().invoke(cli, ["runs"])
    assert (done.exit_code, done.stderr) == (
        2,
        "pipebench: error: the working directory has been removed: change to one that is there\n",
    )


def test_sources_are_read_in_a_locale_of_ascii() -> None:
    """The profile's key hashes the zoo's sources, one of which has a letter that ASCII lacks."""
    code = "from pipebench.profile.cache import code_hash; print(code_hash())"
    ascii_only = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env={**os.environ, **ascii_only})
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().strip() == code_hash()
