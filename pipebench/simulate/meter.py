"""The meter: turns an engine's events into busy time, waiting time and the recorded part of the timeline."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipebench.cluster import Cluster
from pipebench.model.sampling import Size
from pipebench.schedule.instructions import COPIES, FIRST_PARTS
from pipebench.schedule.operations import (
    COMPUTE,
    OPERATIONS,
    OTHER,
    RECEIVE,
    ROUND,
    SEND,
    SWAP_IN,
    SWAP_OUT,
    UPDATE,
    WAIT,
    Op,
)
from pipebench.schedule.pipeline import Pipeline
from pipebench.simulate.costs import Costs
from pipebench.simulate.simulation import TimelineEvent
from pipebench.simulate.timeline import EVALUATE, PCIE, TRAINING_KINDS, Span, Timeline, Transfer

RECORDED_SPANS = 4000  # enough for fill, steady state and drain of most segments; about 1 MB of trace
COMPUTED = {op: (row.kind, row.label) for op, row in OPERATIONS.items() if row.role == COMPUTE}
_SENDS = {op: row.label for op, row in OPERATIONS.items() if row.role == SEND}
_WAIT_LABELS = {op: f"wait for {row.label}" for op, row in OPERATIONS.items() if row.role in (RECEIVE, WAIT)}
_OF_ROUNDS = tuple(op for op, row in OPERATIONS.items() if row.counts == ROUND and row.role == WAIT)
_OF_WEIGHTS = {op: row.label for op, row in OPERATIONS.items() if row.counts == ROUND and row.role == OTHER}
_WAIT_LABELS[Op.LOAD_INPUT] = OPERATIONS[Op.LOAD_INPUT].label


# Facts of a run's summary to which a note may be added
PLAN, EPOCHS, PREDICTION, WORKERS_IDLE, MEMORY = "plan", "epochs", "prediction", "workers idle", "memory"
THROUGHPUT, CUT_ANEW = "throughput", "cut anew"


@dataclass(frozen=True)
class RunMeasurements:
    """Measurements of all workers together."""

    # Sums over all workers and fractions of the run, under their tracking names; training only
    metrics: dict[str, float]
    workers: tuple[dict[str, Any], ...]  # a row per worker, for `RunResult.workers`
    timeline: Timeline  # the recorded part, in seconds since the run began or resumed
    busy_s: float  # forward, backward and update seconds over all workers, training only
    stall_s: float  # seconds waiting for bytes in transit over all workers; unreliable if a note says so
    num_bytes: Counter[tuple[str, str]]  # payload by (kind, level) as received, training only
    notes: Mapping[str, str] = field(default_factory=dict)  # remarks by fact, see `RunResult.notes`


class Listener(Protocol):
    """Observes the events of training; a subclass overrides what it needs."""

    def begin(self, size_of: Callable[[int], Size]) -> None:
        """Start a segment, with nothing in flight; `size_of` gives a unit's size."""
        return

    def event(self, event: TimelineEvent) -> None:
        """Record an event."""

    def transfer(self, transfer: Transfer) -> None:
        """Record a transfer."""
        return


class Meter:
    """Adds up workers' time in training, records a timeline, and passes the events of training on to listeners.

    Attributes:
        evaluating: whether the events that follow are of an evaluation.
        busy_s: seconds of forwards, backwards and updates, over all workers.
        again_s: the part of `busy_s` that recomputes forwards.
        stall_s: seconds waiting for bytes in transit, over all workers.
        swap_stall_s: seconds in which backwards wait for copies from the host, over all workers.
        origin_s: clock time at which the timeline begins.
    """

    def __init__(self, pipeline: Pipeline, *listeners: Listener) -> None:
        self.evaluating = False
        self.busy_s = self.again_s = self.stall_s = self.swap_stall_s = 0.0
        self.origin_s = 0.0
        self._pipeline = pipeline
        self._seen: list[tuple[TimelineEvent, bool]] = []  # with whether in an evaluation; spans are made at the end
        self._transfers: list[Transfer] = []
        self._truncated = False
        self._listeners = listeners
        self._recomputing_s: Callable[[int, int], float] | None = None

    def begin(self, size_of: Callable[[int], Size], again_s: Callable[[int, int], float] | None = None) -> None:
        """Start a segment of training, with nothing in flight.

        Args:
            size_of: returns a unit's size.
            again_s: returns the seconds of a backward that recompute forwards, given the stage and the unit; None: 0.
        """
        self._recomputing_s = again_s
        for listener in self._listeners:
            listener.begin(size_of)

    def event(self, event: TimelineEvent) -> None:
        """Record an event."""
        if not self.evaluating:
            op, stage, number, *_ = event.instruction
            if op in COMPUTED:
                self.busy_s += event.end_s - event.start_s
                if op is Op.FORWARD_AGAIN:
                    self.again_s += event.end_s - event.start_s
                elif self._recomputing_s is not None and op in FIRST_PARTS:
                    self.again_s += self._recomputing_s(stage, number)
            if op is Op.SWAP_IN:
                self.swap_stall_s += event.stall_s
            else:
                self.stall_s += event.stall_s
            for listener in self._listeners:
                listener.event(event)
        if not self._truncated and event.end_s > event.start_s and event.instruction.op not in COPIES:
            self._seen.append((event, self.evaluating))
            self._truncated = len(self._seen) >= RECORDED_SPANS

    def transfer(self, transfer: Transfer) -> None:
        """Record a transfer."""
        if not self.evaluating:
            for listener in self._listeners:
                listener.transfer(transfer)
        if not self._truncated:
            self._transfers.append(transfer)

    def timeline(self) -> Timeline:
        """Return the recorded part."""
        found = (span_of(self._pipeline, event, evaluating) for event, evaluating in self._seen)
        spans = tuple(sorted(found, key=lambda span: (span.start_s, span.worker)))
        transfers = tuple(sorted(self._transfers, key=lambda transfer: transfer.start_s))
        timeline = Timeline(self._pipeline.worker_names, spans, transfers, self._truncated)
        return timeline.shifted(-self.origin_s) if self.origin_s else timeline


def span_of(pipeline: Pipeline, event: TimelineEvent, evaluating: bool) -> Span:
    """Return a timeline's entry for an event."""
    start_s, end_s, worker, (op, stage, number, *_), _ = event
    own = stage if pipeline.chunks > 1 else ""  # shown if workers have several stages
    if op is Op.UPDATE:
        return Span(worker, UPDATE, f"{own}U{number}", start_s, end_s, -1)
    if op in _OF_ROUNDS:
        return Span(worker, WAIT, _WAIT_LABELS[op], start_s, end_s, -1)
    if op in _OF_WEIGHTS:
        return Span(worker, SEND, _OF_WEIGHTS[op], start_s, end_s, -1)
    minibatch = number if evaluating else pipeline.minibatch(number)[0]
    if op in _WAIT_LABELS:
        return Span(worker, WAIT, _WAIT_LABELS[op], start_s, end_s, minibatch)
    label = f"{number}" if evaluating else pipeline.label(number)
    if op in _SENDS:
        return Span(worker, SEND, f"send {own}{_SENDS[op]}{label}", start_s, end_s, minibatch)
    if op is Op.RECUT:
        return Span(worker, SEND, f"cut layers anew for F{label}", start_s, end_s, minibatch)
    kind, letter = COMPUTED[op]
    return Span(worker, EVALUATE if evaluating else kind, f"{own}{letter}{label}", start_s, end_s, minibatch)


def recomputed_s(costs: Costs) -> list[Mapping[Size, float]]:
    """Return the seconds per backward that recompute forwards, by stage and size; empty if nothing is recomputed."""
    found = [stage.again_s for stage in costs.stages]
    return found if any(any(seconds.values()) for seconds in found) else []


def recomputing(costs: Costs, size_of: Callable[[int], Size]) -> Callable[[int, int], float] | None:
    """Return a function of stage and unit that gives the seconds of its backward that recompute; None if none do."""
    found = recomputed_s(costs)
    return (lambda stage, unit: found[stage][size_of(unit)]) if found else None


def fractions(
    busy_s: float,
    stall_s: float,
    num_workers: int,
    elapsed_s: float,
    *,
    again_s: float | None = None,
    swap_stall_s: float | None = None,
) -> dict[str, float]:
    """Return fractions of all workers' time in training, fill and drain included, under their tracking names.

    - `bubble_fraction`: without forward, backward or update.
    - `comm_stall_fraction`: waiting for bytes in transit, part of the bubble.
    - `swap_stall_fraction`: waiting for copies from the host, part of the bubble.
    - `recompute_fraction`: recomputed forwards.
    - `effective_fraction`: all other forwards, backwards and updates.

    Fractions of unknown seconds (None) are left out.
    """
    total_s = num_workers * elapsed_s
    if total_s <= 0:
        return {}
    found = {"bubble_fraction": max(0.0, 1.0 - busy_s / total_s), "comm_stall_fraction": stall_s / total_s}
    if again_s is not None:
        found |= {"effective_fraction": (busy_s - again_s) / total_s, "recompute_fraction": again_s / total_s}
    if swap_stall_s is not None:
        found["swap_stall_fraction"] = swap_stall_s / total_s
    return found


def pcie_fractions(
    cluster: Cluster, num_bytes: Mapping[tuple[str, str], int], num_workers: int, elapsed_s: float
) -> dict[str, float]:
    """Return the fractions of all devices' PCIe bandwidth, out and in, that copies and messages use.

    `num_bytes` are those of training by (kind, level). Empty if the cluster gives no rate.
    """
    capacity_bytes = num_workers * elapsed_s * (cluster.pcie_bytes_per_s or 0.0)
    if capacity_bytes <= 0:
        return {}
    over_pcie = {level.name for level in cluster.levels if level.over_pcie}
    sent = sum(n for (kind, level), n in num_bytes.items() if kind in TRAINING_KINDS and level in over_pcie)
    ways = {"pcie_out_fraction": SWAP_OUT, "pcie_in_fraction": SWAP_IN}
    return {name: (sent + num_bytes.get((kind, PCIE), 0)) / capacity_bytes for name, kind in ways.items()}


def sum_by(counts: dict[tuple[str, str], int], position: int, kinds: Sequence[str]) -> dict[str, int]:
    """Return bytes by kind (`position` 0) or by level (1), summed over the other, of the given kinds."""
    total: dict[str, int] = {}
    for key, num_bytes in counts.items():
        if key[0] in kinds:
            total[key[position]] = total.get(key[position], 0) + num_bytes
    return total
