"""What a checkpoint keeps of the training loop, besides the model: counters, clocks, curves, and what was counted."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pipebench.checkpoint.state import CheckpointError
from pipebench.schedule.instructions import Op
from pipebench.typed_json import (
    JsonError,
    Rule,
    by_name,
    count,
    finite,
    flag,
    list_of,
    number,
    record,
    row_of,
    text,
    wrong,
)


@dataclass(frozen=True)
class Progress:
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
    """

    taken_by: str
    facts: list[dict[str, Any]]
    samples: int
    epoch: float
    points: list[dict[str, Any]]
    training_s_at: list[float]
    counted_from: list[float]
    loss_sum: float
    weight: float
    training_s: float
    evaluation_s: float
    checkpoint_s: float
    clock_s: float
    saved_at_s: float
    lost_s: float = 0.0
    bytes_before: list[list[Any]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Progress":
        """Return what `to_json` returned; checkpoints of 0.1.0 may lack what has a default.

        Raises:
            CheckpointError: names the field, what was found and what is allowed.
        """
        defaults = {"lost_s": 0.0, "bytes_before": []}
        try:
            _RULE({**defaults, **data}, "progress")
        except JsonError as error:
            raise CheckpointError(str(error)) from None
        found = cls(**data)
        found._check()
        return found

    def _check(self) -> None:
        """Check what holds between the fields."""
        samples = [point["samples"] for point in self.points]
        problems = (
            (len(self.training_s_at) != len(samples), "training_s_at", f"{len(samples)} items, one for each point"),
            (samples != sorted({*samples}), "points", "points of ascending samples"),
            (any(each > self.samples for each in samples), "points", f"points of at most {self.samples:,} samples"),
            (self.training_s_at != sorted(self.training_s_at), "training_s_at", "ascending seconds"),
            (self.training_s > self.clock_s * (1 + 1e-9), "training_s", f"at most clock_s, {self.clock_s:g}"),
            (self.counted_from[0] > self.samples, "counted_from", f"at most {self.samples:,} samples"),
        )
        for is_wrong, name, allowed in problems:
            if is_wrong:
                raise CheckpointError(f"progress.{name}: doesn't agree with the rest, allowed is {allowed}")


def _amount(value: Any, where: str) -> None:
    finite(value, where)
    if value < 0:
        raise wrong(value, where, "a number from 0 on")


_BYTES = list_of(row_of(text, text, count))
_TOTALS = record(
    {
        "seconds": record({op.name: _amount for op in Op}),
        "stall_s": finite,
        "all_reduce_s": _amount,
        "transfers": list_of(record({"kind": text, "level": text, "number": count, "s": _amount, "bytes": count})),
    }
)
_COUNTED: Mapping[str, Rule] = {
    "num_bytes": _BYTES,
    "peak_bytes": list_of(count),
    "weight_versions_max": list_of(count),
}
# What engines count: one process for all workers on the virtual clock, or one of a worker's own.
_VIRTUAL = record({**_COUNTED, "busy_s": _amount, "stall_s": finite, "evaluation_s": _amount})
_METER = record({"training": _TOTALS, "evaluation": _TOTALS, "times_transfers": flag})


def _meter(value: Any, where: str) -> None:
    """Check what a worker's meter has kept; the first ones timed all transfers, and didn't say so."""
    _METER({"times_transfers": True, **value} if isinstance(value, dict) else value, where)


_MEASURED = record({**_COUNTED, "meter": _meter})


def _facts(value: Any, where: str) -> None:
    (_MEASURED if isinstance(value, dict) and "meter" in value else _VIRTUAL)(value, where)


_RULE = record(
    {
        "taken_by": text,
        "facts": list_of(_facts),
        "samples": count,
        "epoch": _amount,
        "points": list_of(record({"samples": count, "clock_s": _amount, "metrics": by_name(number)})),
        "training_s_at": list_of(_amount),
        "counted_from": row_of(count, _amount),
        "loss_sum": finite,
        "weight": _amount,
        "training_s": _amount,
        "evaluation_s": _amount,
        "checkpoint_s": _amount,
        "clock_s": _amount,
        "saved_at_s": _amount,
        "lost_s": _amount,
        "bytes_before": _BYTES,
    }
)
