"""The index of lines, against Python's own reading, whatever the size of the blocks it is read in."""

from pathlib import Path

import numpy
import pytest

from pipebench.zoo import line_index

CONTENT = {
    "plain": b"a b c\nd\ne f\n",
    "no newline at the end": b"a b\nc",
    "empty lines": b"\n\na b\n\n",
    "spaces all over": b"  a   b \n c\n \n",
    "tabs and carriage returns": b"a\tb\r\nc\x0bd\r\n",
    "more than ASCII": "süß und größer\nÄ\n".encode(),
    "nothing": b"",
    "one newline": b"\n",
}


@pytest.mark.parametrize("name", CONTENT)
@pytest.mark.parametrize("block_bytes", [1, 2, 3, 5, 1000])
def test_same_as_reading_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, block_bytes: int) -> None:
    monkeypatch.setattr(line_index, "_BLOCK_BYTES", block_bytes)
    path = tmp_path / "file"
    path.write_bytes(CONTENT[name])
    with path.open("rb") as file:
        lines = [line.rstrip(b"\n") for line in file]
    index = line_index.scan(path)
    assert index.counts.tolist() == [len(line.split()) for line in lines]
    assert line_index.read_lines(path, index.starts) == lines
    assert line_index.read_lines(path, index.starts[::-1]) == lines[::-1]


def test_an_index_is_stored_and_read_again(tmp_path: Path) -> None:
    one = line_index.LineIndex(numpy.array([0, 5]), numpy.array([2, 1]))
    path = tmp_path / "kept.npz"
    content = line_index.to_bytes(one, one.take(numpy.array([1])))
    path.write_bytes(content)
    found = line_index.from_file(path, 2)
    assert found is not None
    assert [index.starts.tolist() for index in found] == [[0, 5], [5]]
    assert [index.counts.tolist() for index in found] == [[2, 1], [1]]


@pytest.mark.parametrize("damage", [b"", b"no archive", "half", "flipped", "one index"])
def test_a_damaged_index_is_ignored(tmp_path: Path, damage: bytes | str) -> None:
    whole = line_index.LineIndex(numpy.arange(100), numpy.arange(100))
    content = line_index.to_bytes(whole, whole)
    damaged = {
        "half": content[: len(content) // 2],
        "flipped": content[:500] + bytes([content[500] ^ 1]) + content[501:],
        "one index": line_index.to_bytes(whole),
    }
    path = tmp_path / "kept.npz"
    path.write_bytes(damage if isinstance(damage, bytes) else damaged[damage])
    assert line_index.from_file(path, 2) is None


def test_a_missing_index_is_ignored(tmp_path: Path) -> None:
    assert line_index.from_file(tmp_path / "kept.npz", 2) is None
