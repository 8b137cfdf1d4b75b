"""The terminal that a command writes to: a line until its first output, and output after the terminal was closed.

A command whose terminal is closed ends as SIGHUP asks, not because it can't be printed.
"""

import errno
import io
import os
import sys
from contextlib import suppress
from typing import Any


class FirstLine:
    """A line on the terminal that a command's first output replaces."""

    def __init__(self) -> None:
        self._is_awaited, self._width = False, 0

    def begin(self) -> bool:
        """Wait for the first output; return whether both outputs are a terminal."""
        self._is_awaited = all(isinstance(_raw(each), _Terminal) for each in (sys.stdout, sys.stderr))
        return self._is_awaited

    def show(self, text: str) -> None:
        """Show a line of ASCII, unless there was output."""
        if self._is_awaited:
            self._width = len(text)
            self._write(text)

    def give_way(self) -> None:
        """Remove the line: there is output, or the command ends."""
        width, self._width, self._is_awaited = self._width, 0, False
        if width:
            self._write(f"\r{' ' * width}\r")

    def _write(self, text: str) -> None:
        with suppress(OSError):  # the terminal was closed
            os.write(sys.stderr.fileno(), text.encode())


first_line = FirstLine()


class _Terminal(io.FileIO):
    """A terminal; what is written to it after it was closed is dropped."""

    def write(self, data: "bytes | bytearray | memoryview") -> int:  # type: ignore[override]
        """Write bytes, and return how many."""
        first_line.give_way()
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self.fileno())
            os.close(nothing)
            return len(data)


def outlive_terminal() -> None:
    """Let this process, and copies of it, write to its outputs after their terminal was closed; none may be closed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed, as by `>&-`
            setattr(sys, name, io.TextIOWrapper(io.FileIO(os.devnull, "w"), "utf-8"))
        elif isinstance(stream, io.TextIOWrapper) and stream.isatty() and not isinstance(_raw(stream), _Terminal):
            terminal: Any = io.BufferedWriter(_Terminal(stream.fileno(), "w", closefd=False))
            lasting = io.TextIOWrapper(terminal, stream.encoding, stream.errors, line_buffering=stream.line_buffering)
            lasting.reconfigure(write_through=stream.write_through)
            setattr(sys, name, lasting)


def _raw(stream: Any) -> object:
    return getattr(getattr(stream, "buffer", None), "raw", None)
