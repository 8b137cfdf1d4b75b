"""Files that users name: which are read, and which are refused in one sentence instead of waited for."""

import os
from pathlib import Path

import pytest

from pipebench.errors import RecipeError, UserError
from pipebench.files import read_bytes, read_text
from tests.patience import within_patience


def test_text_is_read_without_its_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes("\ufeffä\n".encode())
    assert read_text(path) == "ä\n"
    assert read_bytes(str(path)) == "\ufeffä\n".encode()


def test_pipes_devices_and_folders_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "circle").symlink_to("circle")
    refusals = {
        tmp_path / "pipe": "pipe: isn't a file",
        Path("/dev/null"): "/dev/null: isn't a file",
        tmp_path: "can't be read: Is a directory",
        tmp_path / "circle": "circle: can't be read: Too many levels of symbolic links",
        tmp_path / "a\0b": r"can't be read: .*embedded null",
        tmp_path / ("x" * 300): "can't be read: File name too long",
    }
    for path, sentence in refusals.items():
        with within_patience(), pytest.raises(RecipeError, match=sentence) as refused:
            read_bytes(path)
        assert isinstance(refused.value, UserError)
        assert "\n" not in str(refused.value)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    path.touch()
    os.truncate(path, 1 << 42)  # takes no disk; whoever read it would run out of memory
    with pytest.raises(RecipeError, match="sparse: is larger than 100000000 bytes"):
        read_bytes(path)
    path.write_bytes(b"12345")
    with pytest.raises(RecipeError, match="sparse: is larger than 4 bytes"):
        read_bytes(path, 4)
    assert read_bytes(path, 5) == b"12345"


def test_bytes_that_are_not_utf8_are_reported_with_their_position(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"0F0,\xff")
    with pytest.raises(RecipeError, match=r"a.csv: is not text in UTF-8 \(byte 4\)"):
        read_text(tmp_path / "a.csv")


def test_a_missing_file_is_reported_with_the_most_similar_name(tmp_path: Path) -> None:
    (tmp_path / "moves.json").touch()
    (tmp_path / "moves.txt").touch()
    with pytest.raises(RecipeError, match=r"mvoes.json: can't be read: No such file .*; did you mean 'moves.json'\?"):
        read_text(tmp_path / "mvoes.json")
    with pytest.raises(RecipeError, match=r"No such file or directory$"):
        read_text(tmp_path / "no-such-folder" / "moves.json")
