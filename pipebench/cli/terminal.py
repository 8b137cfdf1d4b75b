"""A terminal that is closed while a command runs: the command ends as SIGHUP asks, not because it can't be printed."""

import errno
import io
import os
import sys
from typing import Any


class _Closable(io.FileIO):
    """A terminal; what is written to it after it was closed is dropped."""

    def write(self, data: "bytes | bytearray | memoryview") -> int:  # type: ignore[override]
        """Write bytes, and return how many."""
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
        elif isinstance(stream, io.TextIOWrapper) and stream.isatty() and not isinstance(_raw(stream), _Closable):
            terminal: Any = io.BufferedWriter(_Closable(stream.fileno(), "w", closefd=False))
            lasting = io.TextIOWrapper(terminal, stream.encoding, stream.errors, line_buffering=stream.line_buffering)
            lasting.reconfigure(write_through=stream.write_through)
            setattr(sys, name, lasting)


def _raw(stream: io.TextIOWrapper) -> object:
    return getattr(stream.buffer, "raw", stream.buffer)
