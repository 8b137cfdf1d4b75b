"""The cache holds one profile per key, also if its files are damaged or can't be written."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from pipebench.profile.cache import cache_directory, cached
from pipebench.profile.model import LayerProfile, Profile
from pipebench.profile.stored import read_profile, write_profile


def make(forward_s: float = 0.1) -> Profile:
    rows = (LayerProfile("a", "Linear", forward_s, 0.2, 8, 8, (), ("x",), {"a.weight": 16}),)
    return Profile("m", "V100", "measured", "", {2: rows, 3: rows}, 1e-12, 1e-5, {2: 0.1, 3: 1 / 3}, {2: 0.3})


def never() -> Profile:
    raise AssertionError("the cache should have had it")


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIPEBENCH_CACHE", str(tmp_path))
    return tmp_path / "profiles"


def test_json_round_trip_is_exact() -> None:
    assert read_profile(write_profile(make(1 / 3))) == make(1 / 3)
    loading = replace(make(0.5), loaders=3)
    loading = loading.with_rows(lambda rows: (*rows[:-1], replace(rows[-1], reads_samples=True)))
    assert read_profile(write_profile(loading)) == loading
    assert "loaders" not in write_profile(make(0.5))


def test_made_once_per_key(directory: Path) -> None:
    assert cached({"model": "a", "sizes": [2, 3]}, make) == make()
    assert cached({"sizes": [2, 3], "model": "a"}, never) == make()
    assert cached({"model": "b", "sizes": [2, 3]}, lambda: make(0.5)).layers[2][0].forward_s == 0.5
    assert sorted(path.suffix for path in directory.iterdir()) == [".json", ".json"]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"pipebench_profile": 0}', '{"pipebench_profile": 1}', "\0"])
def test_a_corrupt_entry_is_made_again(directory: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    cached({"a": 1}, make)
    (path,) = directory.iterdir()
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert cached({"a": 1}, lambda: make(0.7)) == make(0.7)
    assert "so it is made again" in caplog.text
    assert cached({"a": 1}, never) == make(0.7)


def test_an_unwritable_cache_costs_only_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PIPEBENCH_CACHE", str(tmp_path / "file"))
    assert cached({"a": 1}, make) == make()
    (said,) = caplog.messages
    assert "can't be written" in said


def test_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_directory().name == "profiles"
    monkeypatch.delenv("PIPEBENCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_directory() == Path("/x/pipebench/profiles")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "pipebench" / "profiles"
