"""The meter: turns an engine's events into busy time, waiting time and the recorded part of the timeline."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipebench.model.sampling import Size
from pipebench.schedule.instructions import Op
from pipebench.schedule.pipeline import Pipeline
from pipebench.simulate.simulation import Event
from pipebench.simulate.timeline import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    EVALUATE,
    FORWARD,
    SEND,
    UPDATE,
    WAIT,
    Span,
    Timeline,
    Transfer,
)

RECORDED_SPANS = 4000  # enough for fill, steady state and drain of most segments; about 1 MB of trace
COMPUTE = {
    Op.FORWARD: (FORWARD, "F"),
    Op.BACKWARD: (BACKWARD, "B"),
    Op.BACKWARD_INPUT: (BACKWARD_INPUT, "I"),
    Op.BACKWARD_WEIGHT: (BACKWARD_WEIGHT, "W"),
    Op.UPDATE: (UPDATE, "U"),
    Op.FORWARD_AGAIN: (FORWARD, "again F"),
}
_SENDS = {
    Op.SEND_ACTIVATION: "F",
    Op.SEND_GRADIENT: "B",
    Op.PUSH: "all of B",
    Op.GIVE_UNIT: "layers' share of ",
    Op.GIVE: "layers from ",
}
_WAIT_LABELS = {
    Op.LOAD_INPUT: "load",
    Op.RECEIVE_ACTIVATION: "wait for activation",
    Op.RECEIVE_GRADIENT: "wait for gradient",
    Op.WAIT_ALL_REDUCE: "wait for all-reduce",
    Op.WAIT_NORM: "wait for gradient norm",
    Op.PULL: "wait for weights",
    Op.TAKE_UNIT: "wait for what layers read",
    Op.TAKE: "wait for layers",
}


# Facts of a summary that a note may stand beside.
PLAN, EPOCHS, PREDICTION, WORKERS_IDLE, MEMORY = "plan", "epochs", "prediction", "workers idle", "memory"


@dataclass(frozen=True)
class Measured:
    """What all workers measured together.

    Attributes:
        metrics: sums over all workers and fractions of the run, under their tracking names; training only.
        workers: a row per worker, for `RunResult.workers`.
        timeline: the recorded part, of all workers; seconds since the run began or resumed.
        busy_s: forward, backward and update seconds over all workers, training only.
        stall_s: seconds waited for bytes on their way, likewise; nothing to go by where a note says so.
        num_bytes: payload by (kind, level) as the receivers saw it, training only.
        notes: what to know of some of these numbers, see `RunResult.notes`.
    """

    metrics: dict[str, float]
    workers: tuple[dict[str, Any], ...]
    timeline: Timeline
    busy_s: float
    stall_s: float
    num_bytes: Counter[tuple[str, str]]
    notes: Mapping[str, str] = field(default_factory=dict)


class Listener(Protocol):
    """Takes note of what happens in training."""

    def begin(self, size_of: Callable[[int], Size]) -> None:
        """Start a segment, with nothing in flight; `size_of` tells what a unit's costs depend on: how many samples."""

    def event(self, event: Event) -> None:
        """Take note of one event."""

    def transfer(self, transfer: Transfer) -> None:
        """Take note of a transfer."""


class Meter:
    """Adds up what workers do; training and evaluation apart.

    Args:
        pipeline: the shape of what is run.
        listeners: are told of all that happens in training, too.

    Attributes:
        evaluating: set while an evaluation runs.
        busy_s: seconds of forward, backward and update, over all workers.
        stall_s: seconds that workers waited for bytes on their way.
        origin_s: the clock's time at which the timeline begins.
    """

    def __init__(self, pipeline: Pipeline, *listeners: Listener) -> None:
        self.evaluating = False
        self.busy_s = 0.0
        self.stall_s = 0.0
        self.origin_s = 0.0
        self._pipeline = pipeline
        self._seen: list[tuple[Event, bool]] = []  # and whether it was of an evaluation: spans are made at the end
        self._transfers: list[Transfer] = []
        self._truncated = False
        self._listeners = listeners

    def begin(self, size_of: Callable[[int], Size]) -> None:
        """Start a segment of training, with nothing in flight; `size_of` tells what a unit's costs depend on."""
        for listener in self._listeners:
            listener.begin(size_of)

    def event(self, event: Event) -> None:
        """Take note of one event."""
        if not self.evaluating:
            if event.instruction.op in COMPUTE:
                self.busy_s += event.end_s - event.start_s
            self.stall_s += event.stall_s
            for listener in self._listeners:
                listener.event(event)
        if not self._truncated and event.end_s > event.start_s:
            self._seen.append((event, self.evaluating))
            self._truncated = len(self._seen) >= RECORDED_SPANS

    def transfer(self, transfer: Transfer) -> None:
        """Take note of a transfer."""
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


def span_of(pipeline: Pipeline, event: Event, evaluating: bool) -> Span:
    """Return what a timeline shows of an event."""
    start_s, end_s, worker, (op, stage, number, *_), _ = event
    own = stage if pipeline.chunks > 1 else ""  # of the worker's stages
    if op is Op.UPDATE:
        return Span(worker, UPDATE, f"{own}U{number}", start_s, end_s, -1)
    if op in (Op.WAIT_ALL_REDUCE, Op.WAIT_NORM):
        return Span(worker, WAIT, _WAIT_LABELS[op], start_s, end_s, -1)
    minibatch = number if evaluating else pipeline.minibatch(number)[0]
    if op in _WAIT_LABELS:
        return Span(worker, WAIT, _WAIT_LABELS[op], start_s, end_s, minibatch)
    label = f"{number}" if evaluating else pipeline.label(number)
    if op in _SENDS:
        return Span(worker, SEND, f"send {own}{_SENDS[op]}{label}", start_s, end_s, minibatch)
    kind, letter = COMPUTE[op]
    return Span(worker, EVALUATE if evaluating else kind, f"{own}{letter}{label}", start_s, end_s, minibatch)


def fractions(busy_s: float, stall_s: float, num_workers: int, elapsed_s: float) -> dict[str, float]:
    """Return the bubble and communication-stall fractions of a training time, fill and drain included.

    `bubble_fraction` is the share of worker time without forward, backward or update, whatever the reason;
    `comm_stall_fraction` the part of it spent waiting for bytes that were on their way.
    """
    total_s = num_workers * elapsed_s
    if total_s <= 0:
        return {}
    return {"bubble_fraction": max(0.0, 1.0 - busy_s / total_s), "comm_stall_fraction": stall_s / total_s}


def sum_by(counts: dict[tuple[str, str], int], position: int, kinds: Sequence[str]) -> dict[str, int]:
    """Sum bytes counted by (kind, level) over one of the two, for the given kinds."""
    total: dict[str, int] = {}
    for key, num_bytes in counts.items():
        if key[0] in kinds:
            total[key[position]] = total.get(key[position], 0) + num_bytes
    return total
