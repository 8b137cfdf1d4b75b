"""Runs that one process logs and another sends to MLflow, so that workers train without importing MLflow.

They communicate by the run's record: rank 0 appends entries to it, and the launcher reads and sends them.
"""

import time
from collections.abc import Callable

from pipebench.tracking.record import LogEntry, RecordFolder, Sent, Start
from pipebench.tracking.sender import SEND_INTERVAL_S, Sender
from pipebench.tracking.store import Store

_NO_START = Start("", virtual=False)  # until the run has begun


class RecordFollower(Sender):
    """Sends what another process appends to a record, also across restarts of that process."""

    interval_s = 0.2  # a look for new entries costs microseconds

    def __init__(self, record: RecordFolder) -> None:
        """Follow a record from the first entry that MLflow lacks; its folder may still be empty."""
        super().__init__(record, _NO_START, None, system_metrics=True)
        self._due_s = 0.0  # monotonic time of the next `send` that does anything
        self._is_closed = False
        self._track_state(record.earlier("start", "status"))

    @property
    def is_done(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    def close(self) -> None:
        """Send nothing more."""
        self._is_closed = True

    def add(self, entry: LogEntry, content: bytes | None = None) -> None:
        """Append an entry to the record, which `take_in` reads again; queue it directly if the disk fails."""
        if entry.status is not None:
            self.settled.clear()  # a wait for the run's end begins now
        self.record.append(entry, content)
        if self.record.path is None:
            self._queue.append((entry, content))
            self._track_state([entry])

    def take_in(self) -> None:
        """Queue the entries that were appended to the record since the last call."""
        entries = self.record.new_entries()
        self._queue.extend((entry, None) for entry in entries)
        self._track_state(entries)

    def send(self, store: Store, on_progress: Callable[[], None]) -> None:
        """Send what is due; see `Sender`."""
        now_s = time.monotonic()
        if self._is_closed or (self.settled.is_set() if self.ended else now_s < self._due_s):
            return
        self._due_s = now_s + SEND_INTERVAL_S
        if not self._queue:
            if self._history is not None:
                self._sample_system()
            return
        super().send(store, on_progress)
        if self.ended and not self._queue:
            self._note_end(failed=False)
            self._history = None  # the run has ended in MLflow; it is resumed there if the process is restarted

    def give_up(self) -> None:
        """Leave the run's end unsent; the process that logs may append more."""
        self.settled.set()
        self._note_end(failed=True)

    def _track_state(self, entries: list[LogEntry]) -> None:
        """Update whether the run has ended, and who its parent is, from entries that start or end it."""
        for entry in entries:
            if entry.start is not None:
                parent_id = entry.start.parent_id
                self.start = entry.start
                self._parent_id = None if parent_id is None else lambda parent_id=parent_id: parent_id
                self.ended = False
            if entry.status is not None:  # need not be the last entry: a sample of this host may follow
                self.ended = True
                self._end_ms = entry.at_ms
        if entries:
            self.settled.clear()

    def _note_end(self, *, failed: bool) -> None:
        self.record.write_sent(Sent(self.record.run_id, self.record.num_sent, self._end_ms, failed))


class RecordWriter(Sender):
    """The log of a run that another process sends: entries go to the record only."""

    def __init__(self, record: RecordFolder, start: Start) -> None:
        super().__init__(record, start, None, system_metrics=False)
        self._queue.clear()

    def add(self, entry: LogEntry, content: bytes | None = None) -> None:
        """Append an entry to the record."""
        with self._lock:
            if not self.ended:
                self.record.append(entry, content)
                self.ended = entry.status is not None
            if self.ended:
                self.settled.set()
