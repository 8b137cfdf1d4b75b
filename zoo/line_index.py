"""An index of a large text file: the start and the number of tokens of every line, found in one pass over its bytes."""

import io
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy
import numpy.typing as npt

_BLOCK_BYTES = 1 << 24  # 16 MiB are read at a time, since the file may be larger than memory
_NEWLINE, _SPACE = 10, 32
_CONTROL = range(9, 14)  # tab to carriage return, at which `bytes.split` splits, besides the space

Integers = npt.NDArray[numpy.int64]


@dataclass(frozen=True)
class LineIndex:
    """The lines of a file, or some of them."""

    starts: Integers  # [lines] int64, byte offset of each line's first byte
    counts: Integers  # [lines] int64, number of tokens of each line, by `bytes.split`

    def take(self, rows: Integers) -> "LineIndex":
        """Return the index of some of the lines."""
        return LineIndex(self.starts[rows], self.counts[rows])


def scan(path: Path) -> LineIndex:
    """Return the index of a file's lines, the last of which needs no newline.

    Raises:
        OSError: the file can't be read.
    """
    starts, counts = [numpy.zeros(1, numpy.int64)], []
    read, before_is_blank = 0, True
    unfinished = 0  # tokens so far of the line at the end of the last block
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            codes = numpy.frombuffer(block, numpy.uint8)
            blank = (codes == _SPACE) | ((codes >= _CONTROL.start) & (codes < _CONTROL.stop))
            firsts = numpy.flatnonzero(~blank & numpy.concatenate([[before_is_blank], blank[:-1]]))
            newlines = numpy.flatnonzero(codes == _NEWLINE)
            per_line = numpy.diff(numpy.searchsorted(firsts, numpy.concatenate([[0], newlines, [len(block)]])))
            per_line[0] += unfinished
            counts.append(per_line[:-1])
            starts.append(newlines + read + 1)
            read, before_is_blank, unfinished = read + len(block), bool(blank[-1]), int(per_line[-1])
    lines = numpy.concatenate(starts)
    if lines[-1] == read:  # nothing follows the last newline
        lines = lines[:-1]
    else:
        counts.append(numpy.array([unfinished]))
    return LineIndex(lines, numpy.concatenate([numpy.zeros(0, numpy.int64), *counts]))


def read_lines(path: Path, starts: Integers) -> list[bytes]:
    """Return the lines that start at these bytes, in this order, without newlines."""
    found = []
    with path.open("rb") as file:
        for start in starts.tolist():
            file.seek(start)
            found.append(file.readline().rstrip(b"\n"))
    return found


def fingerprint(path: Path) -> str:
    """Return a text that changes when a file does: its path, size and modification time.

    Raises:
        OSError: there is no such file.
    """
    state = os.stat(path)
    return f"{path.resolve()}:{state.st_size}:{state.st_mtime_ns}"


def to_bytes(*indices: LineIndex) -> bytes:
    """Return indices as the content of one file."""
    arrays = {f"{name}{i}": getattr(index, name) for i, index in enumerate(indices) for name in ("starts", "counts")}
    buffer = io.BytesIO()
    numpy.savez(buffer, **arrays)
    return buffer.getvalue()


def from_file(path: Path, number: int) -> tuple[LineIndex, ...] | None:
    """Return the indices, so many, in a file written by `to_bytes`; None if it is missing or damaged."""
    try:
        # Reading an array compares it with its checksum in the archive.
        with path.open("rb") as file, numpy.load(file, allow_pickle=False) as found:
            return tuple(LineIndex(found[f"starts{i}"], found[f"counts{i}"]) for i in range(number))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
