"""The record of a run, kept without slowing it down: callers only queue, one thread of ours talks to MLflow.

Nothing leaves the queue before MLflow has taken it. When MLflow fails, all that was queued or logged goes to a folder
on disk (`rescue.py`), there is one warning, and the run goes on; MLflow is tried again now and then, and at the end.
A run that another process began is gone on with under its id (`history.py`).
"""

import json
import logging
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipebench.errors import printable
from pipebench.tracking.entries import (
    DESCRIPTION,
    Artifact,
    End,
    Entries,
    Status,
    description,
    logged_metrics,
    outcome_status,
    stage_metrics,
)
from pipebench.tracking.history import History
from pipebench.tracking.rescue import Rescue
from pipebench.tracking.store import MAX_PARAM_CHARS, Row, Store, clean_name, default_uri, shown_uri
from pipebench.tracking.summary import summarise_curves
from pipebench.tracking.system import SystemMetrics
from pipebench.tracking.view import run_address
from pipebench.train.result import Point, RunResult
from pipebench.typed_json import write

__all__ = ["RunLog", "Status", "Tracking"]

# One round of sending costs this process 5 to 10 ms (SQLite): every other second is half a per cent of a run at most.
SEND_EVERY_S = 2.0
# How long the end of a run waits for a store that takes nothing. A local file may be in the making.
_PATIENCE_LOCAL_S, _PATIENCE_SERVER_S, _PATIENCE_LOST_S = 60.0, 5.0, 0.2
_RETRY_AFTER_S = 30.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Start:
    """The arguments of `Tracking.start`."""

    name: str
    params: Mapping[str, str]
    tags: Mapping[str, str]
    parent: "RunLog | str | None"
    virtual: bool
    run_id: str | None
    on_run_id: Callable[[str], None]
    system_metrics: bool


class Tracking:
    """One store and one experiment. Connecting begins at once, in the background."""

    def __init__(self, suite: str) -> None:
        """Begin to connect to MLFLOW_TRACKING_URI, else to `mlflow.db` in the working directory.

        Args:
            suite: name of the experiment.
        """
        self.store = Store(default_uri(), suite)
        self.folder = Path.cwd()
        self.progress = 0  # grows with everything the store has taken
        self.lost = False  # the store hung at the end of a run; later runs don't wait for it again
        self._warned = False
        self._waited_in_vain = False
        self._runs: list[RunLog] = []
        self._awake = threading.Event()
        self._connected = threading.Event()
        threading.Thread(target=self._send_forever, name="pipebench-tracking", daemon=True).start()

    def start(
        self,
        name: str,
        *,
        params: Mapping[str, str],
        tags: Mapping[str, str],
        parent: "RunLog | str | None" = None,
        virtual: bool = True,
        run_id: str | None = None,
        on_run_id: Callable[[str], None] = lambda run_id: None,
        system_metrics: bool = False,
    ) -> "RunLog":
        """Open the record of one run.

        Args:
            name: the run's name.
            params: the flattened recipe.
            tags: whatever else people filter by.
            parent: the comparison this run belongs to, or MLflow's id of it.
            virtual: whether the run's clock is virtual: it is then a metric, and timestamps are the wall's.
            run_id: MLflow's id of a run that an earlier process began and that goes on: points that MLflow has are not
                logged again, its start stays, params and tags that changed become tags `resumed.<name>`.
            on_run_id: told of MLflow's id as soon as there is a new one, in another thread.
            system_metrics: whether this host's CPU, memory, disk, network and GPU are sampled.
        """
        run = RunLog(
            self,
            _Start(name, params, tags, parent, virtual, run_id, on_run_id, system_metrics),
        )
        self._runs.append(run)
        return run

    def wait_until_ready(self, limit_s: float = _PATIENCE_LOCAL_S) -> bool:
        """Wait until MLflow is imported and connected, so that neither costs time later; False if it isn't by then."""
        limit_s = limit_s if self.store.local else min(limit_s, _PATIENCE_SERVER_S)
        ready = self._connected.wait(0.0 if self._waited_in_vain else limit_s)
        self._waited_in_vain = not ready
        return ready

    def wake(self) -> None:
        """Make the sender look at the queues now."""
        self._awake.set()

    def warn(self, reason: BaseException | str, folder: Path | None) -> None:
        """Tell the user, once, that MLflow doesn't take what is logged."""
        if not self._warned:
            self._warned = True
            where = f"; everything is kept in {_shown(folder)}" if folder else ""
            message = f"MLflow at {shown_uri(self.store.uri)} failed ({_one_line(reason)}){where}. The run goes on."
            print(f"pipebench: {printable(message)}", file=sys.stderr, flush=True)  # a run's log may go to a file only
            _log.info(message)

    def _send_forever(self) -> None:
        try:
            self.store.connect()
        except Exception as error:  # each run tries again, and is rescued if need be
            _log.debug("MLflow doesn't connect: %s", error)
        self._connected.set()
        while True:
            for run in list(self._runs):
                run.send(self.store)
                if run.settled.is_set():
                    self._runs.remove(run)
            self._awake.wait(SEND_EVERY_S)
            self._awake.clear()


class RunLog:
    """The record of one run. Every method but `finish` returns at once and never raises for MLflow's sake.

    Attributes:
        name: the run's name.
        run_id: MLflow's id, None until MLflow has given one (or the caller, of a run that goes on).
        settled: set when the sender is done with a finished run, well or badly.
    """

    def __init__(self, tracking: Tracking, start: _Start) -> None:
        """Queue the start."""
        self.name = start.name
        self.run_id = start.run_id
        self.settled = threading.Event()
        self._tracking = tracking
        self._start = start
        self._start_ms = _now_ms()
        self._shift_ms = 0  # to the start of a run that another process began
        self._tags = {"clock": "virtual" if start.virtual else "wall", "timestamps": "wall", **start.tags}
        self._points: list[Point] = []
        self._artifacts: dict[str, bytes] = {}
        self._result: RunResult | None = None
        self._queue: deque[Entries | Artifact | End] = deque()
        self._end_queued = False
        self._open = False
        self._history: History | None = None
        self._system: SystemMetrics | None = None
        self._non_finite: set[str] = set()
        self._retry_at_s = 0.0
        self._failed = False
        self._rescue = Rescue(start.name, {"params": dict(start.params), "tags": self._tags}, tracking.folder)
        self._rescue.run_id = start.run_id
        self._queue_params(start.params)

    def point(self, point: Point) -> None:
        """Log one moment of the curves: step = samples, timestamp = that moment on the wall clock.

        MLflow's timestamps are whole milliseconds, and it ranks runs by them: virtual seconds, of which a run has
        0.2 or 200,000, would have to be stretched by a factor of their own per run. They are a metric instead, which
        MLflow takes as an axis, too.
        """
        self._points.append(point)
        values = dict(point.metrics)
        if self._start.virtual:
            values["virtual_time_s"] = point.clock_s
            self._queue_values(values, _now_ms(), point.samples, curve=True)
        else:
            timestamp_ms = self._start_ms + round(point.clock_s * 1000)
            self._queue_values(values, timestamp_ms, point.samples, clocked=True, curve=True)

    def metrics(self, values: Mapping[str, float], step: int = 0) -> None:
        """Log single values now, e.g. the spread over seeds on a parent run."""
        self._queue_values(values, _now_ms(), step)

    def tag(self, name: str, value: str) -> None:
        """Set a tag."""
        self._queue.append(Entries(tags={name: value}))

    def describe(self, markdown: str, pictures: Sequence[str] = ()) -> None:
        """Set the text that MLflow shows first, with pictures that are artifacts; waits for the run's id to name them.

        Args:
            markdown: the text; what is beyond MLflow's limit is left out.
            pictures: names of artifacts.
        """
        self.tag(DESCRIPTION, description(markdown, pictures, self.wait_for_id() if pictures else None))

    def text(self, artifact: str, text: str) -> None:
        """Keep a text as an artifact; the name may hold folders."""
        self._keep(artifact, text.encode())

    def file(self, artifact: str, path: str | os.PathLike[str]) -> None:
        """Keep a copy of a file, as it is now, as an artifact.

        Raises:
            OSError: the file can't be read.
        """
        self._keep(artifact, Path(path).read_bytes())

    def finish(self, result: RunResult | None, *, status: Status | None = None) -> None:
        """Log what the run came to and close it; waits until MLflow has everything, a few seconds at most if it hangs.

        Args:
            result: what the run gave; None for a comparison, or for a run that failed without a result.
            status: by default as the result says: a run that diverged is FAILED, an interrupted one KILLED.
        """
        if result is not None:
            self._result = result
            self._queue_result(result)
        self._queue.append(End(status or outcome_status(result), _now_ms()))
        self._end_queued = True
        try:
            if not self._wait():
                self._tracking.lost = True
                self._save("it does not answer")
        except BaseException:  # a second Ctrl-C; the result is worth the moment
            self._save("interrupted before everything was sent")
            raise
        if self._failed:
            self._save("it failed during the run")

    def wait_for_id(self) -> str | None:
        """Wait until MLflow has given the run an id, for another process to refer to it; None if it doesn't."""
        until_s = time.monotonic() + (_PATIENCE_LOCAL_S if self._tracking.store.local else _PATIENCE_SERVER_S)
        self._tracking.wake()
        while self.run_id is None and not self._failed and time.monotonic() < until_s:
            time.sleep(0.02)
        return self.run_id

    def where(self) -> str:
        """Return the line that tells the user where the run is recorded."""
        if self._queue:
            kept = self._rescue.path
            return f"{_shown(kept)}/ (MLflow did not take it)" if kept else "not recorded: MLflow and the disk failed"
        store = self._tracking.store
        if store.uri.startswith("http"):
            return run_address(shown_uri(store.uri).rstrip("/"), str(store.experiment_id), str(self.run_id))
        return f"pipebench ui   (experiment {store.suite}, run {self.name})"

    def send(self, store: Store) -> None:
        """Hand the queue to the store; on failure keep it, and put the run on disk. For the sender's thread only."""
        ending = self._end_queued
        if not ending:
            if time.monotonic() < self._retry_at_s:
                self._save_quietly()
                return
            self._sample_system()
        try:
            self._send_queue(store)
        except Exception as error:  # whatever MLflow, SQLAlchemy, the disk or the network can think of
            self._retry_at_s = time.monotonic() + _RETRY_AFTER_S
            self._save(error)
            if ending:
                self.settled.set()

    def _send_queue(self, store: Store) -> None:
        store.connect()
        if not self._open:
            self._begin(store)
            self._tracking.progress += 1
        run_id = str(self.run_id)
        while self._queue:
            first = self._queue[0]
            if isinstance(first, Entries):
                self._send_entries(store, run_id)
            elif isinstance(first, Artifact):
                store.log_artifact(run_id, first.name, first.content)
                self._queue.popleft()
            else:
                store.end_run(run_id, first.status, first.timestamp_ms)
                self._queue.popleft()
                self.settled.set()
            self._tracking.progress += 1

    def _begin(self, store: Store) -> None:
        """Take up the run that an earlier process began, if MLflow has it, or create it."""
        found = None if self.run_id is None else store.resume_run(self.run_id)
        if found is None:
            self.run_id = self._rescue.run_id = store.create_run(self.name, self._creation_tags(), self._start_ms)
            self._tell_run_id(self.run_id)
        else:
            self._history = History(store, str(self.run_id), found)
            self._shift_ms = found.start_ms - self._start_ms
            store.log(str(self.run_id), (), {}, self._history.tags(self._tags))
        if self._start.system_metrics:
            self._system = SystemMetrics(0 if self._history is None else self._history.next_system_step())
        self._open = True

    def _tell_run_id(self, run_id: str) -> None:
        try:
            self._start.on_run_id(run_id)
        except Exception as error:  # the caller's trouble, which must not look like MLflow's
            _log.warning("the run's MLflow id %s could not be kept: %s", run_id, error)

    def _sample_system(self) -> None:
        rows = () if self._system is None else self._system.due_rows()
        if rows:
            self._queue.appendleft(Entries(rows=rows))  # never behind the end, which another thread may queue now

    def _send_entries(self, store: Store, run_id: str) -> None:
        leading: list[Entries] = []
        for item in self._queue.copy():
            if not isinstance(item, Entries):
                break
            leading.append(item)
        rows = [row for item in leading for row in self._rows(item)]
        params = {name: value for item in leading for name, value in item.params.items()}
        tags = {name: value for item in leading for name, value in item.tags.items()}
        if self._history is not None:
            params, changed = self._history.params(params)
            tags |= changed
        store.log(run_id, rows, params, tags)
        for _ in leading:
            self._queue.popleft()

    def _rows(self, item: Entries) -> list[Row]:
        """Return the rows as MLflow gets them: not twice, and on the clock of the process that began the run."""
        rows = list(item.rows)
        if item.curve and self._history is not None:
            rows = self._history.unseen(rows)
        if item.clocked and self._shift_ms:
            rows = [row._replace(timestamp_ms=row.timestamp_ms + self._shift_ms) for row in rows]
        return rows

    def _creation_tags(self) -> dict[str, str]:
        parent = self._start.parent
        if parent is None:
            return dict(self._tags)
        parent_id = parent if isinstance(parent, str) else parent.run_id
        if parent_id is None:
            raise ConnectionError("MLflow has not taken the parent run")
        return {**self._tags, "mlflow.parentRunId": parent_id}

    def _queue_params(self, params: Mapping[str, str]) -> None:
        self._queue.append(Entries(params=params))
        if any(len(value) > MAX_PARAM_CHARS or clean_name(name) != name for name, value in params.items()):
            self.text("params.json", json.dumps(dict(params), indent=1))

    def _queue_values(
        self, values: Mapping[str, float], timestamp_ms: int, step: int, *, clocked: bool = False, curve: bool = False
    ) -> None:
        rows, tags = [], {}
        for metric, value in values.items():
            if math.isfinite(value):
                rows.append(Row(metric, float(value), timestamp_ms, step))
            elif metric not in self._non_finite:  # MLflow would draw it as 0 or 1.8e308
                self._non_finite.add(metric)
                tags[f"non_finite.{metric}"] = f"{value:g} at {step} samples"
        self._queue.append(Entries(tuple(rows), {}, tags, clocked, curve))

    def _queue_result(self, result: RunResult) -> None:
        points = result.points or tuple(self._points)
        values = {**summarise_curves(points), **logged_metrics(result.metrics), **stage_metrics(result)}
        # Like a point: who was killed while closing the record has logged it.
        self._queue_values(values, _now_ms(), points[-1].samples if points else 0, curve=True)
        self.tag("outcome", result.outcome)
        for fact, note in result.notes.items():
            self.tag(f"note.{fact.replace(' ', '_')}", note)
        self.text("result.json", write(result))

    def _keep(self, artifact: str, content: bytes) -> None:
        self._artifacts[artifact] = content
        self._queue.append(Artifact(artifact, content))

    def _wait(self) -> bool:
        store = self._tracking.store
        patience_s = _PATIENCE_LOCAL_S if store.local else _PATIENCE_SERVER_S
        patience_s = _PATIENCE_LOST_S if self._tracking.lost else patience_s
        self._tracking.wake()
        seen, deadline_s = self._tracking.progress, time.monotonic() + patience_s
        while not self.settled.wait(0.05):
            if self._tracking.progress != seen:
                seen, deadline_s = self._tracking.progress, time.monotonic() + patience_s
            if time.monotonic() > deadline_s:
                return False
        return True

    def _save(self, reason: BaseException | str) -> None:
        self._failed = True
        folder = self._save_quietly()
        self._tracking.warn(reason, folder)

    def _save_quietly(self) -> Path | None:
        if not self._failed:
            return None
        try:
            return self._rescue.write(tuple(self._points), dict(self._artifacts), self._result)
        except OSError as error:
            _log.debug("the run can't be kept on disk either: %s", error)
            return None


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _one_line(reason: BaseException | str) -> str:
    while isinstance(reason, BaseException) and (deeper := reason.__cause__ or reason.__context__) is not None:
        if isinstance(deeper, LookupError):  # the key alone, `'foo'`, says nothing: what looked it up does
            break
        reason = deeper  # MLflow and urllib3 wrap `Connection refused` in paragraphs
    text = " ".join(str(reason).split()) or type(reason).__name__
    return text if len(text) <= 160 else f"{text[:157]}..."


def _shown(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
