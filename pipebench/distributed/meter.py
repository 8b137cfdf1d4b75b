"""What a distributed run measures: every worker's own wall-clock seconds, added up here and merged after the run.

A worker's meter is told of each of its instructions and of what arrived for it. At the end the workers exchange
their shares, and rank 0 merges them into metrics, a row per worker and one timeline.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipebench.schedule.instructions import Op
from pipebench.schedule.pipeline import Pipeline
from pipebench.simulate.meter import COMPUTE, RECORDED_SPANS, WORKERS_IDLE, Measured, fractions, span_of
from pipebench.simulate.simulation import Event
from pipebench.simulate.timeline import ALL_REDUCE, Span, Timeline, Transfer

_COMPUTE_COLUMNS = {Op.FORWARD: "forward_s", Op.BACKWARD: "backward_s", Op.UPDATE: "update_s"}
_WAIT_COLUMNS = {
    Op.RECEIVE_ACTIVATION: "waiting_activation_s",
    Op.RECEIVE_GRADIENT: "waiting_gradient_s",
    Op.WAIT_ALL_REDUCE: "waiting_all_reduce_s",
    Op.WAIT_NORM: "waiting_norm_s",
    Op.LOAD_INPUT: "waiting_load_s",
}
_SENDS = (Op.SEND_ACTIVATION, Op.SEND_GRADIENT)
_OF_TRANSFERS = ("stall_s", "all_reduce_s", "comm_time_", "comm_stall_fraction")  # what their times go into
_UNTIMED = "times of transfers and of waiting for them aren't known where GPUs compute; numbers and bytes are"


@dataclass
class _Totals:
    """What one worker did in one phase (training or evaluation).

    Attributes:
        seconds: by instruction, indexed by `Op`.
        stall_s: seconds waited for bytes on their way.
        all_reduce_s: seconds during which at least one bucket was on its way.
        num_transfers: by (kind, level); like the next two, this worker's share.
        transfer_s: likewise, seconds; transfers that overlap count each.
        num_bytes: likewise, payload.
    """

    seconds: list[float] = field(default_factory=lambda: [0.0] * len(Op))
    stall_s: float = 0.0
    all_reduce_s: float = 0.0
    num_transfers: Counter[tuple[str, str]] = field(default_factory=Counter)
    transfer_s: dict[tuple[str, str], float] = field(default_factory=dict)
    num_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def busy_s(self) -> float:
        return sum(self.seconds[op] for op in COMPUTE)

    def to_json(self) -> dict[str, Any]:
        """Return plain numbers under readable names."""
        transfers = [
            {"kind": kind, "level": level, "number": number, "s": self.transfer_s[kind, level],
             "bytes": self.num_bytes[kind, level]}
            for (kind, level), number in self.num_transfers.items()
        ]  # fmt: skip
        seconds = {op.name: self.seconds[op] for op in Op}
        return {
            "seconds": seconds,
            "stall_s": self.stall_s,
            "all_reduce_s": self.all_reduce_s,
            "transfers": transfers,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "_Totals":
        """Read what `to_json` returned."""
        totals = _Totals([float(data["seconds"][op.name]) for op in Op], data["stall_s"], data["all_reduce_s"])
        for row in data["transfers"]:
            key = (str(row["kind"]), str(row["level"]))
            totals.num_transfers[key] = row["number"]
            totals.transfer_s[key] = row["s"]
            totals.num_bytes[key] = row["bytes"]
        return totals


class MeasuredMeter:
    """Adds up what one worker does, on the wall clock; training and evaluation apart. An event costs about 1 us.

    Attributes:
        evaluating: set while an evaluation runs.
    """

    def __init__(self, pipeline: Pipeline, worker: int, rank: int, *, times_transfers: bool = True) -> None:
        """Prepare for one worker.

        Args:
            pipeline: the pipeline's shape.
            worker: whose events these are.
            rank: the rank it runs on.
            times_transfers: whether the times of transfers mean anything; else they, and stalls, are left out of what
                `merge` returns.
        """
        self.evaluating = False
        self._pipeline = pipeline
        self._worker = worker
        self._rank = rank
        self._times_transfers = times_transfers
        self._phases = {False: _Totals(), True: _Totals()}  # by `evaluating`
        self._recorded: list[tuple[Event, bool]] = []
        self._transfers: list[Transfer] = []
        self._room = max(1, RECORDED_SPANS // pipeline.num_workers)
        self._truncated = False
        self._origin_s = 0.0
        self._reduced_until_s = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds of forward, backward and update of this worker in training."""
        return self._phases[False].busy_s

    @property
    def stall_s(self) -> float:
        """Seconds that this worker waited in training for bytes that were on their way."""
        return self._phases[False].stall_s

    def event(self, event: Event) -> None:
        """Take note of one instruction of this worker."""
        start_s, end_s, _, instruction, stall_s = event
        totals = self._phases[self.evaluating]
        totals.seconds[instruction.op] += end_s - start_s
        totals.stall_s += stall_s
        if not self._truncated and end_s > start_s:
            if len(self._recorded) < self._room:
                self._recorded.append((event, self.evaluating))
            else:
                self._truncated = True

    def transfer(self, transfer: Transfer) -> None:
        """Take note of a message that arrived here, or of a bucket that was all-reduced with this worker.

        Of an all-reduce (several senders) every member tells, with the bytes that all members sent together; each
        counts its share of bytes and time, so that a bucket counts once and its time is the members' mean.
        """
        totals = self._phases[self.evaluating]
        if transfer.kind == ALL_REDUCE:  # buckets come in the order they were started
            since_s = max(transfer.start_s, self._reduced_until_s)
            totals.all_reduce_s += max(0.0, transfer.end_s - since_s)
            self._reduced_until_s = max(self._reduced_until_s, transfer.end_s)
        members = len(transfer.senders)
        key = (transfer.kind, transfer.level)
        position = transfer.senders.index(self._worker) if members > 1 else 0
        part = transfer.num_bytes * (position + 1) // members - transfer.num_bytes * position // members
        totals.num_transfers[key] += position == 0
        totals.num_bytes[key] += part
        # Clocks of two hosts differ a little: what arrived before it was sent took no time.
        duration_s = max(0.0, transfer.end_s - transfer.start_s) / members
        totals.transfer_s[key] = totals.transfer_s.get(key, 0.0) + duration_s
        if not self._truncated and self._times_transfers:
            alone = members == 1
            self._transfers.append(transfer if alone else replace(transfer, senders=(self._worker,), num_bytes=part))

    def state(self) -> dict[str, Any]:
        """Return the totals as JSON-able values, for a checkpoint."""
        phases = {"training": self._phases[False].to_json(), "evaluation": self._phases[True].to_json()}
        return {**phases, "times_transfers": self._times_transfers}

    def begin(self, clock_s: float) -> None:
        """Let the recorded timeline begin at this time on the run's clock."""
        self._origin_s = self._reduced_until_s = clock_s

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint: `state` is what `state` returned."""
        self._phases = {False: _Totals.from_json(state["training"]), True: _Totals.from_json(state["evaluation"])}
        # Where one part of a run was timed and the other wasn't, the sum says nothing.
        self._times_transfers = self._times_transfers and bool(state.get("times_transfers", True))

    def share(self) -> dict[str, Any]:
        """Return everything measured here as JSON-able values, for `merge`."""
        spans = [span_of(self._pipeline, event, evaluating) for event, evaluating in self._recorded]
        return {
            "worker": self._worker,
            "rank": self._rank,
            **self.state(),
            "origin_s": self._origin_s,
            "truncated": self._truncated,
            "spans": [[s.kind, s.label, s.start_s, s.end_s, s.minibatch] for s in spans],
            "transfers": [
                [t.kind, t.label, t.senders, t.receivers, t.level, t.num_bytes, t.start_s, t.end_s]
                for t in self._transfers
            ],
        }


def merge(shares: Sequence[Mapping[str, Any]], pipeline: Pipeline, training_s: float) -> Measured:
    """Put the workers' shares together.

    Args:
        shares: what every worker's `MeasuredMeter.share` returned, in any order, through JSON or not.
        pipeline: the pipeline's shape.
        training_s: seconds of the run's clock without evaluation.

    Raises:
        ValueError: a worker's share is missing or there twice.
    """
    shares = sorted(shares, key=lambda share: int(share["worker"]))
    if [share["worker"] for share in shares] != list(range(pipeline.num_workers)):
        given = ", ".join(str(share["worker"]) for share in shares)
        raise ValueError(f"shares of workers {given} don't make {pipeline.num_workers} workers")
    totals = [_Totals.from_json(share["training"]) for share in shares]
    rows = tuple(_row(share, each, pipeline, training_s) for share, each in zip(shares, totals, strict=True))
    busy_s, stall_s = sum(each.busy_s for each in totals), sum(each.stall_s for each in totals)
    metrics = fractions(busy_s, stall_s, pipeline.num_workers, training_s) | _sums(rows) | _transfer_metrics(totals)
    timed = all(share["times_transfers"] for share in shares)
    if not timed:
        metrics = {name: value for name, value in metrics.items() if not name.startswith(_OF_TRANSFERS)}
        rows = tuple({key: value for key, value in row.items() if not key.startswith(_OF_TRANSFERS)} for row in rows)
    num_bytes: Counter[tuple[str, str]] = Counter()
    for each in totals:
        num_bytes.update(each.num_bytes)
    notes = {} if timed else {WORKERS_IDLE: _UNTIMED}
    return Measured(metrics, rows, _timeline(shares, pipeline), busy_s, stall_s, num_bytes, notes)


def _row(share: Mapping[str, Any], totals: _Totals, pipeline: Pipeline, training_s: float) -> dict[str, Any]:
    """Return a worker's row. compute, waiting, sending and other add up to the training time."""
    worker = share["worker"]
    evaluation = _Totals.from_json(share["evaluation"])
    waiting_s = sum(totals.seconds[op] for op in _WAIT_COLUMNS)
    sending_s = sum(totals.seconds[op] for op in _SENDS)
    idle = fractions(totals.busy_s, totals.stall_s, 1, training_s)
    return {
        "worker": share["worker"],
        "rank": share["rank"],
        "stage": pipeline.stages_of(worker)[0],
        "replica": pipeline.replica_of(worker),
        "compute_s": totals.busy_s,
        **{column: totals.seconds[op] for op, column in _COMPUTE_COLUMNS.items()},
        "waiting_s": waiting_s,
        **{column: totals.seconds[op] for op, column in _WAIT_COLUMNS.items()},
        "stall_s": totals.stall_s,
        "sending_s": sending_s,
        "other_s": max(0.0, training_s - totals.busy_s - waiting_s - sending_s),
        "all_reduce_s": totals.all_reduce_s,
        "evaluation_compute_s": evaluation.busy_s,
        **idle,
    }


def _sums(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return worker seconds by what they went to, summed over the workers."""
    columns = ("compute_s", "waiting_s", *_WAIT_COLUMNS.values(), "sending_s", "other_s")
    return {column: sum(row[column] for row in rows) for column in columns}


def _transfer_metrics(totals: Sequence[_Totals]) -> dict[str, float]:
    """Return number and seconds of transfers by kind, and seconds by level; transfers that overlap count each."""
    metrics: Counter[str] = Counter()
    for each in totals:
        for (kind, level), duration_s in each.transfer_s.items():
            name = kind.replace("-", "_")
            metrics[f"comm_transfers_{name}"] += each.num_transfers[kind, level]
            metrics[f"comm_time_{name}_s"] += duration_s  # type: ignore[assignment] # a Counter adds floats as well
            metrics[f"comm_time_level_{level}_s"] += duration_s  # type: ignore[assignment]
    return {name: float(metrics[name]) for name in sorted(metrics)}


def _timeline(shares: Sequence[Mapping[str, Any]], pipeline: Pipeline) -> Timeline:
    """Merge what was recorded, up to where the first worker ran out of room: no row ends before the others."""
    spans: list[Span] = []
    transfers: list[Transfer] = []
    full_s: list[float] = []
    for share in shares:
        origin_s = share["origin_s"]
        for kind, label, start_s, end_s, minibatch in share["spans"]:
            spans.append(Span(share["worker"], kind, label, start_s - origin_s, end_s - origin_s, minibatch))
        for kind, label, senders, receivers, level, num_bytes, start_s, end_s in share["transfers"]:
            times_s = (start_s - origin_s, max(start_s, end_s) - origin_s)
            transfers.append(Transfer(kind, label, tuple(senders), tuple(receivers), level, num_bytes, *times_s))
        if share["truncated"]:
            full_s.append(spans[-1].end_s)
    until_s = min(full_s, default=float("inf"))
    return Timeline(
        pipeline.worker_names,
        tuple(sorted((s for s in spans if s.start_s < until_s), key=lambda span: (span.start_s, span.worker))),
        tuple(sorted((t for t in transfers if t.start_s < until_s), key=lambda transfer: transfer.start_s)),
        bool(full_s),
    )
