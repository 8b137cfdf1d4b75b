"""What a process of a run logs: in memory until the run's record has a folder, from then on in a file there.

So a process that is killed leaves its log, and one that goes on with the run adds to it.
"""

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from pipebench.tracking import RunLog
from pipebench.tracking.record import LOG_FILE

# Instructions, with --verbose, are a kilobyte or two per minibatch: ten thousand minibatches fit.
_MOST_VERBOSE_CHARS = 16_000_000


class CollectedLog(logging.Handler):
    """Collects the log of one process; of instructions only the first ones, as a long run has any number."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
        self._text: TextIO | None = io.StringIO()  # None once the disk has failed
        self._num_verbose_left = _MOST_VERBOSE_CHARS

    def emit(self, record: logging.LogRecord) -> None:
        """Add a message."""
        is_verbose = record.levelno <= logging.DEBUG
        if is_verbose and self._num_verbose_left <= 0:
            return
        try:
            text = self.format(record)
        except Exception:  # of whoever logs
            self.handleError(record)
            return
        if is_verbose:
            self._num_verbose_left -= len(text)
            text += "" if self._num_verbose_left > 0 else "\n(Further instructions are not kept.)"
        self._write(f"{text}\n")

    def move_to(self, folder: Path | None) -> None:
        """Go on in a record's folder, behind what earlier processes logged there; None: in memory."""
        if folder is None:
            return
        self.acquire()
        try:
            if isinstance(self._text, io.StringIO):
                file = (folder / LOG_FILE).open("a", encoding="utf-8", errors="backslashreplace")
                so_far, self._text = self._text.getvalue(), file
                self._write(so_far)
        except OSError:  # it stays in memory
            pass
        finally:
            self.release()

    def save(self, log: RunLog) -> None:
        """Log what was collected as an artifact, and end."""
        in_memory = self._text.getvalue() if isinstance(self._text, io.StringIO) else None
        self.close()
        if in_memory is None:
            log.log_file()
        else:
            log.text(LOG_FILE, in_memory)

    def close(self) -> None:
        """Take no more messages."""
        super().close()
        self.acquire()
        text, self._text = self._text, None
        self.release()
        if text is not None:
            with suppress(OSError):
                text.close()

    def _write(self, text: str) -> None:
        if self._text is not None:
            try:
                self._text.write(text)
                self._text.flush()
            except OSError:
                self.close()


@contextmanager
def collected_log(verbose: bool) -> Iterator[CollectedLog]:
    """Collect pipebench's log and torch's warnings for an artifact; show them too if verbose."""
    collected = CollectedLog()
    root = logging.getLogger("pipebench")
    handlers: list[logging.Handler] = [collected, *([logging.StreamHandler()] if verbose else [])]
    level, captured = root.level, logging.getLogger("py.warnings")
    root.setLevel(logging.DEBUG if verbose else logging.INFO)
    logging.captureWarnings(True)
    for each in handlers:
        root.addHandler(each)
        captured.addHandler(each)
    try:
        with warnings.catch_warnings():
            yield collected
    finally:
        logging.captureWarnings(False)
        for each in handlers:
            root.removeHandler(each)
            captured.removeHandler(each)
        collected.close()
        root.setLevel(level)
