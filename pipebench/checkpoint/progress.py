"""What a checkpoint stores of the training loop besides the model: counters, clocks, curves and metered totals."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any, NotRequired

from typing_extensions import TypedDict  # below Python 3.12 pydantic takes no other

from pipebench.checkpoint.state import CheckpointError
from pipebench.schedule.operations import Op
from pipebench.schedule.repartitions import RepartitionRecord
from pipebench.typed_json import Amount, Count, Finite, JsonError, Number, read

SentBytes = tuple[str, str, Count]  # kind, level, bytes


class CurvePoint(TypedDict):
    """A point of the curves; a metric may be infinite or NaN."""

    samples: Count
    clock_s: Amount
    metrics: dict[str, Number]


@dataclass
class Transfers:
    """A worker's transfers of one kind on one level."""

    kind: str
    level: str
    number: Count
    s: Amount  # seconds, added up where transfers overlap
    bytes: Count


@dataclass
class MeterTotals:
    """The totals of a worker's meter, over training or over evaluations."""

    seconds: dict[str, Amount]  # by instruction
    stall_s: Finite  # seconds waited for bytes in transfer
    all_reduce_s: Amount  # seconds during which at least one bucket was in transfer
    transfers: list[Transfers]  # this worker's share of them, a row for each kind and level
    overlapped_s: Amount = 0.0  # seconds of transfers beside computing, where a GPU's events tell when they end

    @staticmethod
    def none() -> "MeterTotals":
        """Return empty totals."""
        return MeterTotals(dict.fromkeys((op.name for op in Op), 0.0), 0.0, 0.0, [])

    def of(self, kind: str, level: str) -> Transfers:
        """Return the row of a kind and a level; add it if it is missing."""
        for row in self.transfers:
            if (row.kind, row.level) == (kind, level):
                return row
        self.transfers.append(Transfers(kind, level, 0, 0.0, 0))
        return self.transfers[-1]


@dataclass
class MeterState:
    """A worker's totals, and whether the times of its transfers are meaningful."""

    training: MeterTotals
    evaluation: MeterTotals
    times_transfers: bool = True  # false where a GPU trained before its events timed them


class Facts(TypedDict):
    """What an engine has counted in one process: on a virtual clock for all workers, else for its worker."""

    num_bytes: list[SentBytes]
    peak_bytes: list[Count]
    weight_versions_max: list[Count]
    host_peak_bytes: list[Count]
    busy_s: NotRequired[Amount]
    stall_s: NotRequired[Finite]
    again_s: NotRequired[Amount]  # seconds of recomputation
    swap_stall_s: NotRequired[Finite]
    evaluation_s: NotRequired[Amount]
    meter: NotRequired[MeterState]
    extensions: dict[str, list[Any]]  # counters of extensions, by name


@dataclass(frozen=True)
class SavedProgress:
    """How far a run is, at a drain."""

    taken_by: str  # engine and plan whose workers counted `facts`
    facts: list[Facts]  # what every process has counted
    samples: Count  # trained on since the start
    epoch: Amount  # the same in epochs
    points: list[CurvePoint]
    training_s_at: list[Amount]  # seconds in training before each point of the curves
    counted_from: tuple[Count, Amount]  # samples and seconds in training before these workers began to count
    loss_sum: Finite  # of the samples since the last point
    weight: Amount  # of these samples: the mean loss is `loss_sum` / `weight`
    training_s: Amount
    evaluation_s: Amount
    checkpoint_s: Amount
    clock_s: Amount  # the run's clock
    saved_at_s: Amount  # wall clock, seconds since the epoch
    lost_s: Amount  # seconds on the clock that restarts have cost
    bytes_before: tuple[SentBytes, ...]  # bytes sent before these workers began to count, by kind and level
    # Indices of the first samples of the last minibatch done, by which the order of samples is compared
    last_samples: tuple[Count, ...]
    # The repartitions so far, which lead from the plan in `taken_by` to the checkpoint's cuts
    moves: tuple[RepartitionRecord, ...] = ()
    counted_under: str = ""  # what `facts` depend on besides `taken_by`; "" in older checkpoints
    checkpoint_s_at: list[Amount] = field(default_factory=list)  # seconds in checkpoints before each point, likewise

    def to_json(self) -> dict[str, Any]:
        """Return JSON data that doesn't change while it is written."""
        curves = {name: [*getattr(self, name)] for name in ("points", "training_s_at", "checkpoint_s_at")}
        # `asdict` copies deeply: for the points of a long run it would take seconds, while training waits.
        return asdict(replace(self, points=[], training_s_at=[], checkpoint_s_at=[])) | curves

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "SavedProgress":
        """Read what `to_json` returned.

        Raises:
            CheckpointError: names the field, what was found and what is allowed.
        """
        try:
            found = read(cls, data, "progress")
        except JsonError as error:
            raise CheckpointError(str(error)) from None
        found._check()
        return found

    def _check(self) -> None:
        """Check the rules between fields."""
        samples = [point["samples"] for point in self.points]
        mixed = next((index for index, each in enumerate(self.facts) if not _is_of_one_engine(each)), None)
        problems = (
            (len(self.training_s_at) != len(samples), "training_s_at", f"{len(samples)} items, one for each point"),
            (samples != sorted({*samples}), "points", "points of ascending samples"),
            (any(each > self.samples for each in samples), "points", f"points of at most {self.samples:,} samples"),
            (self.training_s_at != sorted(self.training_s_at), "training_s_at", "ascending seconds"),
            (len(self.checkpoint_s_at) not in (0, len(samples)), "checkpoint_s_at", f"{len(samples)} items, or none"),
            (self.checkpoint_s_at != sorted(self.checkpoint_s_at), "checkpoint_s_at", "ascending seconds"),
            (self.training_s > self.clock_s * (1 + 1e-9), "training_s", f"at most clock_s, {self.clock_s:g}"),
            (mixed is not None, f"facts[{mixed}]", "what one kind of engine counts"),
            (self.counted_from[0] > self.samples, "counted_from", f"at most {self.samples:,} samples"),
        )
        for is_wrong, name, allowed in problems:
            if is_wrong:
                raise CheckpointError(f"progress.{name}: doesn't agree with the rest, allowed is {allowed}")


_ON_VIRTUAL_CLOCK = {"busy_s", "stall_s", "again_s", "swap_stall_s", "evaluation_s"}


def _is_of_one_engine(facts: Facts) -> bool:
    """Return whether facts are complete for one kind of engine, and have none of the other kind's."""
    if "meter" not in facts:
        return facts.keys() >= _ON_VIRTUAL_CLOCK
    meter = facts["meter"]
    names = {op.name for op in Op}
    all_timed = all(phase.seconds.keys() == names for phase in (meter.training, meter.evaluation))
    return all_timed and not facts.keys() & _ON_VIRTUAL_CLOCK
