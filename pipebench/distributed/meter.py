"""Measurements of a distributed run: each worker's wall-clock seconds, merged after the run.

A worker's meter records its instructions and the transfers that arrive. At the end workers exchange their shares, and
rank 0 merges them into metrics, a row per worker and one timeline.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pipebench.checkpoint.progress import MeterState, MeterTotals
from pipebench.schedule.instructions import COPIES
from pipebench.schedule.operations import OPERATIONS, SEND, with_role
from pipebench.schedule.pipeline import Pipeline
from pipebench.simulate.meter import COMPUTED, RECORDED_SPANS, WORKERS_IDLE, RunMeasurements, fractions, span_of
from pipebench.simulate.simulation import TimelineEvent
from pipebench.simulate.timeline import SYNC_KINDS, Timeline, Transfer
from pipebench.typed_json import read

_COMPUTE_COLUMNS = {
    column: tuple(op for op, row in OPERATIONS.items() if row.column == column)
    for column in ("forward_s", "backward_s", "update_s")
}
_WAIT_COLUMNS = {op: row.column for op, row in OPERATIONS.items() if row.column.startswith("waiting_")}
_SENDS = with_role(SEND)
# Beginnings of the names of metrics that are computed from times of transfers
_OF_TRANSFERS = ("stall_s", "all_reduce_s", "overlapped_s", "comm_time_", "comm_stall_fraction")
_UNTIMED = "times of transfers and of waiting for them aren't known, since a part of the run didn't time them"


@dataclass(frozen=True)
class _Share:
    """One worker's measurements; its timeline begins at 0."""

    worker: int
    rank: int
    state: MeterState
    timeline: Timeline
    measures_overlap: bool  # whether transfers have their own ends, rather than those of waits


class MeasuredMeter:
    """Adds up one worker's wall-clock times, in training and evaluation separately. An event costs about 1 us.

    Args:
        pipeline: the pipeline.
        worker: the worker's index.
        rank: the process's.
        measures_overlap: whether transfers have their own ends, rather than those of waits.
    """

    def __init__(self, pipeline: Pipeline, worker: int, rank: int, *, measures_overlap: bool = False) -> None:
        self.evaluating = False  # set during an evaluation
        self._pipeline = pipeline
        self._worker = worker
        self._rank = rank
        self._measures_overlap = measures_overlap
        self._state = MeterState(MeterTotals.none(), MeterTotals.none())
        # The timeline's first instructions, and whether they are of an evaluation
        self._recorded: list[tuple[TimelineEvent, bool]] = []
        self._transfers: list[Transfer] = []
        self._most_recorded = max(1, RECORDED_SPANS // pipeline.num_workers)
        self._until_s = float("inf")  # end of the recorded timeline; from then on events only count
        self._origin_s = 0.0  # start of the recorded timeline, on the run's clock
        self._reduced_until_s = 0.0  # end of the latest all-reduce

    @property
    def busy_s(self) -> float:
        """Seconds of forward, backward and update in training."""
        return _busy_s(self._state.training)

    @property
    def stall_s(self) -> float:
        """Seconds waited in training for bytes in transfer."""
        return self._state.training.stall_s

    def event(self, event: TimelineEvent) -> None:
        """Record an instruction of this worker."""
        start_s, end_s, _, instruction, _ = event
        self._totals.seconds[instruction.op.name] += end_s - start_s
        if end_s > start_s and instruction.op not in COPIES:
            if len(self._recorded) < self._most_recorded:
                self._recorded.append((event, self.evaluating))
            else:
                self._until_s = self._recorded[-1][0].end_s

    def stalled(self, seconds: float) -> None:
        """Record a wait for bytes in transfer."""
        self._totals.stall_s += seconds

    def transfer(self, transfer: Transfer, waited_s: float | None = None) -> None:
        """Record a message that arrived here, or a bucket all-reduced with this worker.

        Every member of an all-reduce (several senders) records it with the bytes of all members, and counts its share
        of bytes and time. So a bucket counts once, with the members' mean time.

        Args:
            transfer: the message or all-reduce.
            waited_s: the time from which computations waited for it; before, it overlapped with them. None if they
                didn't wait.
        """
        totals, since_s = self._totals, transfer.start_s
        # The clocks of two hosts differ a little: a message that arrives before it was sent takes no time.
        end_s = max(transfer.start_s, transfer.end_s)
        if transfer.kind in SYNC_KINDS:  # buckets end in the order in which they started
            since_s = max(since_s, self._reduced_until_s)
            totals.all_reduce_s += max(0.0, transfer.end_s - since_s)
            self._reduced_until_s = max(self._reduced_until_s, transfer.end_s)
        if self._measures_overlap and waited_s is not None:
            totals.overlapped_s += max(0.0, min(transfer.end_s, waited_s) - since_s)
        members = len(transfer.senders)
        position = transfer.senders.index(self._worker) if members > 1 else 0
        # Differences of a rounded running sum, so that the members' shares add up to all bytes.
        share_bytes = transfer.num_bytes * (position + 1) // members - transfer.num_bytes * position // members
        row = totals.of(transfer.kind, transfer.level)
        row.number += position == 0
        row.bytes += share_bytes
        row.s += (end_s - transfer.start_s) / members
        if transfer.start_s < self._until_s:
            senders = transfer.senders if members == 1 else (self._worker,)
            self._transfers.append(replace(transfer, senders=senders, num_bytes=share_bytes, end_s=end_s))

    def state(self) -> dict[str, Any]:
        """Return the totals as JSON data, for a checkpoint."""
        return asdict(self._state)

    def begin(self, clock_s: float) -> None:
        """Begin the recorded timeline at this time of the run's clock."""
        self._origin_s = self._reduced_until_s = clock_s

    def restore(self, state: MeterState) -> None:
        """Continue from a checkpoint's `state`."""
        # Sums of a run whose transfers are timed only in part mean nothing.
        self._state = replace(state, times_transfers=self._state.times_transfers and state.times_transfers)

    def share(self) -> dict[str, Any]:
        """Return all measurements as JSON data, for `merge`."""
        spans = tuple(span_of(self._pipeline, event, evaluating) for event, evaluating in self._recorded)
        truncated = self._until_s < float("inf")
        timeline = Timeline((), spans, tuple(self._transfers), truncated).shifted(-self._origin_s)
        return asdict(_Share(self._worker, self._rank, self._state, timeline, self._measures_overlap))

    @property
    def _totals(self) -> MeterTotals:
        return self._state.evaluation if self.evaluating else self._state.training


def merge(given: Sequence[dict[str, Any]], pipeline: Pipeline, training_s: float) -> RunMeasurements:
    """Merge the workers' shares.

    Args:
        given: of every worker `MeasuredMeter.share`, in any order.
        pipeline: the pipeline.
        training_s: the run's clock without evaluations, seconds.

    Raises:
        ValueError: a worker's share is missing or duplicate.
    """
    shares = sorted((read(_Share, share) for share in given), key=lambda share: share.worker)
    workers = [share.worker for share in shares]
    if workers != list(range(pipeline.num_workers)):
        raise ValueError(f"shares of workers {', '.join(map(str, workers))} don't make {pipeline.num_workers} workers")
    totals = [share.state.training for share in shares]
    rows = tuple(_row(share, pipeline, training_s) for share in shares)
    busy_s, stall_s = sum(map(_busy_s, totals)), sum(each.stall_s for each in totals)
    metrics = fractions(busy_s, stall_s, pipeline.num_workers, training_s) | _sums(rows) | _transfer_metrics(totals)
    timed = all(share.state.times_transfers for share in shares)
    if not timed:
        metrics = {name: value for name, value in metrics.items() if not name.startswith(_OF_TRANSFERS)}
        rows = tuple({key: value for key, value in row.items() if not key.startswith(_OF_TRANSFERS)} for row in rows)
    num_bytes: Counter[tuple[str, str]] = Counter()
    for row in (row for each in totals for row in each.transfers):
        num_bytes[row.kind, row.level] += row.bytes
    notes = {} if timed else {WORKERS_IDLE: _UNTIMED}
    return RunMeasurements(metrics, rows, _timeline(shares, pipeline), busy_s, stall_s, num_bytes, notes)


def with_allocated(found: RunMeasurements, columns: Sequence[Mapping[str, int]]) -> RunMeasurements:
    """Return measurements with the most bytes that each worker's allocator held, by name.

    Args:
        found: measurements.
        columns: a mapping per worker; on CPUs each is empty.
    """
    rows = tuple({**row, **more} for row, more in zip(found.workers, columns, strict=True))
    most = {f"{name}_max": max(more[name] for more in columns) for name in columns[0]}
    return replace(found, workers=rows, metrics={**found.metrics, **most})


def _busy_s(totals: MeterTotals) -> float:
    return sum(totals.seconds[op.name] for op in COMPUTED)


def _row(share: _Share, pipeline: Pipeline, training_s: float) -> dict[str, Any]:
    """Return a worker's row; compute, waiting, sending, swapping (if stages swap) and other add up to `training_s`."""
    worker, totals = share.worker, share.state.training
    stages = pipeline.stages_of(worker)
    busy_s = _busy_s(totals)
    waiting_s = sum(totals.seconds[op.name] for op in _WAIT_COLUMNS)
    sending_s = sum(totals.seconds[op.name] for op in _SENDS)
    swapping_s = sum(totals.seconds[op.name] for op in COPIES)
    return {
        "worker": worker,
        "rank": share.rank,
        "stage": stages[0] if len(stages) == 1 else ", ".join(map(str, stages)),
        "replica": pipeline.replica_of(worker),
        "compute_s": busy_s,
        **{column: sum(totals.seconds[op.name] for op in ops) for column, ops in _COMPUTE_COLUMNS.items()},
        "waiting_s": waiting_s,
        **{
            column: sum(totals.seconds[op.name] for op, each in _WAIT_COLUMNS.items() if each == column)
            for column in _WAIT_COLUMNS.values()
        },
        "stall_s": totals.stall_s,
        "sending_s": sending_s,
        **({"swapping_s": swapping_s} if pipeline.swaps else {}),
        "other_s": max(0.0, training_s - busy_s - waiting_s - sending_s - swapping_s),
        "all_reduce_s": totals.all_reduce_s,
        **({"overlapped_s": totals.overlapped_s} if share.measures_overlap else {}),
        "evaluation_compute_s": _busy_s(share.state.evaluation),
        **fractions(busy_s, totals.stall_s, 1, training_s),
    }


def _sums(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return worker seconds by use, summed over the workers."""
    columns = ("compute_s", "waiting_s", *_WAIT_COLUMNS.values(), "sending_s", "swapping_s", "other_s", "overlapped_s")
    return {column: sum(row[column] for row in rows) for column in columns if column in rows[0]}


def _transfer_metrics(totals: Sequence[MeterTotals]) -> dict[str, float]:
    """Return number and seconds of transfers by kind, and seconds by level; overlapping transfers add up."""
    metrics: dict[str, float] = defaultdict(float)
    for row in (row for each in totals for row in each.transfers):
        name = row.kind.replace("-", "_")
        metrics[f"comm_transfers_{name}"] += row.number
        metrics[f"comm_time_{name}_s"] += row.s
        metrics[f"comm_time_level_{row.level}_s"] += row.s
    return dict(sorted(metrics.items()))


def _timeline(shares: Sequence[_Share], pipeline: Pipeline) -> Timeline:
    """Merge the timelines up to the end of the shortest truncated one, so that all rows end together."""
    parts = [share.timeline for share in shares]
    until_s = min((part.spans[-1].end_s for part in parts if part.truncated), default=float("inf"))
    spans = [span for part in parts for span in part.spans if span.start_s < until_s]
    transfers = [transfer for part in parts for transfer in part.transfers if transfer.start_s < until_s]
    return Timeline(
        pipeline.worker_names,
        tuple(sorted(spans, key=lambda span: (span.start_s, span.worker))),
        tuple(sorted(transfers, key=lambda transfer: transfer.start_s)),
        any(part.truncated for part in parts),
    )
