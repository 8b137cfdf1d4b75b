"""The result of a run, as plain numbers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipebench.schedule.repartitions import RepartitionRecord
from pipebench.typed_json import Number

REACHED, MISSED, DIVERGED, COMPLETED, INTERRUPTED = "reached", "missed", "diverged", "completed", "interrupted"
_TARGET_REACHED = "target_reached"


@dataclass(frozen=True)
class Point:
    """A point of a run's curves, at an evaluation or a logging step."""

    samples: int  # training samples since the start
    clock_s: float  # seconds on the run's clock (virtual or wall), evaluation included
    metrics: Mapping[str, Number]  # such as `train_loss`, `top1`


@dataclass(frozen=True)
class RunResult:
    """The outcome of one run of one recipe."""

    name: str  # of the recipe; in a sweep with what varies, `quickstart-depth=4`
    mode: str  # parallelism mode
    plan: str  # in the papers' notation, e.g. `15-1`
    engine: str  # `simulated`, `virtual` or `distributed`
    clock: str  # `virtual` or `wall`
    timing: str  # the source of durations, one sentence
    seed: int  # the recipe's
    outcome: str  # `reached`, `missed`, `diverged`, `completed` (no target set) or `interrupted`
    sentence: str  # the outcome in one sentence for people
    metrics: Mapping[str, Number]  # final, under tracking names (`time_to_accuracy_s`, `comm_bytes_total`, ...)
    points: tuple[Point, ...] = ()  # the curves, in time order
    stages: tuple[Mapping[str, Any], ...] = ()  # per stage: layers, depth, numbers
    # Per worker of a distributed run: rank, stage, replica, and use of time, see `pipebench.distributed.meter`
    workers: tuple[Mapping[str, Any], ...] = ()
    recipe: Mapping[str, str] = field(default_factory=dict)  # full key to text, by which runs are compared; or empty
    varied: Mapping[str, str] = field(default_factory=dict)  # a sweep's varied keys, full key to text
    notes: Mapping[str, str] = field(default_factory=dict)  # remarks, by the fact in the summary
    # Long histories, recorded in files of their own: an asynchronous server's pushes, an architecture search, moves
    pushes: tuple[Any, ...] = ()
    search: Any = None
    moves: tuple[RepartitionRecord, ...] = ()

    def __post_init__(self) -> None:
        """Set the metric `target_reached`, which follows from the outcome and isn't in results of older versions."""
        others = {name: value for name, value in self.metrics.items() if name != _TARGET_REACHED}
        reached = {_TARGET_REACHED: float(self.outcome == REACHED)} if self.outcome in (REACHED, MISSED) else {}
        object.__setattr__(self, "metrics", {**reached, **others})

    @property
    def has_target(self) -> bool:
        """Whether the run had a target: by its outcome or, if it diverged or was interrupted, by its recipe."""
        if self.outcome in (REACHED, MISSED, COMPLETED):
            return self.outcome != COMPLETED
        return not self.recipe or "train.target.value" in self.recipe  # older results have no recipe

    @property
    def exit_code(self) -> int:
        """0 if the target was reached or none was set, 1 if it was missed or training diverged, 130 if interrupted."""
        return {REACHED: 0, COMPLETED: 0, MISSED: 1, DIVERGED: 1, INTERRUPTED: 130}[self.outcome]
