"""Logs a run without slowing it down: entries go to the run's record, and a background thread sends them to MLflow.

When MLflow fails, one warning is printed and the run goes on; unsent entries stay in the record. Sending is tried again
every 30 s, at the run's end, and when another process resumes the run.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipebench.errors import UserError, print_notice
from pipebench.metrics import as_number
from pipebench.tracking.connection import default_uri, reason_of, shown_uri
from pipebench.tracking.entries import DESCRIPTION, description, outcome_status, shown_value, stages_csv
from pipebench.tracking.following import RecordFollower, RecordWriter
from pipebench.tracking.inputs import Inputs
from pipebench.tracking.limits import MAX_PARAM_CHARS, clean_name
from pipebench.tracking.orphaned import close_orphaned
from pipebench.tracking.record import (
    ENTRIES,
    LOG_FILE,
    RESULT_FILE,
    STAGES_FILE,
    LogEntry,
    RecordFolder,
    RunKey,
    RunRecord,
    Start,
    Status,
)
from pipebench.tracking.sender import SEND_INTERVAL_S, Sender
from pipebench.tracking.store import Store
from pipebench.tracking.view import run_address
from pipebench.train.result import Point, RunResult
from pipebench.typed_json import shown, write

__all__ = ["RunLog", "Tracking"]

# How long the end of a run waits for a store that makes no progress. A local database may still be created.
_PATIENCE_LOCAL_S, _PATIENCE_SERVER_S, _PATIENCE_HUNG_S = 120.0, 5.0, 0.2
_RETRY_AFTER_S = 30.0

_log = logging.getLogger(__name__)


class Tracking:
    """Runs logged to one experiment of one MLflow store, which is connected in the background."""

    def __init__(self, suite: str, ready: Callable[[float], bool] | None = None) -> None:
        """Begin to connect to the store `default_uri()`.

        Args:
            suite: name of the experiment.
            ready: waits up to so many seconds for the process that sends what is logged here, and returns whether it
                is ready; None if this process sends to MLflow itself.
        """
        self.store = Store(default_uri(), suite)
        self.folder = Path.cwd()
        self.progress = 0  # number of requests that the store has answered
        self.is_hung = False  # the store hung at the end of a run; later runs don't wait for it again
        self._warned: set[str] = set()  # kinds of warnings that were printed
        self._ready_timed_out = False
        self._runs: list[RunLog] = []  # those that the background thread still sends
        self._awake = threading.Event()
        self._connected = threading.Event()
        self._orphaned: tuple[Path, ...] = ()  # records for `close_orphaned`
        self._is_closed = False
        self._ready = ready or self._connected.wait
        self.sends = ready is None  # whether this process sends to MLflow
        if self.sends:
            threading.Thread(target=self._send_forever, name="pipebench-tracking", daemon=True).start()

    @property
    def patience_s(self) -> float:
        """Seconds to wait for a store that makes no progress."""
        if self.is_hung:
            return _PATIENCE_HUNG_S
        return _PATIENCE_LOCAL_S if self.store.local else _PATIENCE_SERVER_S

    def start(
        self,
        name: str,
        *,
        params: Mapping[str, str],
        tags: Mapping[str, str],
        parent: "RunLog | str | None" = None,
        virtual: bool = True,
        folder: Path | None = None,
        system_metrics: bool = False,
        goes_on_from: int | None = None,
        unique_name: str | None = None,
    ) -> "RunLog":
        """Open the record of a run and log its start; resume a run that an earlier process recorded in `folder`.

        Recorded points are not logged again, and params and tags that changed become tags `resumed.<name>`.

        Args:
            name: of the run in MLflow.
            params: the flattened recipe.
            tags: values that people filter runs by.
            parent: the comparison that the run belongs to, or its MLflow id.
            virtual: whether the run's clock is virtual; then its seconds are logged as a metric.
            folder: of the record; None for a temporary one, which is removed once MLflow has everything.
            system_metrics: whether to sample this host's CPU, memory, disk, network and GPU.
            goes_on_from: samples at the checkpoint that a resumed run goes on from; later points are void.
            unique_name: that no other run of the experiment has; a resumed run keeps its first one.
        """
        record = RecordFolder.of_name(name, self.folder) if folder is None else RecordFolder(folder)
        earlier = record.earlier("start", "point")
        names = [entry.start.unique_name for entry in earlier if entry.start is not None]
        unique_name = next(filter(None, [*names, unique_name]), None)
        parent_id, parent_key = (None, parent.key) if isinstance(parent, RunLog) else (parent, None)
        start = Start(name, virtual, parent_id, goes_on_from, unique_name, self.store.suite, parent_key)
        run = self._open(record, start, parent, system_metrics=system_metrics)
        clock = "virtual" if virtual else "wall"
        begins = LogEntry(start=start, params=params, tags={"clock": clock, "timestamps": "wall", **tags})
        known = RunRecord.of([*earlier, begins])
        run.begin(begins, frozenset(point.samples for point in (known.points if known is not None else ())))
        return run

    def _open(
        self, record: RecordFolder, start: Start, parent: "RunLog | str | None", *, system_metrics: bool
    ) -> "RunLog":
        def parent_id() -> str | None:
            return parent.run_id if isinstance(parent, RunLog) else parent

        has_parent = parent is not None
        if not self.sends:
            return RunLog(self, start.name, RecordWriter(record, start))
        sender = Sender(record, start, parent_id if has_parent else None, system_metrics=system_metrics)
        run = RunLog(self, start.name, sender)
        self._runs.append(run)
        return run

    def close_orphaned(self, folders: Iterable[Path]) -> None:
        """End, in the background, the runs recorded in these folders whose processes were killed."""
        self._orphaned = tuple(folders)
        self.wake()

    def close(self) -> None:
        """Log no more runs here: the background thread ends once all are sent, however long the process lives."""
        self._is_closed = True
        self.wake()

    @contextmanager
    def following(self, folder: Path) -> Iterator["RunLog"]:
        """Send to MLflow what another process records in a folder, until the context ends; yields the run's log."""
        sender = RecordFollower(RecordFolder(folder))
        run = RunLog(self, folder.parent.name, sender)
        self._runs.append(run)
        try:
            yield run
        finally:
            sender.close()
            sender.record.release()

    def wait_until_ready(self) -> bool:
        """Wait until MLflow is imported and connected, so that neither slows down training; return whether it is."""
        ready = self._ready(0.0 if self._ready_timed_out else self.patience_s)
        self._ready_timed_out = not ready
        return ready

    def wake(self) -> None:
        """Make the background thread look at the queues now."""
        self._awake.set()

    def has_sent_ends(self) -> bool:
        """Return whether MLflow has the end of every run that has ended; Ctrl-C may have cut short the wait for one."""
        senders = [run._sender for run in list(self._runs)]
        return all(each.settled.is_set() or each.is_done or not each.ended for each in senders)

    def count_progress(self) -> None:
        """Count a request that the store has answered."""
        self.progress += 1

    def warn(self, reason: BaseException | str, folder: Path | None) -> None:
        """Warn the user, once, that MLflow fails; `folder` is the record."""
        where = f"; everything is kept in {_shown(folder)}" if folder else ""
        self._warn_once("failure", f"failed ({reason_of(reason)}){where}. The run goes on.")

    def warn_of_artifact(self, name: str, reason: Exception, folder: Path | None) -> None:
        """Warn the user, once, that MLflow refuses an artifact; `folder` is the record."""
        where = f"; it is kept in {_shown(folder)}" if folder else ""
        self._warn_once("artifact", f"doesn't take {name} ({reason_of(reason)}){where}")

    def warn_of_unsent(self, run: "RunLog") -> None:
        """Tell the user at Ctrl-C how unsent entries reach MLflow, unless the run's comparison still waits for them."""
        awaited = any(not each._sender.ended for each in list(self._runs))
        if run.folder is not None and not awaited and not run._sender.is_done:
            unsent = f"{_shown(run.folder)} keeps what MLflow hasn't; the next run here, or `pipebench runs`, sends it"
            print_notice(unsent)

    def _warn_once(self, kind: str, failure: str) -> None:
        """Print and log what MLflow failed to do, for the first failure of its kind."""
        if kind not in self._warned:
            self._warned.add(kind)
            message = f"MLflow at {shown_uri(self.store.uri)} {failure}"
            print_notice(message)  # a run's log may go to a file only
            _log.info(message)

    def _send_forever(self) -> None:
        try:
            self.store.connect()
        except Exception as error:  # each run connects again, and warns if that fails
            _log.debug("MLflow doesn't connect: %s", error)
        self._connected.set()
        while self._runs or self._orphaned or not self._is_closed:
            orphaned, self._orphaned = self._orphaned, ()
            if orphaned:
                close_orphaned(self.store.uri, orphaned, self.count_progress)
            # If any run waits for its end, all are tried at once: its comparison must exist in MLflow before it.
            retries_now = any(run.awaits_end for run in self._runs)
            for run in list(self._runs):
                run.send(retries_now=retries_now)
                if run._sender.is_done:
                    self._runs.remove(run)
            self._awake.wait(min((run._sender.interval_s for run in self._runs), default=SEND_INTERVAL_S))
            self._awake.clear()


class RunLog:
    """The log of one run. No method raises because of MLflow.

    Methods return at once, but for `finish`, `settle`, `wait_for_id`, and `metrics` of a run in another folder, which
    waits a while for another process that holds its record.
    """

    def __init__(self, tracking: Tracking, name: str, sender: Sender) -> None:
        """Log as `name`, the run's name in MLflow, to the store and experiment of `tracking`."""
        self.name = name
        self.store = tracking.store
        self._tracking = tracking
        self._sender = sender
        sender.on_refused = lambda artifact, reason: tracking.warn_of_artifact(artifact, reason, self.folder)
        self._retry_at_s = 0.0  # monotonic time
        self._failed = False
        self._result: RunResult | None = None
        self._recorded: frozenset[int] = frozenset()  # samples of the points that an earlier process recorded
        self.key: RunKey | None = None  # set by `begin`

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the run, None until MLflow has given one."""
        return self._sender.record.run_id

    @property
    def unique_name(self) -> str:
        """A name that no other run of the experiment has, the same for all processes of the run."""
        return self._sender.start.unique_name or self.name

    @property
    def folder(self) -> Path | None:
        """The record's folder, which has the run's artifacts; None if the disk failed."""
        return self._sender.record.path

    @property
    def has_result(self) -> bool:
        """Whether the run's result is logged."""
        return self._result is not None

    def begin(self, start: LogEntry, recorded: frozenset[int] = frozenset()) -> None:
        """Log the start of a process; `recorded` are the samples of the points that the record has already."""
        self._recorded = recorded
        self.key = RunKey(self.name, start.at_ms)
        self._sender.add(start)
        if any(len(value) > MAX_PARAM_CHARS or clean_name(name) != name for name, value in start.params.items()):
            self.text("params.json", json.dumps(dict(start.params), indent=1))

    def point(self, point: Point) -> bool:
        """Log one moment of the curves: MLflow's step is the samples, its timestamp the wall clock's time.

        Returns:
            Whether the point is new; False if an earlier process recorded it.
        """
        is_new = point.samples not in self._recorded
        if is_new:
            self._sender.add(LogEntry(point=point))
        return is_new

    def metrics(self, values: Mapping[str, float], *, about: str | Path | None = None) -> None:
        """Log single values, e.g. the spread over seeds on a parent run.

        Args:
            values: by metric.
            about: the run that the values describe: its MLflow id or, if it has ended and MLflow lacks it, the folder
                of its record, which is sent later; None for this run.
        """
        rounded = {name: shown_value(value) for name, value in self._numbers(values).items()}
        if not isinstance(about, Path):
            self._sender.add(LogEntry(metrics=rounded, about=about))
        elif (about / ENTRIES).exists():  # else the record was sent and removed meanwhile
            try:
                record = RecordFolder(about)
            except UserError as held:
                print_notice(f"{', '.join(rounded)}: not recorded: {held}")
                return
            record.append(LogEntry(metrics=rounded))
            record.release()

    def inputs(self, inputs: Inputs) -> None:
        """Log the run's data set and model."""
        self._sender.add(LogEntry(inputs=inputs))

    def tag(self, name: str, value: str) -> None:
        """Set a tag."""
        self._sender.add(LogEntry(tags={name: value}))

    def describe(self, markdown: str, pictures: Sequence[str] = ()) -> None:
        """Set the run's description in MLflow, cut to MLflow's limit; `pictures` are artifacts shown below it."""
        self.tag(DESCRIPTION, description(markdown, pictures))

    def text(self, artifact: str, text: str) -> None:
        """Store a text as an artifact; the name may include folders."""
        self._sender.add(LogEntry(artifact=artifact), text.encode())

    def log_file(self) -> None:
        """Store as an artifact the log that the run's processes wrote into its folder, if there is one."""
        if self.folder is not None and (self.folder / LOG_FILE).is_file():
            self._sender.add(LogEntry(artifact=LOG_FILE))

    def file(self, artifact: str, path: str | os.PathLike[str]) -> None:
        """Store a copy of a file as an artifact; raises an OSError if it can't be read."""
        self._sender.add(LogEntry(artifact=artifact), Path(path).read_bytes())

    def result(self, result: RunResult) -> None:
        """Log the run's result, without metrics that aren't numbers: with them it couldn't be read back."""
        self._result = result = replace(result, metrics=self._numbers(result.metrics))
        self._sender.add(LogEntry(result=result))
        self.text(RESULT_FILE, write(result))
        if table := stages_csv(result):
            self.text(STAGES_FILE, table)

    def move(self, folder: Path) -> None:
        """Move the run's record to another folder."""
        self._sender.record.move(folder)

    def finish(self, result: RunResult | None = None, *, status: Status | None = None) -> None:
        """Log the end, and `settle`.

        Args:
            result: logged first; None for a comparison, a run that failed, or one whose result is logged already.
            status: MLflow's; None for the result's: FAILED if it diverged, KILLED if interrupted, else FINISHED.
        """
        if result is not None:
            self.result(result)
        self._sender.add(LogEntry(status=status or outcome_status(self._result)))
        self.settle()

    def settle(self) -> None:
        """Wait until MLflow has the run's end, whichever process logged it; a few seconds at most if MLflow hangs."""
        try:
            if not self._wait():
                self._tracking.is_hung = True
                self._warn("it does not answer")
        except BaseException:  # a second Ctrl-C
            self._tracking.warn_of_unsent(self)
            raise

    def wait_for_id(self) -> str | None:
        """Wait for MLflow's id of the run, by which another process refers to it; None if MLflow gives none in time."""
        until_s = time.monotonic() + self._tracking.patience_s
        self._tracking.wake()
        while self.run_id is None and not self._failed and time.monotonic() < until_s:
            time.sleep(0.02)
        return self.run_id

    def where(self) -> str:
        """Return the line that tells the user where the run is recorded; "" if another process sends it to MLflow."""
        if not self._tracking.sends:
            return ""
        if not self._sender.is_empty:
            path = self._sender.record.path
            return f"{_shown(path)}/ (MLflow did not take it)" if path else "not recorded: MLflow and the disk failed"
        store = self.store
        if store.uri.startswith("http"):
            return run_address(shown_uri(store.uri).rstrip("/"), str(store.experiment_id), str(self.run_id))
        return f"pipebench ui   (experiment {store.suite}, run {self._sender.start.name})"

    @property
    def awaits_end(self) -> bool:
        """Whether the run's end is logged, not sent yet, and sending it not given up."""
        return self._sender.ended and not self._sender.settled.is_set()

    def send(self, *, retries_now: bool) -> None:
        """Send the queue to MLflow; entries that it does not accept stay. For the background thread only.

        After a failure nothing is sent for half a minute, except with `retries_now`.
        """
        self._sender.take_in()
        ending = self._sender.ended
        if not retries_now and time.monotonic() < self._retry_at_s:
            return
        for is_last in (not ending, True):  # a run that has ended is tried twice, as it has no later call
            try:
                self._sender.send(self.store, self._tracking.count_progress)
            except Exception as error:  # any exception of MLflow, SQLAlchemy, the disk or the network
                self.store.is_connected = False
                if not is_last:
                    continue
                self._retry_at_s = time.monotonic() + _RETRY_AFTER_S
                self._warn(error)
                if ending:
                    self._sender.give_up()
            return

    def _numbers(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Return the metrics that are numbers, and print a sentence about each other one."""
        numbers = {}
        for name, value in metrics.items():
            number = as_number(value)
            if number is None:
                print_notice(
                    f"metric {name} of run {self.name!r} isn't recorded: got {shown(value)}, allowed is a number"
                )
            else:
                numbers[name] = number
        return numbers

    def _wait(self) -> bool:
        """Wait until the run's end is sent or given up; return False once the store makes no progress for too long."""
        tracking, patience_s = self._tracking, self._tracking.patience_s
        tracking.wake()
        seen, deadline_s = tracking.progress, time.monotonic() + patience_s
        while not self._sender.settled.wait(0.05) or not tracking.has_sent_ends():
            if self._sender.settled.is_set():
                time.sleep(0.05)
            if tracking.progress != seen:
                seen, deadline_s = tracking.progress, time.monotonic() + patience_s
            if time.monotonic() > deadline_s:
                return False
        return True

    def _warn(self, reason: BaseException | str) -> None:
        self._failed = True
        self._tracking.warn(reason, self._sender.record.path)


def _shown(path: Path) -> Path:
    """Return a path relative to the working directory, if it is below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
