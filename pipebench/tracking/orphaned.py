"""Ends in MLflow the runs whose process was killed, which MLflow would otherwise show as RUNNING for ever.

A process holds the record of every run that it logs or sends (`RecordFolder`), and the operating system releases it
when the process dies. So a run that is RUNNING in MLflow, and whose record no process holds, is orphaned.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import astuple
from pathlib import Path

from pipebench.tracking.connection import StoreConnection
from pipebench.tracking.entries import outcome_status
from pipebench.tracking.record import ENTRIES, LOG_FILE, LogEntry, RecordFolder, Status, read_sent, starts_of
from pipebench.tracking.sender import Sender
from pipebench.tracking.store import Store

_log = logging.getLogger(__name__)
_PAGE = 1000  # runs in the answer to one request


def close_orphaned(uri: str, folders: Iterable[Path], on_progress: Callable[[], None] = lambda: None) -> None:
    """Send what MLflow lacks of orphaned runs, their end included; never raises.

    Runs that MLflow never got, because it could not be reached, are sent as a whole. The end of a run that logged none
    is the time of its last entry.

    Args:
        uri: MLflow's tracking URI.
        folders: records on this disk, of orphaned and other runs.
        on_progress: called after each request.
    """
    store = StoreConnection(uri)
    try:
        known = {folder: read_sent(folder) for folder in folders}
        unended = {
            sent.run_id: folder for folder, sent in known.items() if sent.run_id and (sent.failed or not sent.end_ms)
        }
        unknown = [folder for folder, sent in known.items() if not sent.run_id]
        if not (unended or unknown) or not store.is_there:
            return
        experiments = _running(store)
        orphaned = [(unended[run_id], experiments[run_id]) for run_id in unended.keys() & experiments.keys()]
        for folder, experiment in [*orphaned, *_never_sent(unknown)]:
            try:
                _close(folder, Store(uri, experiment), on_progress)
            except Exception as error:  # one record that MLflow or the disk refuses must not hold up the others
                _log.debug("%s can't be sent: %s", folder, error)
                _running(store)  # raises if MLflow is gone
    except Exception as error:  # any exception of MLflow, SQLAlchemy, the disk or the network
        _log.debug("orphaned runs can't be closed: %s", error)


def _never_sent(folders: Iterable[Path]) -> list[tuple[Path, str]]:
    """Return the records of runs that MLflow never got, and their experiments' names: comparisons before their runs."""
    begun = []
    for folder in folders:
        for entry in starts_of(folder)[:1]:
            if entry.start is not None and entry.start.suite is not None:  # early records lack it
                begun.append((entry.at_ms, entry.start.parent is not None, folder, entry.start.suite))
    return [(folder, suite) for *_, folder, suite in sorted(begun)]


def _running(store: StoreConnection) -> dict[str, str]:
    """Return the names of the experiments of the newest runs that are RUNNING in MLflow, by run id."""
    with store.turn() as client:
        names = {each.experiment_id: each.name for each in client.search_experiments(max_results=_PAGE)}
        runs = client.search_runs([*names], "attributes.status = 'RUNNING'", max_results=_PAGE)
    return {run.info.run_id: names[run.info.experiment_id] for run in runs}


def _close(folder: Path, store: Store, on_progress: Callable[[], None]) -> None:
    """Send a record and its run's end, unless a process holds the record or has sent and removed it meanwhile."""
    if not (folder / ENTRIES).exists():
        return
    record = RecordFolder(folder, exclusive=True)
    try:
        start, status, result, at_ms = None, None, None, 0
        parent_id, parent = None, None
        for entry in record.earlier():
            if entry.start is not None:
                start, status, result = entry.start, None, None
                parent_id, parent = start.parent_id or parent_id, start.parent or parent
            else:
                status, result = entry.status or status, entry.result or result
            if status is None or entry.status is not None:  # what a run gets after its end does not prolong it
                at_ms = entry.at_ms
        if record.path is None or start is None:
            return
        if record.run_id is None and parent is not None:
            store.connect()
            parent_id = parent_id or store.find_run(*astuple(parent))
        sender = Sender(record, start, None if parent_id is None else lambda: parent_id, system_metrics=False)
        final_status: Status = status or ("KILLED" if result is None else outcome_status(result))
        if status is None and (folder / LOG_FILE).is_file():
            sender.add(LogEntry(at_ms=at_ms, artifact=LOG_FILE))
        sender.add(LogEntry(at_ms=at_ms, status=final_status))
        sender.send(store, on_progress)
        _log.info("%s was orphaned, and is recorded as %s", folder, final_status)
    finally:
        record.release()
