"""What a checkpoint keeps of the training loop, besides the model: counters, clocks, curves, and what was counted."""

from dataclasses import asdict, dataclass
from typing import Any, NotRequired

from typing_extensions import TypedDict  # below Python 3.12 pydantic takes no other

from pipebench.checkpoint.state import CheckpointError
from pipebench.schedule.operations import Op
from pipebench.schedule.repartitions import RepartitionRecord
from pipebench.typed_json import Amount, Count, Finite, JsonError, Number, read

SentBytes = tuple[str, str, Count]  # of a kind, on a level


class CurvePoint(TypedDict):
    """A point of the curves; a metric may be infinite, or not a number."""

    samples: Count
    clock_s: Amount
    metrics: dict[str, Number]


@dataclass
class Transfers:
    """What a worker sent of a kind on a level of the cluster; transfers that overlap count their seconds each."""

    kind: str
    level: str
    number: Count
    s: Amount
    bytes: Count


@dataclass
class MeterTotals:
    """What a worker's meter has added up of training, or of evaluation.

    Attributes:
        seconds: by instruction.
        stall_s: seconds waited for bytes on their way.
        all_reduce_s: seconds during which at least one bucket was on its way.
        transfers: this worker's share of them, a row for each kind and level.
    """

    seconds: dict[str, Amount]
    stall_s: Finite
    all_reduce_s: Amount
    transfers: list[Transfers]

    def __post_init__(self) -> None:
        """Say 0 s of instructions that there weren't yet when a checkpoint was written."""
        self.seconds = {**dict.fromkeys((op.name for op in Op), 0.0), **self.seconds}

    @staticmethod
    def none() -> "MeterTotals":
        """Return those of a worker that has done nothing."""
        return MeterTotals({}, 0.0, 0.0, [])

    def of(self, kind: str, level: str) -> Transfers:
        """Return the row of a kind and a level, made if need be."""
        for row in self.transfers:
            if (row.kind, row.level) == (kind, level):
                return row
        self.transfers.append(Transfers(kind, level, 0, 0.0, 0))
        return self.transfers[-1]


@dataclass
class MeterState:
    """What a worker's meter has kept, and whether the times of its transfers mean anything."""

    training: MeterTotals
    evaluation: MeterTotals
    times_transfers: bool = True  # the first meters timed all transfers, and didn't say so


class Facts(TypedDict):
    """What an engine counted: one process for all workers on the virtual clock, or a worker of itself by its meter."""

    num_bytes: list[SentBytes]
    peak_bytes: list[Count]
    weight_versions_max: list[Count]
    host_peak_bytes: NotRequired[list[Count]]
    busy_s: NotRequired[Amount]
    stall_s: NotRequired[Finite]
    again_s: NotRequired[Amount]  # the first checkpoints didn't say so; so it is with the next
    swap_stall_s: NotRequired[Finite]
    evaluation_s: NotRequired[Amount]
    meter: NotRequired[MeterState]
    pushes: NotRequired[list[Any]]  # what one extension counted, and what others did
    extensions: NotRequired[dict[str, list[Any]]]


@dataclass(frozen=True)
class SavedProgress:
    """How far a run is, at a drain.

    Attributes:
        taken_by: engine and plan that the facts are of.
        facts: what every process counted.
        samples: trained on since the start.
        epoch: the same in epochs.
        points: the curves: samples, clock_s and metrics of each.
        training_s_at: seconds of training before each point.
        counted_from: samples and training seconds before what the facts cover.
        loss_sum: since the last point.
        weight: what a mean loss divides that by.
        training_s: seconds of training.
        evaluation_s: seconds of evaluation.
        checkpoint_s: seconds of writing checkpoints.
        clock_s: the run's clock.
        saved_at_s: wall clock, seconds since the epoch.
        lost_s: seconds on the clock that restarts have cost.
        bytes_before: bytes by kind and level that were sent before what the facts cover.
        moves: under which cuts the run went on, from which minibatches: the last ones are those of the checkpoint, on
            top of the plan that `taken_by` tells.
        last_samples: numbers of the first samples of the last minibatch that was done: the order of samples shows in
            them. Empty at the start, and in checkpoints of 0.1.0 before they said so.
    """

    taken_by: str
    facts: list[Facts]
    samples: Count
    epoch: Amount
    points: list[CurvePoint]
    training_s_at: list[Amount]
    counted_from: tuple[Count, Amount]
    loss_sum: Finite
    weight: Amount
    training_s: Amount
    evaluation_s: Amount
    checkpoint_s: Amount
    clock_s: Amount
    saved_at_s: Amount
    lost_s: Amount = 0.0
    bytes_before: tuple[SentBytes, ...] = ()
    moves: tuple[RepartitionRecord, ...] = ()
    last_samples: tuple[Count, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "SavedProgress":
        """Return what `to_json` returned; checkpoints of 0.1.0 may lack what has a default.

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
        """Check what holds between the fields."""
        samples = [point["samples"] for point in self.points]
        strange = next((index for index, each in enumerate(self.facts) if not _is_one_engine_s(each)), None)
        problems = (
            (len(self.training_s_at) != len(samples), "training_s_at", f"{len(samples)} items, one for each point"),
            (samples != sorted({*samples}), "points", "points of ascending samples"),
            (any(each > self.samples for each in samples), "points", f"points of at most {self.samples:,} samples"),
            (self.training_s_at != sorted(self.training_s_at), "training_s_at", "ascending seconds"),
            (self.training_s > self.clock_s * (1 + 1e-9), "training_s", f"at most clock_s, {self.clock_s:g}"),
            (strange is not None, f"facts[{strange}]", "what one kind of engine counts"),
            (self.counted_from[0] > self.samples, "counted_from", f"at most {self.samples:,} samples"),
        )
        for is_wrong, name, allowed in problems:
            if is_wrong:
                raise CheckpointError(f"progress.{name}: doesn't agree with the rest, allowed is {allowed}")


_ON_VIRTUAL_CLOCK = {"busy_s", "stall_s", "evaluation_s"}


def _is_one_engine_s(facts: Facts) -> bool:
    """Return whether all is there that one kind of engine counts, and nothing that only another does."""
    if "meter" not in facts:
        return facts.keys() >= _ON_VIRTUAL_CLOCK
    meter = facts["meter"]
    names = {op.name for op in Op}
    all_timed = all(phase.seconds.keys() == names for phase in (meter.training, meter.evaluation))
    return all_timed and not facts.keys() & _ON_VIRTUAL_CLOCK
