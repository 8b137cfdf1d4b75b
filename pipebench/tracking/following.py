"""A run that one process logs and another sends to MLflow: workers train, and their launcher imports MLflow.

Between them is the run's record: rank 0 appends entries to it, and the launcher follows.
"""

import time
from collections.abc import Callable

from pipebench.tracking.record import LogEntry, RecordFolder, Sent, Start
from pipebench.tracking.sender import SEND_EVERY_S, Sender
from pipebench.tracking.store import Store

_NOBODY = Start("", virtual=False)  # until the run has begun


class Follower(Sender):
    """Sends what another process appends to a record, also across restarts of that process."""

    every_s = 0.2  # looking for entries costs microseconds

    def __init__(self, record: RecordFolder) -> None:
        """Follow a record from its first entry that MLflow hasn't; its folder may be empty yet."""
        super().__init__(record, _NOBODY, None, system_metrics=True)
        self._due_s = 0.0
        self._is_closed = False
        self._note(record.earlier("start", "status"))

    @property
    def is_done(self) -> bool:
        """Whether it is closed."""
        return self._is_closed

    def close(self) -> None:
        """Send nothing more."""
        self._is_closed = True

    def add(self, entry: LogEntry, content: bytes | None = None) -> None:
        """Append an entry to the record, from where it is sent as others are; if the disk fails, it is sent at once."""
        if entry.status is not None:
            self.settled.clear()  # whoever waits for it waits from now on
        self.record.append(entry, content)
        if self.record.path is None:
            self._queue.append((entry, content))
            self._note([entry])

    def listen(self) -> None:
        """Take in what has been appended to the record."""
        heard = self.record.hear()
        self._queue.extend((entry, None) for entry in heard)
        self._note(heard)

    def send(self, store: Store, on_progress: Callable[[], None]) -> None:
        """Send what is due; see `Sender`."""
        now_s = time.monotonic()
        if self._is_closed or (self.settled.is_set() if self.ended else now_s < self._due_s):
            return
        self._due_s = now_s + SEND_EVERY_S
        if not self._queue:
            if self._history is not None:
                self._sample_system()
            return
        super().send(store, on_progress)
        if self.ended and not self._queue:
            self._note_end(failed=False)
            self._history = None  # MLflow's run is over, and resumed if the process is restarted

    def give_up(self) -> None:
        """Leave the run's end unsent; whoever logs may have more."""
        self.settled.set()
        self._note_end(failed=True)

    def _note(self, entries: list[LogEntry]) -> None:
        """Note starts and ends."""
        for entry in entries:
            if entry.start is not None:
                self.start, parent_id = entry.start, entry.start.parent_id
                self._parent_id = None if parent_id is None else lambda parent_id=parent_id: parent_id
                self.ended = False
            if entry.status is not None:  # a sample of this host may follow
                self.ended, self._end_ms = True, entry.at_ms
        if entries:
            self.settled.clear()

    def _note_end(self, *, failed: bool) -> None:
        self.record.note(Sent(self.record.run_id, self.record.num_sent, self._end_ms, failed))


class Followed(Sender):
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
