"""Folders of data and cache, and files that are written as a whole."""

import os
from pathlib import Path

import pytest

from pipebench.zoo.places import cache_folder, data_folder, write_whole


def test_the_option_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPEBENCH_DATA", "/data")
    assert data_folder("wmt16", "/mine") == Path("/mine")
    assert data_folder("wmt16", "") == Path("/data/wmt16")
    assert data_folder("wmt16", "~/mine") == Path.home() / "mine"


@pytest.mark.parametrize("value", ["", None])
def test_without_option_and_environment_the_error_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("PIPEBENCH_DATA", raising=False)
    if value is not None:
        monkeypatch.setenv("PIPEBENCH_DATA", value)
    wanted = "^wmt16: no folder is given, set its option root, or PIPEBENCH_DATA to the folder that has wmt16/$"
    with pytest.raises(FileNotFoundError, match=wanted):
        data_folder("wmt16", "")


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder("bpe") == Path("/x/pipebench/bpe")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder("bpe") == Path.home() / ".cache/pipebench/bpe"


def test_a_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "file"
    write_whole(path, b"first")
    write_whole(path, b"second")
    assert path.read_bytes() == b"second"

    def fail(*args: object) -> None:
        raise OSError("disk")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk"):
        write_whole(path, b"third")
    assert path.read_bytes() == b"second"
    assert [each.name for each in path.parent.iterdir()] == ["file"]
