"""The log of a run's process: in memory until the run's record has a folder, from then on in a file there.

So a process that is killed leaves its log, and a process that resumes the run adds to it.
"""

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from logging.handlers import MemoryHandler
from pathlib import Path

from pipebench.tracking.record import LOG_FILE
from pipebench.tracking.run_log import RunLog

_MOST_INSTRUCTIONS = 150_000  # logged with --verbose: some 16 MB, of ten thousand minibatches


class _LogFile(logging.FileHandler):
    """A file that loses messages, without a word, when the disk is full."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 # logging's name
        """Ignore that a message can't be written, instead of printing a traceback for each."""


class CollectedLog(MemoryHandler):
    """Collects the log of one process; only the first instructions, as a long run has any number of them."""

    def __init__(self) -> None:
        super().__init__(sys.maxsize, sys.maxsize, flushOnClose=False)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
        self._num_instructions = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Add a message."""
        self._num_instructions += record.levelno <= logging.DEBUG
        if record.levelno > logging.DEBUG or self._num_instructions < _MOST_INSTRUCTIONS:
            super().emit(record)
        elif self._num_instructions == _MOST_INSTRUCTIONS:
            said = {"msg": "(Further instructions are not kept.)", "args": None}
            super().emit(logging.makeLogRecord(vars(record) | said))

    def move_to(self, folder: Path | None) -> None:
        """Continue in a record's folder, after what earlier processes logged there; None continues in memory."""
        if folder is not None and self.target is None:
            with suppress(OSError):  # then the log stays in memory
                file = _LogFile(folder / LOG_FILE, encoding="utf-8", errors="backslashreplace")
                file.setFormatter(self.formatter)
                self.setTarget(file)
                self.capacity = 1
                self.flush()

    def save(self, log: RunLog) -> None:
        """Record the log as an artifact, and close it."""
        if self.target is not None:
            log.log_file()
        else:
            log.text(LOG_FILE, "".join(f"{self.format(record)}\n" for record in self.buffer))
        self.close()

    def close(self) -> None:
        """Take no more messages."""
        file = self.target
        super().close()
        if file is not None:
            with suppress(OSError):
                file.close()


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
