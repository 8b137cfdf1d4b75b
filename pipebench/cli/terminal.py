"""Keeps a command running whose terminal is closed, so that SIGHUP ends it, and not a failure to print."""

import errno
import io
import os
import sys
from typing import Any


class _Terminal(io.FileIO):
    """A terminal that drops what is written after it was closed."""

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
    """Let this process and its forks write to stdout and stderr after their terminal was closed, or without any."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed, as by `>&-`
            setattr(sys, name, io.TextIOWrapper(io.FileIO(os.devnull, "w"), "utf-8"))
        elif (
            isinstance(stream, io.TextIOWrapper)
            and stream.isatty()
            and not isinstance(getattr(stream.buffer, "raw", None), _Terminal)
        ):
            terminal: Any = io.BufferedWriter(_Terminal(stream.fileno(), "w", closefd=False))
            lasting = io.TextIOWrapper(terminal, stream.encoding, stream.errors, line_buffering=stream.line_buffering)
            lasting.reconfigure(write_through=stream.write_through)
            setattr(sys, name, lasting)
