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
from pipebench.schedule.syncs import ALL_GATHER, REDUCE_SCATTER, SYNCS

EVALUATE = "evaluate"
PASSES = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
SYNC_KINDS = (*dict.fromkeys(sync.algorithm for sync in SYNCS.values()), REDUCE_SCATTER, ALL_GATHER)
TENSOR = "tensor"  # sums and gathers among the devices of a worker whose layers are sliced
TRAINING_KINDS = (ACTIVATION, GRADIENT, *SYNC_KINDS, TENSOR)  # counted in totals
BUFFERS, EVALUATION, CONTROL = "buffers", "evaluation", "control"  # not counted in totals, like migration
SWAP_KINDS = (SWAP_OUT, SWAP_IN)  # copies to a device's host and back, not counted in totals
PCIE = "pcie"  # the level of copies between a device and its host


@dataclass(frozen=True, slots=True)
class Span:
    """Something that a worker did, or waited for."""

    worker: int
    # `forward`, `backward`, its parts `backward input` and `backward weight`, `update`, `evaluate`, `send` (0 s if time
    # is simulated and messages cost no host time), `wait` (for what `label` says)
    kind: str
    label: str  # e.g. `F3` (minibatch 3), `B3.1` (its microbatch 1), `U2` (round 2).
    start_s: float  # on the run's clock
    end_s: float
    minibatch: int  # -1 if there is none


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes in transit: one message, or one bucket that replicas sum."""

    kind: str  # `activation`, `gradient`, `all-reduce`, `parameter-server`, `buffers`, `migration`
    label: str  # e.g. `F3`, `B3`, `R2` (the sum of round 2).
    senders: tuple[int, ...]  # workers: one for a message, all of the group for a sum
    receivers: tuple[int, ...]  # workers: one for a message, all of the group for a sum
    level: str  # name of the slowest level crossed
    num_bytes: int  # payload, counted once, at the senders
    start_s: float  # on the run's clock
    end_s: float  # when the last byte has arrived


@dataclass(frozen=True)
class Timeline:
    """The recorded part of a run, long enough for fill, steady state and drain."""

    worker_names: tuple[str, ...]  # e.g. `stage 0 replica 1`.
    spans: tuple[Span, ...]  # in order of start
    transfers: tuple[Transfer, ...]  # in order of start
    truncated: bool  # whether the run continued after the last span

    def shifted(self, by_s: float) -> "Timeline":
        """Return the timeline with all times shifted by `by_s`."""
        spans = (replace(span, start_s=span.start_s + by_s, end_s=span.end_s + by_s) for span in self.spans)
        transfers = (replace(each, start_s=each.start_s + by_s, end_s=each.end_s + by_s) for each in self.transfers)
        return replace(self, spans=tuple(spans), transfers=tuple(transfers))

    def warmed_up(self) -> "Timeline":
        """Return the spans after every worker's first backward, because first calls are slow on the wall clock."""
        ends_s: dict[int, float] = {}
        for span in self.spans:
            if span.kind in (BACKWARD, BACKWARD_WEIGHT):
                ends_s.setdefault(span.worker, span.end_s)
        since_s = max(ends_s.values(), default=0.0)
        later = tuple(span for span in self.spans if span.start_s >= since_s)
        return replace(self, spans=later, transfers=()).shifted(-since_s)
