"""A timeline: what every worker and every link did, and when."""

from dataclasses import dataclass, replace

from pipebench.schedule.operations import (
    ACTIVATION,
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    GRADIENT,
    SWAP_IN,
    SWAP_OUT,
)
from pipebench.schedule.syncs import SYNCS

EVALUATE = "evaluate"
PASSES = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
SYNC_KINDS = tuple(dict.fromkeys(sync.kind for sync in SYNCS.values()))
TRAINING_KINDS = (ACTIVATION, GRADIENT, *SYNC_KINDS)  # these make the total
BUFFERS, EVALUATION, CONTROL = "buffers", "evaluation", "control"  # counted apart, as migration is
SWAP_KINDS = (SWAP_OUT, SWAP_IN)  # copies to a device's host and back, counted apart, too
PCIE = "pcie"  # in place of a level: what a device and its host are joined by


@dataclass(frozen=True, slots=True)
class Span:
    """Something a worker did, or was waiting for, from `start_s` to `end_s`.

    Attributes:
        worker: worker index.
        kind: `forward`, `backward`, its parts `backward input` and `backward weight`, `update`, `evaluate`, `send`
            (takes no time where time is simulated), `wait` (for `label`).
        label: short text, e.g. `F3` (minibatch 3), `B3.1` (microbatch 1 of it), `U2` (round 2).
        start_s: seconds on the run's clock.
        end_s: likewise.
        minibatch: number of the minibatch, -1 where there is none.
    """

    worker: int
    kind: str
    label: str
    start_s: float
    end_s: float
    minibatch: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes on their way: one send, or one bucket of what replicas sum.

    Attributes:
        kind: `activation`, `gradient`, `all-reduce`, `parameter-server`, `buffers`, `migration`.
        label: e.g. `F3`, `B3`, `R2` (the sum of round 2).
        senders: the workers that send; one for a send, all of them for a sum.
        receivers: likewise.
        level: name of the slowest level crossed.
        num_bytes: payload, counted once, at the senders.
        start_s: seconds on the run's clock.
        end_s: likewise; the last byte has arrived.
    """

    kind: str
    label: str
    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    level: str
    num_bytes: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """The first part of a run, whole enough to see fill, steady state and drain.

    Attributes:
        worker_names: one per worker, e.g. `stage 0 replica 1`.
        spans: in order of start.
        transfers: in order of start.
        truncated: whether the run went on after the last span.
    """

    worker_names: tuple[str, ...]
    spans: tuple[Span, ...]
    transfers: tuple[Transfer, ...]
    truncated: bool

    def shifted(self, by_s: float) -> "Timeline":
        """Return it with another zero of the clock."""
        spans = (replace(span, start_s=span.start_s + by_s, end_s=span.end_s + by_s) for span in self.spans)
        transfers = (replace(each, start_s=each.start_s + by_s, end_s=each.end_s + by_s) for each in self.transfers)
        return replace(self, spans=tuple(spans), transfers=tuple(transfers))

    def warmed_up(self) -> "Timeline":
        """Return what came after every worker's first backward: first calls are slow on the wall clock."""
        ends_s: dict[int, float] = {}
        for span in self.spans:
            if span.kind in (BACKWARD, BACKWARD_WEIGHT):
                ends_s.setdefault(span.worker, span.end_s)
        since_s = max(ends_s.values(), default=0.0)
        later = tuple(span for span in self.spans if span.start_s >= since_s)
        return replace(self, spans=later, transfers=()).shifted(-since_s)
