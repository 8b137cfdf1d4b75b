"""Closes the records of runs whose process was killed, which MLflow would have as running for ever.

Whoever logs or sends a run holds its record (`RecordFolder`); the system lets go for a process that dies. So a run that
MLflow has as running, and whose record nobody holds, was left.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import astuple
from pathlib import Path

from pipebench.tracking.connection import StoreConnection
from pipebench.tracking.record import ENTRIES, LOG_FILE, LogEntry, RecordFolder, Status, read_sent, starts_of
from pipebench.tracking.sender import Sender
from pipebench.tracking.store import Store

_log = logging.getLogger(__name__)
_PAGE = 1000  # runs that one question is answered with


def close_left(uri: str, folders: Iterable[Path], on_progress: Callable[[], None] = lambda: None) -> None:
    """Send to MLflow what records in `folders` have unsent, and the end, of runs that were left; never raises.

    Those are runs that MLflow has as running, and runs that it never got, as nothing was there to take them. A run
    without an end was killed when its last entry was logged. `on_progress` is called after each request.
    """
    store = StoreConnection(uri)
    try:
        known = {folder: read_sent(folder) for folder in folders}
        unended = {
            sent.run_id: folder for folder, sent in known.items() if sent.run_id and (sent.failed or not sent.end_ms)
        }
        unknown = [folder for folder, sent in known.items() if not sent.run_id]
        experiments = _running(store) if (unended or unknown) and store.is_there else {}
        left = [(unended[run_id], experiments[run_id]) for run_id in unended.keys() & experiments.keys()]
        for folder, experiment in [*left, *_never_sent(unknown)] if store.is_there else []:
            try:
                _close(folder, Store(uri, experiment), on_progress)
            except Exception as error:  # a record that MLflow or the disk doesn't take holds up no other
                _log.debug("%s can't be sent: %s", folder, error)
                _running(store)  # raises if MLflow is gone
    except Exception as error:  # whatever MLflow, SQLAlchemy, the disk or the network can think of
        _log.debug("runs that were left can't be closed: %s", error)


def _never_sent(folders: Iterable[Path]) -> list[tuple[Path, str]]:
    """Return the records of runs that MLflow never got, and the names of their experiments: comparisons before runs."""
    begun = []
    for folder in folders:
        for entry in starts_of(folder)[:1]:
            if entry.start is not None and entry.start.suite is not None:  # early records don't say
                begun.append((entry.at_ms, entry.start.parent is not None, folder, entry.start.suite))
    return [(folder, suite) for *_, folder, suite in sorted(begun)]


def _running(store: StoreConnection) -> dict[str, str]:
    """Return the ids of the runs that MLflow has as running, the newest, with the names of their experiments."""
    with store.turn() as client:
        names = {each.experiment_id: each.name for each in client.search_experiments(max_results=_PAGE)}
        runs = client.search_runs([*names], "attributes.status = 'RUNNING'", max_results=_PAGE)
    return {run.info.run_id: names[run.info.experiment_id] for run in runs}


def _close(folder: Path, store: Store, on_progress: Callable[[], None]) -> None:
    """Close a record, unless somebody holds it, or has sent and removed it meanwhile."""
    if not (folder / ENTRIES).exists():
        return
    record = RecordFolder(folder, alone=True)
    try:
        start, status, at_ms = None, None, 0
        parent_id, parent = None, None
        for entry in record.earlier():
            start, status = (entry.start, None) if entry.start is not None else (start, entry.status or status)
            if status is None or entry.status is not None:  # what a run gets after its end doesn't prolong it
                at_ms = entry.at_ms
            if entry.start is not None:
                parent_id, parent = entry.start.parent_id or parent_id, entry.start.parent or parent
        if record.path is None or start is None:
            return
        if record.run_id is None and parent is not None:
            store.connect()
            parent_id = parent_id or store.run_begun_at(*astuple(parent))
        sender = Sender(record, start, None if parent_id is None else lambda: parent_id, system_metrics=False)
        ends: Status = status or "KILLED"
        if status is None and (folder / LOG_FILE).is_file():
            sender.add(LogEntry(at_ms=at_ms, artifact=LOG_FILE))
        sender.add(LogEntry(at_ms=at_ms, status=ends))
        sender.send(store, on_progress)
        _log.info("%s was left, and is recorded as %s", folder, ends)
    finally:
        record.release()
