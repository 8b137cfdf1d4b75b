"""Logs a run without slowing it down: entries go to its record, and a background thread sends them to MLflow.

When MLflow fails there is one warning, and the run goes on: unsent entries stay in the record. MLflow is tried again
every half minute, at the end, and when another process resumes the run.
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
from pipebench.tracking.following import Followed, Follower
from pipebench.tracking.inputs import Inputs
from pipebench.tracking.left import close_left
from pipebench.tracking.limits import MAX_PARAM_CHARS, clean_name
from pipebench.tracking.record import (
    ENTRIES,
    LOG_FILE,
    RESULT_FILE,
    STAGES_FILE,
    Begun,
    LogEntry,
    RecordFolder,
    RunRecord,
    Start,
    Status,
)
from pipebench.tracking.sender import SEND_EVERY_S, Sender
from pipebench.tracking.store import Store
from pipebench.tracking.view import run_address
from pipebench.train.result import Point, RunResult
from pipebench.typed_json import shown, write

__all__ = ["RunLog", "Tracking"]

# How long the end of a run waits for a store that takes nothing. A local file may be in the making.
_PATIENCE_LOCAL_S, _PATIENCE_SERVER_S, _PATIENCE_LOST_S = 120.0, 5.0, 0.2
_RETRY_AFTER_S = 30.0

_log = logging.getLogger(__name__)


class Tracking:
    """One store and one experiment, connected in the background."""

    def __init__(self, suite: str, ready: Callable[[float], bool] | None = None) -> None:
        """Begin to connect to `default_uri`, for the experiment named `suite`.

        `ready` waits up to some seconds for the process that follows what is logged here, and returns whether it does;
        None if this one sends it to MLflow itself.
        """
        self.store = Store(default_uri(), suite)
        self.folder = Path.cwd()
        self.progress = 0  # grows with everything the store has taken
        self.lost = False  # the store hung at the end of a run; later runs don't wait for it again
        self._warned = self._warned_of_artifact = False
        self._waited_in_vain = False
        self._runs: list[RunLog] = []
        self._awake = threading.Event()
        self._connected = threading.Event()
        self._left: tuple[Path, ...] = ()
        self._is_closed = False
        self._ready = ready or self._connected.wait
        self.sends = ready is None
        if self.sends:
            threading.Thread(target=self._send_forever, name="pipebench-tracking", daemon=True).start()

    @property
    def patience_s(self) -> float:
        """Seconds to wait for a store that takes nothing."""
        if self.lost:
            return _PATIENCE_LOST_S
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
        """Open the record of one run.

        `tags` are values that people filter by; `parent` is the comparison it belongs to, or MLflow's id of that.
        Virtual seconds are a metric, and timestamps are the wall's. `system_metrics` samples this host's CPU, memory,
        disk, network and GPU. Without a `folder` the record is removed once MLflow has everything. A run that an
        earlier process recorded in the folder is resumed: points that MLflow has are not logged again, its start stays,
        params and tags that changed become tags `resumed.<name>`. Points after `goes_on_from` samples are void;
        the first process's `unique_name` stays.
        """
        record = RecordFolder.of_name(name, self.folder) if folder is None else RecordFolder(folder)
        earlier = record.earlier("start", "point")
        names = (entry.start.unique_name for entry in earlier if entry.start is not None)
        unique_name = next(filter(None, names), unique_name)
        parent_id, above = (None, parent.begun) if isinstance(parent, RunLog) else (parent, None)
        start = Start(name, virtual, parent_id, goes_on_from, unique_name, self.store.suite, above)
        run = self._open(record, start, parent, system_metrics=system_metrics)
        clock = "virtual" if virtual else "wall"
        begins = LogEntry(start=start, params=params, tags={"clock": clock, "timestamps": "wall", **tags})
        known = RunRecord.of([*earlier, begins])
        run.begin(begins, frozenset(point.samples for point in known.points) if known is not None else frozenset())
        return run

    def _open(
        self, record: RecordFolder, start: Start, parent: "RunLog | str | None", *, system_metrics: bool
    ) -> "RunLog":
        def parent_id() -> str | None:
            return parent.run_id if isinstance(parent, RunLog) else parent

        has_parent = parent is not None
        if not self.sends:
            return RunLog(self, start.name, Followed(record, start))
        sender = Sender(record, start, parent_id if has_parent else None, system_metrics=system_metrics)
        run = RunLog(self, start.name, sender)
        self._runs.append(run)
        return run

    def close_left(self, folders: Iterable[Path]) -> None:
        """Close, in the background, the records in these folders whose processes were killed."""
        self._left = tuple(folders)
        self.wake()

    def close(self) -> None:
        """Log no more runs here: what sends them ends as soon as none is left, in a process that may live for long."""
        self._is_closed = True
        self.wake()

    @contextmanager
    def following(self, folder: Path) -> Iterator["RunLog"]:
        """Send to MLflow what another process records in a folder, as long as this lasts; yields the run's log."""
        sender = Follower(RecordFolder(folder))
        run = RunLog(self, folder.parent.name, sender)
        self._runs.append(run)
        try:
            yield run
        finally:
            sender.close()
            sender.record.release()

    def wait_until_ready(self) -> bool:
        """Wait until MLflow is imported and connected, so that neither costs time later; return whether it is."""
        limit_s = _PATIENCE_LOCAL_S if self.store.local else _PATIENCE_SERVER_S
        ready = self._ready(0.0 if self._waited_in_vain else limit_s)
        self._waited_in_vain = not ready
        return ready

    def wake(self) -> None:
        """Make the sender look at the queues now."""
        self._awake.set()

    def has_sent_ends(self) -> bool:
        """Return whether MLflow has the end of every run that has ended: Ctrl-C may have ended the wait for one."""
        senders = [run._sender for run in list(self._runs)]
        return all(each.settled.is_set() or each.is_done or not each.ended for each in senders)

    def note_progress(self) -> None:
        """Note that MLflow has taken something."""
        self.progress += 1

    def warn(self, reason: BaseException | str, folder: Path | None) -> None:
        """Warn the user, once, that MLflow doesn't take what is logged."""
        if not self._warned:
            self._warned = True
            where = f"; everything is kept in {_shown(folder)}" if folder else ""
            message = f"MLflow at {shown_uri(self.store.uri)} failed ({reason_of(reason)}){where}. The run goes on."
            print_notice(message)  # a run's log may go to a file only
            _log.info(message)

    def warn_of_artifact(self, name: str, reason: Exception, folder: Path | None) -> None:
        """Tell the user, once, that MLflow takes all but some artifacts."""
        if not self._warned_of_artifact:
            self._warned_of_artifact = True
            where = f"; it is kept in {_shown(folder)}" if folder else ""
            message = f"MLflow at {shown_uri(self.store.uri)} doesn't take {name} ({reason_of(reason)}){where}"
            print_notice(message)
            _log.info(message)

    def warn_of_unsent(self, run: "RunLog") -> None:
        """Tell the user what becomes of a run whose end MLflow hasn't at Ctrl-C, unless its comparison waits for it."""
        awaited = any(not each._sender.ended for each in list(self._runs))
        if run.folder is not None and not awaited and not run._sender.is_done:
            unsent = f"{_shown(run.folder)} keeps what MLflow hasn't; the next run here, or `pipebench runs`, sends it"
            print_notice(unsent)

    def _send_forever(self) -> None:
        try:
            self.store.connect()
        except Exception as error:  # each run tries again, and says so
            _log.debug("MLflow doesn't connect: %s", error)
        self._connected.set()
        while self._runs or self._left or not self._is_closed:
            left, self._left = self._left, ()
            if left:
                close_left(self.store.uri, left, self.note_progress)
            presses = any(run.awaits_end for run in self._runs)  # that of a run's comparison may have to begin before
            for run in list(self._runs):
                run.send(presses=presses)
                if run._sender.is_done:
                    self._runs.remove(run)
            self._awake.wait(min((run._sender.every_s for run in self._runs), default=SEND_EVERY_S))
            self._awake.clear()


class RunLog:
    """The log of one run. Every method but `finish` returns at once and never raises because of MLflow."""

    def __init__(self, tracking: Tracking, name: str, sender: Sender) -> None:
        """Log as `name`, MLflow's of the run, where `tracking` does."""
        self.name, self.store = name, tracking.store
        self._tracking = tracking
        self._sender = sender
        sender.on_refused = lambda artifact, reason: tracking.warn_of_artifact(artifact, reason, self.folder)
        self._retry_at_s = 0.0
        self._failed = False
        self._result: RunResult | None = None
        self._recorded: frozenset[int] = frozenset()
        self.begun: Begun | None = None  # set by `begin`

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the run, None until MLflow has given one."""
        return self._sender.record.run_id

    @property
    def unique_name(self) -> str:
        """A name that no other run of the experiment has, the same in all processes of the run."""
        return self._sender.start.unique_name or self.name

    @property
    def folder(self) -> Path | None:
        """The folder with the run's artifacts; None if the disk fails."""
        return self._sender.record.path

    @property
    def has_result(self) -> bool:
        """Whether the run's result is logged."""
        return self._result is not None

    def begin(self, start: LogEntry, recorded: frozenset[int] = frozenset()) -> None:
        """Log the start of a process; the record has points after so many samples."""
        self._recorded, self.begun = recorded, Begun(self.name, start.at_ms)
        self._sender.add(start)
        if any(len(value) > MAX_PARAM_CHARS or clean_name(name) != name for name, value in start.params.items()):
            self.text("params.json", json.dumps(dict(start.params), indent=1))

    def point(self, point: Point) -> bool:
        """Log one moment of the curves: step = samples, timestamp = that moment on the wall clock.

        Return whether the record of an earlier process didn't have it.
        """
        is_new = point.samples not in self._recorded
        if is_new:
            self._sender.add(LogEntry(point=point))
        return is_new

    def metrics(self, values: Mapping[str, float], *, about: str | Path | None = None) -> None:
        """Log single values now, e.g. the spread over seeds on a parent run.

        `about` is the run that they are of: MLflow's id of it, or, if MLflow hasn't it and it has ended, the folder of
        its record, which is sent later; None for this run.
        """
        rounded = {name: shown_value(value) for name, value in self._numbers(values).items()}
        if not isinstance(about, Path):
            self._sender.add(LogEntry(metrics=rounded, about=about))
        elif (about / ENTRIES).exists():  # else it has been sent meanwhile
            try:
                record = RecordFolder(about)
            except UserError as held:
                text = f"{', '.join(rounded)}: not recorded: {held}"
                print_notice(text)
                return
            record.append(LogEntry(metrics=rounded))
            record.release()

    def inputs(self, inputs: Inputs) -> None:
        """Log what the run takes in."""
        self._sender.add(LogEntry(inputs=inputs))

    def tag(self, name: str, value: str) -> None:
        """Set a tag."""
        self._sender.add(LogEntry(tags={name: value}))

    def describe(self, markdown: str, pictures: Sequence[str] = ()) -> None:
        """Set the text that MLflow shows first, cut to its limit, with picture artifacts."""
        self.tag(DESCRIPTION, description(markdown, pictures))

    def text(self, artifact: str, text: str) -> None:
        """Store a text as an artifact; the name may include folders."""
        self._sender.add(LogEntry(artifact=artifact), text.encode())

    def log_file(self) -> None:
        """Store the log that the run's processes have written into its folder as an artifact, if there is one."""
        if self.folder is not None and (self.folder / LOG_FILE).is_file():
            self._sender.add(LogEntry(artifact=LOG_FILE))

    def file(self, artifact: str, path: str | os.PathLike[str]) -> None:
        """Store a copy of a file as an artifact; raises an OSError if the file can't be read."""
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

        A comparison has no result, nor has a run that failed, or one whose result is logged already. The status is by
        default the result's: FAILED if the run diverged, KILLED if it was interrupted.
        """
        if result is not None:
            self.result(result)
        self._sender.add(LogEntry(status=status or outcome_status(self._result)))
        self.settle()

    def settle(self) -> None:
        """Wait until MLflow has the run's end, whoever logged it, a few seconds at most if it hangs."""
        try:
            if not self._wait():
                self._tracking.lost = True
                self._warn("it does not answer")
        except BaseException:  # a second Ctrl-C
            self._tracking.warn_of_unsent(self)
            raise

    def wait_for_id(self) -> str | None:
        """Wait for MLflow's id of the run, for another process to refer to; None if MLflow gives none in time."""
        until_s = time.monotonic() + self._tracking.patience_s
        self._tracking.wake()
        while self.run_id is None and not self._failed and time.monotonic() < until_s:
            time.sleep(0.02)
        return self.run_id

    def where(self) -> str:
        """Return the line that tells the user where the run is recorded; "" where another process sends it."""
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
        """Whether the run has ended, and MLflow has neither its end nor been given up."""
        return self._sender.ended and not self._sender.settled.is_set()

    def send(self, *, presses: bool) -> None:
        """Send what is logged to MLflow; what it doesn't take stays. For the sender's thread only.

        After a failure it is tried again later, unless it `presses`.
        """
        self._sender.listen()
        ending = self._sender.ended
        if not presses and time.monotonic() < self._retry_at_s:
            return
        for is_last in (not ending, True):
            try:
                self._sender.send(self.store, self._tracking.note_progress)
            except Exception as error:  # whatever MLflow, SQLAlchemy, the disk or the network can think of
                self.store.is_connected = False
                if not is_last:  # there is no later
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
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
