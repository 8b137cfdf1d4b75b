"""The record of a run: a folder to which every log entry is appended before it is sent to MLflow.

    record.jsonl    the entries in order, one per line
    mlflow.json     what MLflow has of them: its id of the run, the number of entries, the run's end (`Sent`)
    ...             the artifacts, under their names

A run's entries are read back from here, whether MLflow has them or not.
"""

import errno
import json
import logging
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal

from pipebench.errors import UserError
from pipebench.files import NO_LOCKS, FileError, FileLock, read_bytes, read_text
from pipebench.tracking.inputs import Inputs
from pipebench.train.result import Point, RunResult
from pipebench.typed_json import Count, JsonError, Number, read

RECORD = "record"  # the record's folder, inside the folder of a run that has one
RESULTS_FOLDER = "pipebench-results"  # the folder of records of runs that have no folder of their own
ENTRIES, _SENT, _LOCK = "record.jsonl", "mlflow.json", ".held"
LOG_FILE = "run.log"  # the artifact that the processes of a run write while they run
RESULT_FILE, STAGES_FILE = "result.json", "stages.csv"  # artifacts: a run's whole result, and its table of stages

# Completes a line that a killed process or a full disk left incomplete, and makes it invalid: it is no entry.
_VOID = b"?\n"
_MOST_TRIES = 100  # to create a folder while other runs remove theirs
_PATIENCE_S = 10.0  # waiting for a process that sends an orphaned record, which takes a second
_LONGEST = 120  # characters of that process's description
_MAX_BYTES = 1 << 40  # the entries of a long run, or its trace, may have any size
_log = logging.getLogger(__name__)

Status = Literal["FINISHED", "FAILED", "KILLED"]


@dataclass(frozen=True)
class RunKey:
    """Identifies a run of an experiment to which MLflow may not have given an id yet."""

    name: str
    at_ms: int  # when it began, milliseconds since the epoch


@dataclass(frozen=True)
class Start:
    """The start of a process that begins or resumes a run."""

    name: str  # of the run in MLflow
    virtual: bool  # whether the run's clock is virtual
    parent_id: str | None = None  # MLflow's id of the parent run, if known
    # Samples at the checkpoint that the process goes on from, 0 without one. None in early records, which went on from
    # their last point.
    goes_on_from: Count | None = None
    unique_name: str | None = None  # that no other run of the experiment has, for writers other than MLflow
    suite: str | None = None  # MLflow's experiment; None in early records
    parent: RunKey | None = None  # the parent run, if it was begun by the same process


@dataclass(frozen=True)
class LogEntry:
    """What was logged at one moment; most entries have one part, and the others are empty or None."""

    at_ms: int = field(default_factory=lambda: time.time_ns() // 1_000_000)  # milliseconds since the epoch
    start: Start | None = None  # begins the record of a process
    params: Mapping[str, str] = field(default_factory=dict)  # of the recipe
    tags: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, Number] = field(default_factory=dict)  # single values, at `step`
    step: int = 0
    about: str | None = None  # MLflow's id of the run that the metrics describe; None for the run itself
    point: Point | None = None  # of the curves
    inputs: Inputs | None = None
    artifact: str | None = None  # name of a complete file in the record's folder; it may include folders
    result: RunResult | None = None
    status: Status | None = None  # how the run ended: the last entry of a process that ended normally

    def to_json(self) -> str:
        """Return the entry on one line, without empty parts; `typed_json.read` reads it back."""
        return json.dumps({name: value for name, value in asdict(self).items() if value not in (None, {})})


@dataclass(frozen=True)
class Sent:
    """What MLflow has of a record."""

    run_id: str | None  # MLflow's id of the run, None while it has none
    num_sent: Count  # number of entries that MLflow has
    end_ms: int | None = None  # when the last end was logged that was sent or given up
    failed: bool = False  # whether it was given up


@dataclass(frozen=True)
class RunRecord:
    """A run's entries combined: later values replace earlier ones, and each point is there once.

    Points after the checkpoint that a later process went on from are left out.
    """

    name: str
    params: Mapping[str, str]  # of the recipe
    tags: Mapping[str, str]
    metrics: Mapping[str, float]  # single values, except those of the result
    points: tuple[Point, ...]  # the curves, in time order
    artifacts: tuple[str, ...]  # their names
    result: RunResult | None  # of the last process that began or resumed the run; None if it has none yet
    status: Status | None  # how that process ended the run; None if it did not

    @staticmethod
    def of(entries: Sequence[LogEntry]) -> "RunRecord | None":
        """Combine entries; None if none of them is a start."""
        name = next((entry.start.name for entry in entries if entry.start is not None), None)
        if name is None:
            return None
        params: dict[str, str] = {}
        tags: dict[str, str] = {}
        metrics: dict[str, float] = {}
        points: dict[int, Point] = {}
        artifacts: dict[str, None] = {}
        result, status = None, None
        for entry in entries:
            if entry.start is not None and (back_to := entry.start.goes_on_from) is not None:
                # The process trains these points again, perhaps with other values.
                points = {samples: point for samples, point in points.items() if samples <= back_to}
            params |= entry.params
            tags |= entry.tags
            metrics |= entry.metrics if entry.about is None else {}
            if entry.point is not None:
                points.setdefault(entry.point.samples, entry.point)
            if entry.artifact is not None:
                artifacts[entry.artifact] = None
            result = entry.result if entry.start is not None else entry.result or result
            status = entry.status if entry.start is not None else entry.status or status
        curves = tuple(points[samples] for samples in sorted(points))
        return RunRecord(name, params, tags, metrics, curves, tuple(artifacts), result, status)


def read_record(folder: Path) -> RunRecord | None:
    """Return the run recorded in a folder, None without one; raises a FileError if the record can't be read."""
    return RunRecord.of(_entries_in(_read(folder / ENTRIES)))


def starts_of(folder: Path) -> list[LogEntry]:
    """Return the entries in a folder that begin or resume a run; empty if they can't be read."""
    try:
        return _entries_in(_read(folder / ENTRIES), ("start",))
    except FileError:
        return []


def mlflow_run_id(folder: Path) -> str | None:
    """Return MLflow's id of the run recorded in a folder; None if it has none yet."""
    return read_sent(folder).run_id


class RecordFolder:
    """Writes and reads a record; thread-safe.

    A process that has the record open holds a shared lock on it, which the system releases when the process dies.
    """

    def __init__(self, path: Path | None, *, exclusive: bool = False) -> None:
        """Open a record's folder, created if missing.

        Args:
            path: the folder; None for a record that keeps nothing.
            exclusive: take the lock exclusively; if another process has the record open, keep nothing.

        Raises:
            UserError: another process holds it exclusively for long: it was stopped (Ctrl-Z), or its server is slow.
        """
        self.path = path  # None once it can't be written; then nothing is
        self.num_sent = 0  # number of entries that MLflow has
        self.run_id: str | None = None  # MLflow's, None while it has none
        self._num_bytes = 0  # size of the entries that `earlier` returns
        self._lock = threading.Lock()
        self._file_lock: FileLock | None = None  # None if the file system has no locks
        with self._writing():
            if path is not None:
                path.mkdir(parents=True, exist_ok=True)
                self._hold(path / _LOCK, exclusive=exclusive)
                sent = read_sent(path)
                self.run_id, self.num_sent = sent.run_id, sent.num_sent
                self._num_bytes = len(_whole_lines(_read(path / ENTRIES)))

    @property
    def is_new(self) -> bool:
        """Whether there are no `earlier` entries."""
        return self._num_bytes == 0

    def earlier(self, *parts: str) -> list[LogEntry]:
        """Return the entries before this process, and those that `new_entries` returned.

        They are read from disk each time: a long run, which has a system sample every ten seconds, would fill memory.

        Args:
            parts: names of fields of `LogEntry`: return only entries that have one of them; all by default.
        """
        with self._writing():
            if self.path is not None:
                return _entries_in(_read(self.path / ENTRIES)[: self._num_bytes], parts)
        return []

    @staticmethod
    def of_name(name: str, parent: Path) -> "RecordFolder":
        """Create the record of a run without a folder of its own: `<parent>/pipebench-results/<name>-<n>/`."""
        stem = re.sub(r"[^\w.+-]+", "-", name).strip("-.") or "run"
        number, tries = 1, 0
        while tries < _MOST_TRIES:
            path = parent / RESULTS_FOLDER / f"{stem}-{number}"
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                if not path.is_dir():  # a file has this name
                    return RecordFolder(None)
                number += 1
            except FileNotFoundError:  # another run has just removed the parent, or nothing can be created here
                tries += 1
            except OSError:
                break
            else:
                return RecordFolder(path)
        return RecordFolder(None)

    def append(self, entry: LogEntry, content: bytes | None = None) -> None:
        """Write an artifact's content, then its entry. Never raises, as MLflow may still accept the entry."""
        with self._writing():
            if self.path is None:
                return
            if entry.artifact is not None and content is not None:
                path = self._inside(entry.artifact)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            line = f"{entry.to_json()}\n".encode()
            with (self.path / ENTRIES).open("a+b", buffering=0) as file:
                if not _ends_with_newline(file):
                    line = _VOID + line
                # In one write, as another process may append at the same time.
                if file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, "No space left on device")

    def new_entries(self) -> list[LogEntry]:
        """Return the entries that any process has appended since the last call, or since the folder was opened."""
        entries: list[LogEntry] = []
        with self._writing():
            path = None if self.path is None else self.path / ENTRIES
            if path is not None and path.exists() and path.stat().st_size > self._num_bytes:
                with path.open("rb") as file:
                    file.seek(self._num_bytes)
                    whole = _whole_lines(file.read())
                self._num_bytes += len(whole)
                entries = _entries_in(whole)
        return entries

    def content(self, artifact: str) -> bytes | None:
        """Return an artifact's content; None if it is gone."""
        with self._lock, suppress(FileError):  # another thread may be about to move the folder
            if self.path is not None:
                return read_bytes(self._inside(artifact), _MAX_BYTES)
        return None

    def write_sent(self, sent: Sent) -> None:
        """Store what MLflow has. A full disk is ignored: entries that are sent twice are logged once."""
        self.run_id = sent.run_id
        self.num_sent = sent.num_sent
        with self._lock, suppress(OSError):
            if self.path is not None:
                beside = self.path / f".{_SENT}"
                beside.write_text(json.dumps(asdict(sent)), encoding="utf-8")
                beside.replace(self.path / _SENT)

    def move(self, path: Path) -> None:
        """Move the record to another folder on the same disk."""
        with self._writing():
            if self.path is not None:
                self.path.rename(path)
                _remove_if_empty(self.path.parent)
                self.path = path

    def remove(self) -> None:
        """Remove a record that MLflow has, unless the run has a folder of its own; release the lock."""
        with self._lock:
            if self.path is not None and self.path.parent.name == RESULTS_FOLDER:
                shutil.rmtree(self.path, ignore_errors=True)
                _remove_if_empty(self.path.parent)
        self.release()

    def release(self) -> None:
        """Release the lock, so that another process may take it exclusively."""
        if self._file_lock is not None:
            self._file_lock.release()

    def _hold(self, path: Path, *, exclusive: bool) -> None:
        """Lock the record's lock file; wait for a process that has locked it exclusively."""
        try:
            self._file_lock = FileLock(path, shared=not exclusive, patience_s=0.0 if exclusive else _PATIENCE_S)
        except OSError as error:
            if exclusive or error.errno not in (*NO_LOCKS, errno.EWOULDBLOCK):
                raise
            if error.errno == errno.EWOULDBLOCK:
                raise UserError(f"{path.parent}: {_holder(path)}") from None
        if exclusive:
            with suppress(OSError):
                path.write_text(f"process {os.getpid()} on {socket.gethostname()}")

    def _inside(self, name: str) -> Path:
        """Return the path of an artifact, which is inside the folder whatever its name."""
        assert self.path is not None
        return self.path.joinpath(*(part for part in PurePosixPath(name).parts if part not in ("/", "..")))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Exclude other threads; give the folder up if the disk fails."""
        with self._lock:
            try:
                yield
            except (OSError, FileError) as error:
                _log.debug("the run can't be kept on disk: %s", error)
                self.path = None


def _read(path: Path) -> bytes:
    """Return a file's content, empty if it doesn't exist."""
    return read_bytes(path, _MAX_BYTES) if path.exists() else b""


def _ends_with_newline(file: IO[bytes]) -> bool:
    """Return whether a file's last line is complete, or the file empty."""
    num_bytes = file.seek(0, os.SEEK_END)
    return num_bytes == 0 or os.pread(file.fileno(), 1, num_bytes - 1) == b"\n"


def _whole_lines(content: bytes) -> bytes:
    return content[: content.rfind(b"\n") + 1]


def _entries_in(content: bytes, parts: Sequence[str] = ()) -> list[LogEntry]:
    """Return the valid entries, with `parts` those that have one of these fields.

    Lines that a crash, a full disk or an edit made invalid are skipped.
    """
    marks = [f'"{part}": '.encode() for part in parts]
    entries = []
    for line in content.splitlines():
        if not marks or any(mark in line for mark in marks):
            with suppress(JsonError):
                entries.append(read(LogEntry, line))
    return entries


def read_sent(folder: Path) -> Sent:
    """Return what MLflow has of the record in a folder."""
    try:
        found = read(dict[str, Any], read_text(folder / _SENT))
        found.pop("experiment_id", None)  # of earlier versions
        return read(Sent, found)
    except (FileError, JsonError):  # missing or invalid: entries that are sent twice are logged once
        return Sent(None, 0)


def _holder(path: Path) -> str:
    """Return, as the end of a sentence, which process holds a record exclusively, and the remedy."""
    try:
        holder = path.read_text(errors="replace")[:_LONGEST]
    except OSError:
        holder = ""
    return (
        f"{holder or 'another process'} holds it, to send it to MLflow, and hasn't finished in {_PATIENCE_S:.0f} s; "
        "let it end (with `fg`, if Ctrl-Z stopped it), or end it"
    )


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()
