"""`python -m tests.lab` without a lab: refusals, their messages, and the help."""

import shutil
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import tests.lab.__main__  # noqa: F401 # adds the command
from pipebench.cli.main import cli
from pipebench.errors import WorkersFailedError
from tests.lab import command, hosts


def refused(*words: str) -> str:
    result = CliRunner().invoke(cli, ["lab", *words])
    assert result.exit_code == 2
    lines = [line for line in result.stderr.splitlines() if line.startswith(("pipebench: error: ", "Error: "))]
    assert len(lines) == 1
    return lines[0].removeprefix("pipebench: error: ").removeprefix("Error: ")


@pytest.fixture
def a_lab_is_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "why_not", str)


WRONG = [
    ("--hosts=1", "--hosts: got '1', allowed is a whole number from 2 to 64: one host has no wire"),
    ("--hosts=two", "--hosts: got 'two', allowed is a whole number from 2 to 64"),
    ("--hosts=65", "--hosts: got '65', allowed is a whole number from 2 to 64"),
    ("--workers-per-host=0", "--workers-per-host: got '0', allowed is a whole number from 1 to 64"),
    ("--bandwidth=fast", "--bandwidth: got 'fast', allowed are bandwidths joined by commas, such as 100Mbit,1.5Gbit"),
    ("--bandwidth=1Gbit,", "--bandwidth: got '', allowed are bandwidths joined by commas"),
    ("--bandwidth=1Gib", "--bandwidth: got '1Gib', allowed are bandwidths joined by commas"),
    ("--bandwidth=-1Gbit", "--bandwidth: got '-1Gbit', allowed are bandwidths joined by commas"),
    ("--bandwidth=0.5Mbit", "--bandwidth: got '0.5Mbit', allowed are 1Mbit to 100Gbit"),
    ("--bandwidth=1Tbit", "--bandwidth: got '1Tbit', allowed are 1Mbit to 100Gbit"),
    ("--bandwidth=1Gbit,1000Mbit/s", "--bandwidth: got '1Gbit,1000Mbit/s', allowed are different bandwidths"),
]


@pytest.mark.parametrize(("option", "sentence"), WRONG)
@pytest.mark.usefixtures("a_lab_is_possible")
def test_a_wrong_option_is_refused_in_one_sentence(option: str, sentence: str) -> None:
    assert refused("quickstart", option).startswith(sentence)


@pytest.mark.usefixtures("a_lab_is_possible")
def test_a_lab_needs_a_recipe() -> None:
    assert refused().startswith("name at least one recipe, for example: python -m tests.lab lab --ladder. See ")


def test_other_systems_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert refused("quickstart") == "a lab needs the network namespaces of Linux, and this is darwin"


def test_users_other_than_root_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert refused("quickstart").startswith("a lab needs root, which alone may make network namespaces; try sudo")


@pytest.mark.parametrize(("missing", "named"), [({"ip", "tc"}, "ip and tc"), ({"tc"}, "tc")])
def test_a_missing_iproute2_is_named(monkeypatch: pytest.MonkeyPatch, missing: set[str], named: str) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None if name in missing else f"/sbin/{name}")
    assert refused("--clean") == f"a lab needs {named} of iproute2, which isn't there: install the package iproute2"


@pytest.mark.usefixtures("a_lab_is_possible")
def test_a_run_that_failed_ends_with_its_exit_code_and_no_further_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object) -> int:
        raise WorkersFailedError(3)

    monkeypatch.setattr(command, "run_lab", fail)
    result = CliRunner().invoke(cli, ["lab", "quickstart", "--out", str(tmp_path)])
    assert (result.exit_code, result.output) == (3, "")
