"""The record of a run: a folder to which every log entry is appended before it is sent.

    record.jsonl    an entry a line, in order
    mlflow.json     MLflow's id of the run, how many of the entries it has, and when a run that ended unsaid was closed
    ...             the artifacts, under their names

What a run logged is read back from here, whether MLflow has it or not.
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

RECORD = "record"  # the record, in the folder of a run that has one
RESULTS_FOLDER = "pipebench-results"  # where records are kept of runs that have no folder of their own
ENTRIES, _SENT, _HELD = "record.jsonl", "mlflow.json", ".held"
LOG_FILE = "run.log"  # the artifact that the processes of a run write while they run
RESULT_FILE, STAGES_FILE = "result.json", "stages.csv"  # the artifacts that a run's result is, whole and by stage

# Ends a line of which a process that died, or a full disk, has written a part, maybe all but its end: no entry
_VOID = b"?\n"
_MOST_TRIES = 100  # to make a folder beside others that remove theirs
_PATIENCE_S, _POLL_S = 10.0, 0.05  # with one who sends a record that was left, which takes a second
_LONGEST = 120  # characters of its description
_MAX_BYTES = 1 << 40  # a long run's entries, or its trace, are as large as they are
_log = logging.getLogger(__name__)

Status = Literal["FINISHED", "FAILED", "KILLED"]


@dataclass(frozen=True)
class Begun:
    """Identifies a run of an experiment that MLflow may not have yet."""

    name: str
    at_ms: int  # when it began, milliseconds since the epoch


@dataclass(frozen=True)
class Start:
    """A process that begins or resumes a run."""

    name: str
    virtual: bool  # whether the run's clock is virtual
    parent_id: str | None = None  # MLflow's id of the run it belongs to, if known
    # Samples at the checkpoint that it goes on from, 0 at the beginning; None in early records: those at the last point
    goes_on_from: Count | None = None
    # That no other run of the experiment has, by which other writers than MLflow know it
    unique_name: str | None = None
    suite: str | None = None  # MLflow's experiment; None in early records
    parent: Begun | None = None  # the run it belongs to, in this process


@dataclass(frozen=True)
class LogEntry:
    """What was logged at one moment; absent parts are empty or None."""

    at_ms: int = field(default_factory=lambda: time.time_ns() // 1_000_000)  # milliseconds since the epoch
    start: Start | None = None  # begins the record of a process
    params: Mapping[str, str] = field(default_factory=dict)  # of the recipe
    tags: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, Number] = field(default_factory=dict)  # single values, at `step`
    step: int = 0
    about: str | None = None  # MLflow's id of the run that the metrics are of; None for the run itself
    point: Point | None = None  # of the curves
    inputs: Inputs | None = None
    artifact: str | None = None  # name of a complete file in the record's folder; it may include folders
    result: RunResult | None = None
    status: Status | None = None  # how it ended: the last entry of a process that ended normally

    def to_json(self) -> str:
        """Return it on one line, without empty parts; `typed_json.read` reads it back."""
        return json.dumps({name: value for name, value in asdict(self).items() if value not in (None, {})})


@dataclass(frozen=True)
class Sent:
    """What MLflow has of a record."""

    run_id: str | None  # MLflow's id of the run, None as long as it has none
    num_sent: Count  # how many of the entries it has
    end_ms: int | None = None  # of the last end that whoever sends the record is done with, when it was logged
    failed: bool = False  # whether that was without MLflow having everything


@dataclass(frozen=True)
class RunRecord:
    """A run's entries combined: later values replace earlier ones, each point is there once.

    Points beyond the checkpoint that a later process went on from are of a branch that was left.
    """

    name: str
    params: Mapping[str, str]  # of the recipe
    tags: Mapping[str, str]
    metrics: Mapping[str, float]  # single values but those of the result
    points: tuple[Point, ...]  # the curves, in time order
    artifacts: tuple[str, ...]  # their names
    result: RunResult | None  # of the last process that began or resumed the run; None if it has none yet
    status: Status | None  # likewise

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
    """Return what is recorded in a folder; None if nothing is; raises a FileError if it can't be read."""
    return RunRecord.of(_entries_in(_read(folder / ENTRIES)))


def starts_of(folder: Path) -> list[LogEntry]:
    """Return the entries in a folder that begin or resume a run; empty if they can't be read."""
    try:
        return _entries_in(_read(folder / ENTRIES), ("start",))
    except FileError:
        return []


def mlflow_run_id(folder: Path) -> str | None:
    """Return MLflow's id of the run that is recorded in a folder; None if it has none yet."""
    return read_sent(folder).run_id


class RecordFolder:
    """Writes a record; thread-safe.

    Whoever has it open holds a shared lock on it, which the system releases when a process dies.
    """

    def __init__(self, path: Path | None, *, alone: bool = False) -> None:
        """Open or make a folder, or none; `alone`: none if somebody has it open.

        Raises:
            UserError: somebody has had it alone for long: a command that was stopped (Ctrl-Z), or a slow server's.
        """
        self.path = path  # None once it can't be written, and then nothing is
        self.num_sent = 0  # how many of all entries MLflow has
        self.run_id: str | None = None  # MLflow's, as soon as it has one
        self._num_bytes = 0  # of the file's entries that are `earlier`
        self._lock = threading.Lock()
        self._holds: FileLock | None = None  # None where the file system has no locks
        with self._writing():
            if path is not None:
                path.mkdir(parents=True, exist_ok=True)
                self._hold(path / _HELD, alone=alone)
                sent = read_sent(path)
                self.run_id, self.num_sent = sent.run_id, sent.num_sent
                self._num_bytes = len(_whole_lines(_read(path / ENTRIES)))

    @property
    def is_new(self) -> bool:
        """Whether there are no `earlier` entries."""
        return self._num_bytes == 0

    def earlier(self, *parts: str) -> list[LogEntry]:
        """Return the entries of earlier processes, and those that were heard of: all, or those with one of some parts.

        They are read anew: those of a long run, which has a sample of the system every ten seconds, would fill memory.
        """
        with self._writing():
            if self.path is not None:
                return _entries_in(_read(self.path / ENTRIES)[: self._num_bytes], parts)
        return []

    @staticmethod
    def of_name(name: str, parent: Path) -> "RecordFolder":
        """Make the record of a run that has no folder of its own: `<parent>/pipebench-results/<name>-<n>/`."""
        stem = re.sub(r"[^\w.+-]+", "-", name).strip("-.") or "run"
        number, tries = 1, 0
        while tries < _MOST_TRIES:
            path = parent / RESULTS_FOLDER / f"{stem}-{number}"
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                if not path.is_dir():  # something else is in the way
                    return RecordFolder(None)
                number += 1
            except FileNotFoundError:  # another run has just removed what it made, or nothing can be made here
                tries += 1
            except OSError:
                break
            else:
                return RecordFolder(path)
        return RecordFolder(None)

    def append(self, entry: LogEntry, content: bytes | None = None) -> None:
        """Write an artifact's content, then its entry. Never raises: MLflow may still take it."""
        with self._writing():
            if self.path is None:
                return
            if entry.artifact is not None and content is not None:
                path = self._inside(entry.artifact)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            line = f"{entry.to_json()}\n".encode()
            with (self.path / ENTRIES).open("a+b", buffering=0) as file:
                if not _ends_whole(file):
                    line = _VOID + line
                # In one piece: another process may append, too.
                if file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, "No space left on device")

    def hear(self) -> list[LogEntry]:
        """Return the entries that were appended, by whichever process, since the last call or the folder was opened."""
        heard: list[LogEntry] = []
        with self._writing():
            path = None if self.path is None else self.path / ENTRIES
            if path is not None and path.exists() and path.stat().st_size > self._num_bytes:
                with path.open("rb") as file:
                    file.seek(self._num_bytes)
                    whole = _whole_lines(file.read())
                self._num_bytes += len(whole)
                heard = _entries_in(whole)
        return heard

    def content(self, artifact: str) -> bytes | None:
        """Return an artifact's content; None if it is gone."""
        with self._lock, suppress(FileError):  # another thread may be about to move the folder
            if self.path is not None:
                return read_bytes(self._inside(artifact), _MAX_BYTES)
        return None

    def note(self, sent: Sent) -> None:
        """Store what MLflow has; on a full disk it isn't, and what is sent twice is logged once."""
        self.run_id, self.num_sent = sent.run_id, sent.num_sent
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
        """Remove a record that MLflow has, unless it is in a run's folder."""
        with self._lock:
            if self.path is not None and self.path.parent.name == RESULTS_FOLDER:
                shutil.rmtree(self.path, ignore_errors=True)
                _remove_if_empty(self.path.parent)
        self.release()

    def release(self) -> None:
        """Let others have the record alone."""
        if self._holds is not None:
            self._holds.release()

    def _hold(self, path: Path, *, alone: bool) -> None:
        until_s = time.monotonic() + _PATIENCE_S
        while self._holds is None:
            try:
                self._holds = FileLock(path, shared=not alone)
            except OSError as error:
                if not alone and error.errno in NO_LOCKS:
                    return
                if alone or error.errno != errno.EWOULDBLOCK:
                    raise
                if time.monotonic() >= until_s:
                    raise UserError(f"{path.parent}: {_holder(path)}") from None
                time.sleep(_POLL_S)
        if alone:
            with suppress(OSError):
                path.write_text(f"process {os.getpid()} on {socket.gethostname()}")

    def _inside(self, name: str) -> Path:
        assert self.path is not None
        return self.path.joinpath(*(part for part in PurePosixPath(name).parts if part not in ("/", "..")))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Lock the folder for writing, and give it up when the disk fails."""
        with self._lock:
            try:
                yield
            except (OSError, FileError) as error:
                _log.debug("the run can't be kept on disk: %s", error)
                self.path = None


def _read(path: Path) -> bytes:
    """Return a file's content, empty if it doesn't exist."""
    return read_bytes(path, _MAX_BYTES) if path.exists() else b""


def _ends_whole(file: IO[bytes]) -> bool:
    """Return whether a file of entries ends with a whole one, or is empty."""
    num_bytes = file.seek(0, os.SEEK_END)
    return num_bytes == 0 or os.pread(file.fileno(), 1, num_bytes - 1) == b"\n"


def _whole_lines(content: bytes) -> bytes:
    return content[: content.rfind(b"\n") + 1]


def _entries_in(content: bytes, parts: Sequence[str] = ()) -> list[LogEntry]:
    """Return the valid entries, or those with one of some parts; a crash, a full disk or an edit may spoil one."""
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
    except (FileError, JsonError):  # not there, or spoilt: what is sent twice is logged once
        return Sent(None, 0)


def _holder(path: Path) -> str:
    """Say who has a record alone, and what to do about it."""
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
