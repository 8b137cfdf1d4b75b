"""The log of a run's processes: one file, written while they run."""

import logging
import re
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipebench.cli.main import cli
from pipebench.run import collected_log as module
from pipebench.run.collected_log import collected_log
from tests.commands import run_code
from tests.recipes import uniform_recipe

LOG = logging.getLogger("pipebench.test")
KILLED = """\
import logging, os, signal, sys
from pathlib import Path
from pipebench.run.collected_log import collected_log
with collected_log(False) as collected:
    logging.getLogger("pipebench.test").info("before the record")
    collected.move_to(Path(sys.argv[1]))
    logging.getLogger("pipebench.test").info("before the kill")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def messages(folder: Path) -> list[str]:
    lines = (folder / "run.log").read_text().splitlines()
    return [re.sub(r"^\S+ \S+ (INFO|DEBUG) \S+ ", "", line) for line in lines]


def test_a_killed_process_leaves_its_log_and_a_later_one_adds_to_it(tmp_path: Path) -> None:
    """It was in memory until the end, and then replaced the log of earlier processes."""
    done = run_code(KILLED, tmp_path, str(tmp_path))
    assert done.returncode == -signal.SIGKILL
    assert messages(tmp_path) == ["before the record", "before the kill"]
    with collected_log(False) as collected:
        collected.move_to(tmp_path)
        LOG.info("went on")
    assert messages(tmp_path) == ["before the record", "before the kill", "went on"]


def test_only_the_first_instructions_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them were kept in memory: a kilobyte per minibatch."""
    monkeypatch.setattr(module, "_MOST_INSTRUCTIONS", 20)
    with collected_log(True) as collected:
        collected.move_to(tmp_path)
        for index in range(100):
            LOG.debug("instruction %d", index)
        LOG.info("evaluated")
    said = messages(tmp_path)
    assert said[:2] == ["instruction 0", "instruction 1"]
    assert said[-2:] == ["(Further instructions are not kept.)", "evaluated"]
    assert len(said) == 21


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no disk that is always full")
def test_a_disk_that_fails_costs_the_log_only(tmp_path: Path) -> None:
    with collected_log(False) as collected:
        collected.move_to(tmp_path / "missing")
        LOG.info("in memory")
        (tmp_path / "run.log").symlink_to("/dev/full")
        collected.move_to(tmp_path)
        LOG.info("lost")
        LOG.info("lost, too")
    assert (tmp_path / "run.log").is_char_device()


def test_a_resumed_virtual_run_has_the_log_of_both_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(f"{uniform_recipe(4, 40, 10, 10)}engine: {{kind: virtual, device: cpu}}\n")
    for words in (["small.yaml"], ["--resume", "small", "train.max_epochs=2"]):
        done = CliRunner().invoke(cli, ["run", *words])
        assert done.exit_code == 0, done.output
    (found,) = Path("pipebench-runs").glob("*/record/run.log")
    assert len([said for said in messages(found.parent) if said.startswith("t=")]) == 2
    (stored,) = Path("mlartifacts").rglob("run.log")
    assert stored.read_text() == found.read_text()
