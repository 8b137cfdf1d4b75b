"""What a run gives back: the answer to the recipe's question, plain numbers only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipebench.recipe.search_trace import SearchFile
from pipebench.schedule.repartitions import RepartitionRecord
from pipebench.typed_json import Number

REACHED, MISSED, DIVERGED, COMPLETED, INTERRUPTED = "reached", "missed", "diverged", "completed", "interrupted"


@dataclass(frozen=True)
class Point:
    """One moment of a training run, at a drain or a logging step.

    Attributes:
        samples: training samples seen since the start.
        clock_s: seconds on the run's clock (virtual or wall), evaluation included.
        metrics: metric name to value, e.g. `train_loss`, `top1`.
    """

    samples: int
    clock_s: float
    metrics: Mapping[str, Number]


@dataclass(frozen=True)
class RunResult:
    """The outcome of one run of one recipe.

    Attributes:
        name: the recipe's name; in a sweep with what varies, `quickstart-depth=4`.
        mode: parallelism mode.
        plan: the plan in the papers' notation, e.g. `15-1`.
        engine: `simulated`, `virtual` or `distributed`.
        clock: `virtual` or `wall`.
        timing: where durations came from, one readable sentence.
        seed: the recipe's seed.
        outcome: `reached`, `missed`, `diverged`, `completed` (no target set) or `interrupted`.
        sentence: the outcome in one sentence for people.
        metrics: final numbers under their tracking names (`time_to_accuracy_s`, `comm_bytes_total`, ...).
        points: the curves, in time order.
        stages: one mapping per stage: layers, replicas, depth, and its measured numbers.
        workers: one mapping per worker of a distributed run: worker, rank, stage, replica, and what its seconds went to
            (see `pipebench.distributed.meter`); empty for other engines.
        recipe: full key to text, as it is logged; says which runs may be compared. Empty where nobody recorded it.
        pushes: without waiting for all replicas, the order in which a server applied their gradients; kept apart from
            the rest once it is recorded, since it grows with the run.
        search: the history of an architecture search; kept apart from the rest, too.
        varied: of a run of a sweep, the keys that vary, full key to text; else empty.
        moves: where the stages were cut anew while it went on; kept apart from the rest once it is recorded.
        notes: a sentence each on numbers that need one, by the fact in the summary that it stands beside.
    """

    name: str
    mode: str
    plan: str
    engine: str
    clock: str
    timing: str
    seed: int
    outcome: str
    sentence: str
    metrics: Mapping[str, Number]
    points: tuple[Point, ...] = ()
    stages: tuple[Mapping[str, Any], ...] = field(default_factory=tuple)
    workers: tuple[Mapping[str, Any], ...] = ()
    recipe: Mapping[str, str] = field(default_factory=dict)
    varied: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    pushes: tuple[Any, ...] = ()
    search: SearchFile | None = None
    moves: tuple[RepartitionRecord, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 when the target was reached or none was set, 1 when missed or diverged, 130 when interrupted."""
        return {REACHED: 0, COMPLETED: 0, MISSED: 1, DIVERGED: 1, INTERRUPTED: 130}[self.outcome]
