"""Sends a run's log entries to MLflow, in order; an entry leaves the queue after MLflow has accepted it.

A resumed run continues under its MLflow id, and entries that an earlier process could not send go first.
"""

import itertools
import math
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from pipebench.tracking.entries import CURVES, logged_metrics, tags_of, values_of
from pipebench.tracking.limits import MAX_PARAM_CHARS, MAX_TAG_CHARS, clean_name
from pipebench.tracking.record import LogEntry, RecordFolder, Sent, Start
from pipebench.tracking.store import MetricRow, Store, StoredRun
from pipebench.tracking.system import SYSTEM, SystemMetrics

# One round of sending costs this process 5 to 10 ms (SQLite): every other second that is at most 0.5 % of a run.
SEND_INTERVAL_S = 2.0
# Tags of runs: how often they were resumed, the checkpoint they went back to, artifacts that MLflow refused.
_RESUMES, _WENT_BACK, _REFUSED = "resumes", "went_back", "artifacts_missing"


class Sender:
    """The queue of one run. `add` is thread-safe; all else is for the background thread that sends to MLflow."""

    interval_s = SEND_INTERVAL_S  # between calls of `send`

    def __init__(
        self, record: RecordFolder, start: Start, parent_id: Callable[[], str | None] | None, *, system_metrics: bool
    ) -> None:
        """Queue what an earlier process could not send.

        Args:
            record: where every entry is written first.
            start: of the process that logs.
            parent_id: returns MLflow's id of the parent run, None while it has none; None if there is no parent.
            system_metrics: whether to sample this host while the run lasts.
        """
        self.record = record
        self.ended = False  # whether the run's end is in the queue
        self.settled = threading.Event()  # set when MLflow has the run's end, or sending it was given up
        self.start = start
        self._parent_id = parent_id
        self._samples_system = system_metrics
        self._lock = threading.Lock()
        unsent = record.earlier()[record.num_sent :]
        self._queue: deque[tuple[LogEntry, bytes | None]] = deque((entry, None) for entry in unsent)
        self._virtual = start.virtual
        self._end_ms = 0  # when the last end in the queue was logged
        # Whether MLflow was asked to create the run before: it may have done so although its answer was lost.
        self._was_requested = not record.is_new
        self._history: History | None = None  # None until the run is created or resumed
        self._system: SystemMetrics | None = None
        self._non_finite: set[str] = set()  # metrics that have a tag for their first non-finite value
        self._refused: dict[str, bytes | None] = {}  # artifacts, with their content if the record can't be written
        self.on_refused: Callable[[str, Exception], None] = lambda *_: None  # gets an artifact's name and the reason

    @property
    def is_empty(self) -> bool:
        """Whether MLflow has everything."""
        return not self._queue

    @property
    def is_done(self) -> bool:
        """Whether the run's end is sent or given up."""
        return self.settled.is_set()

    def close(self) -> None:
        """Send nothing more."""
        self.settled.set()

    def take_in(self) -> None:
        """Queue what another process has logged; nothing in this class."""

    def give_up(self) -> None:
        """Leave the run's end unsent; `close_orphaned` sends it later."""
        self.settled.set()
        self.record.release()

    def add(self, entry: LogEntry, content: bytes | None = None) -> None:
        """Write an entry to the record and queue it; does nothing after the run's end."""
        with self._lock:
            if self.ended:
                return
            self.record.append(entry, content)
            self._queue.append((entry, content if self.record.path is None else None))
            self.ended = entry.status is not None
            self._end_ms = entry.at_ms

    def send(self, store: Store, on_progress: Callable[[], None]) -> None:
        """Send the queue to MLflow, calling `on_progress` after each request; raises MLflow's own exceptions."""
        if self._history is None and not self._queue and self.record.is_new:
            return  # the run's start, which creates it in MLflow, is not logged yet
        store.connect()
        if self._history is None:
            self._history = self._begin(store)
            on_progress()
        self._sample_system()
        while self._queue and not self.is_done:
            sent = self._send_some(store, str(self.record.run_id), self._history)
            self.record.write_sent(Sent(self.record.run_id, self.record.num_sent + sent))
            for _ in range(sent):
                self._queue.popleft()
            on_progress()
        if self.ended:
            self.record.write_sent(Sent(self.record.run_id, self.record.num_sent, self._end_ms))
            if self._refused:
                self.record.release()
            else:
                self.record.remove()
            self.settled.set()

    def _begin(self, store: Store) -> "History":
        """Resume the run that an earlier process created, or create it if MLflow lacks it."""
        run_id = self.record.run_id
        found = None if run_id is None else store.resume_run(run_id)
        if run_id is None or found is None:
            lost = self.record.earlier()[: self.record.num_sent]
            begins_ms = lost[0].at_ms if lost else self._queue[0][0].at_ms
            tags = self._parent_tags()
            may_exist = self._was_requested and run_id is None
            self._was_requested = True
            made = store.find_run(self.start.name, begins_ms) if may_exist else None
            run_id = made or store.create_run(self.start.name, tags, begins_ms)
            # After all that may raise, as this function is called again then.
            self._queue.extendleft((entry, None) for entry in reversed(lost))
            found = StoredRun(begins_ms, {}, {}, {}, {})
            self.record.write_sent(Sent(run_id, 0))
        history = History(found)
        self._refused |= dict.fromkeys(filter(None, found.tags.get(_REFUSED, "").split(", ")))
        if self._samples_system:
            sampled = [step for name, step in history.last_steps.items() if name.startswith(SYSTEM)]
            self._system = SystemMetrics(1 + max(sampled, default=-1))
        return history

    def _parent_tags(self) -> dict[str, str]:
        if self._parent_id is None:
            return {}
        parent_id = self._parent_id()
        if parent_id is None:
            raise ConnectionError("MLflow has not taken the parent run")
        return {"mlflow.parentRunId": parent_id}

    def _sample_system(self) -> None:
        entry = self._system.due_entry() if self._system is not None and not self.ended else None
        if entry is not None and entry.metrics:
            self.add(entry)

    def _send_some(self, store: Store, run_id: str, history: "History") -> int:
        """Send the leading entries of the queue that fit in one request; return their number."""
        entry, content = self._queue[0]
        if entry.status is not None:
            if all(later.start is None for later, _ in self._queue.copy()):  # no later process resumed the run
                store.end_run(run_id, entry.status, entry.at_ms)
                self._send_refused(store, run_id)
            return 1
        if entry.artifact is not None:
            content = self.record.content(entry.artifact) if content is None else content
            if content is not None:
                self._send_artifact(store, run_id, entry.artifact, content)
            return 1
        if entry.inputs is not None:
            store.log_inputs(run_id, entry.inputs)
            return 1
        if entry.about is not None:
            store.log(entry.about, self._rows(entry, history)[0], {}, {})
            return 1
        leading = [entry]
        for following, _ in itertools.islice(self._queue.copy(), 1, None):
            if following.start is not None or _is_sent_alone(following):
                break
            leading.append(following)
        self._log(store, run_id, history, leading)
        return len(leading)

    def _send_artifact(self, store: Store, run_id: str, name: str, content: bytes) -> None:
        """Send an artifact. One that is refused stays in the record and is named by a tag; sending goes on without it.

        The artifact store may fail alone: a proxy limits sizes, boto3 is missing, a bucket is read-only.
        """
        try:
            store.log_artifact(run_id, name, content)
        except Exception as error:  # every artifact store has exceptions of its own
            refused = {**self._refused, name: content if self.record.path is None else None}
            # If this fails, too, MLflow is out of reach, and the artifact is sent again later.
            store.log(run_id, (), {}, {_REFUSED: ", ".join(refused)})
            self._refused = refused
            self.on_refused(name, error)

    def _send_refused(self, store: Store, run_id: str) -> None:
        """Try refused artifacts once more, at the run's end."""
        refused = {**self._refused}
        for name, content in refused.items():
            content = self.record.content(name) if content is None else content
            if content is not None:
                with suppress(Exception):  # as in `_send_artifact`
                    store.log_artifact(run_id, name, content)
                    del self._refused[name]
        if refused:
            store.tag(run_id, _REFUSED, ", ".join(self._refused) or None)

    def _log(self, store: Store, run_id: str, history: "History", entries: Sequence[LogEntry]) -> None:
        """Send the values, params and tags of entries; only the first entry may be a start."""
        rows: list[MetricRow] = []
        curves: list[MetricRow] = []
        results: list[MetricRow] = []
        tags: dict[str, str] = {}
        if entries[0].start is not None:
            self._virtual = entries[0].start.virtual
            _remove_abandoned_points(store, run_id, history, entries[0].start)
        for entry in entries:
            values, non_finite = self._rows(entry, history)
            if entry.point is not None:
                values = [row for row in values if row.step > history.last_steps[clean_name(row.metric)]]
                curves += values
            elif entry.result is not None:
                values = self._replacing(store, run_id, history, values)
                results += values
            rows += values
            tags |= (history.start_tags(entry.tags) if entry.start is not None else tags_of(entry, run_id)) | non_finite
        given = {name: value for entry in entries for name, value in entry.params.items()}
        params, changed = history.params(given)
        store.log(run_id, rows, params, tags | changed)
        history.note(curves, params, tags)
        history.metrics |= {clean_name(row.metric): row.value for row in results}

    def _replacing(self, store: Store, run_id: str, history: "History", values: Sequence[MetricRow]) -> list[MetricRow]:
        """Remove values of the run's earlier results from MLflow; return those of this result that MLflow lacks.

        A run that was resumed after its end has several results, of which the last counts.
        """
        earlier = [each.result for each in self.record.earlier("result") if each.result is not None]
        given = {clean_name(name) for result in earlier for name in logged_metrics(result)}
        given |= {clean_name(row.metric) for row in values}
        shown = {name for row in values if history.metrics.get(name := clean_name(row.metric)) == row.value}
        stale = sorted(history.metrics.keys() & (given - shown))
        store.remove_values(run_id, stale)
        for name in stale:
            del history.metrics[name]
        return [row for row in values if clean_name(row.metric) not in shown]

    def _rows(self, entry: LogEntry, history: "History") -> tuple[list[MetricRow], dict[str, str]]:
        """Return an entry's finite values, and tags for others, which MLflow would draw as 0 or 1.8e308."""
        values, step = values_of(entry, virtual=self._virtual)
        timestamp_ms = entry.at_ms
        if entry.point is not None and not self._virtual:
            timestamp_ms = history.began_ms + round(entry.point.clock_s * 1000)
        rows, tags = [], {}
        for metric, value in values.items():
            if math.isfinite(value):
                rows.append(MetricRow(metric, float(value), timestamp_ms, step))
            elif metric not in self._non_finite:
                self._non_finite.add(metric)
                tags[f"non_finite.{metric.removeprefix(CURVES)}"] = f"{value:g} at {step} samples"
        return rows, tags


def _remove_abandoned_points(store: Store, run_id: str, history: "History", start: Start) -> None:
    """Remove the curves' values after the checkpoint that a process goes on from: the run took another course."""
    samples = start.goes_on_from
    if samples is None:
        return
    abandoned = [name for name, step in history.last_steps.items() if name.startswith(CURVES) and step > samples]
    if abandoned:
        if not store.remove_values(run_id, abandoned, after=samples):
            text = f"to {samples:,} samples; where a curve has two values at a step beyond, the one logged last counts"
            store.log(run_id, (), {}, {_WENT_BACK: text})
        history.last_steps |= dict.fromkeys(abandoned, samples)


def _is_sent_alone(entry: LogEntry) -> bool:
    """Return whether an entry needs a request of its own: anything but values, params or tags of the run."""
    return any(each is not None for each in (entry.status, entry.artifact, entry.inputs, entry.about))


class History:
    """What MLflow has of a run, so that nothing is logged twice or overwritten."""

    def __init__(self, found: StoredRun) -> None:
        """Begin with the run as it was found or created."""
        self.began_ms = found.start_ms  # milliseconds since the epoch
        self.metrics = {**found.metrics}  # single values, by MLflow's names
        self.last_steps = defaultdict(lambda: -1, found.last_steps)  # largest step of every metric, by MLflow's names
        self._params = {**found.params}
        self._tags = {**found.tags}

    def params(self, params: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
        """Return the new params, and tags `resumed.<name>` for changed ones, which MLflow refuses as params."""
        new = {name: value for name, value in params.items() if clean_name(name) not in self._params}
        return new, _changed(params, self._params, MAX_PARAM_CHARS)

    def start_tags(self, tags: Mapping[str, str]) -> dict[str, str]:
        """Return the tags to set when a process starts.

        For a resumed run these are the new tags, `resumed.<name>` for changed ones, and the number of resumptions.
        """
        known = self._tags
        if not known:
            return dict(tags)
        new = {name: value for name, value in tags.items() if clean_name(name) not in known}
        times = int(known[_RESUMES]) + 1 if known.get(_RESUMES, "").isdigit() else 1
        return {**new, **_changed(tags, known, MAX_TAG_CHARS), _RESUMES: str(times)}

    def note(self, curves: Iterable[MetricRow], params: Mapping[str, str], tags: Mapping[str, str]) -> None:
        """Add what MLflow has accepted."""
        for row in curves:
            name = clean_name(row.metric)
            self.last_steps[name] = max(row.step, self.last_steps[name])
        self._params |= {clean_name(name): value for name, value in params.items()}
        self._tags |= {clean_name(name): value for name, value in tags.items()}


def _changed(values: Mapping[str, str], known: Mapping[str, str], limit: int) -> dict[str, str]:
    """Return tags `resumed.<name>` for values that differ from the known ones, cut to `limit` characters."""
    return {
        f"resumed.{name}": value
        for name, value in values.items()
        if known.get(clean_name(name), value[:limit]) != value[:limit]
    }
