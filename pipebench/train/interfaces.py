"""What the training loop needs of others: the engine that trains, and somebody to tell how it gets on."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from pipebench.checkpoint.state import ModelState
from pipebench.engine.setup import Setup
from pipebench.engine.virtual import OnLoss, OnUnit
from pipebench.model.plan import Plan
from pipebench.schedule.moves import Repartition
from pipebench.simulate.meter import RunMeasurements
from pipebench.train.result import Point


class Engine(Protocol):
    """What trains: all workers in one process, or one of them. It also tells the time, virtual or of the wall."""

    clock_s: float  # at the last drain

    @property
    def setup(self) -> Setup:
        """What it runs, under the plan that holds now."""

    @property
    def now_s(self) -> float:
        """The time, also between two drains."""

    def start_clock(self, clock_s: float = 0.0) -> None:
        """Let the run's clock start, or go on from `clock_s`."""

    @property
    def busy_fraction(self) -> float:
        """Share of the time in training that the workers of this process spent computing."""

    @property
    def stop_reason(self) -> str | None:
        """Why the run ends early, as far as this process knows."""

    @property
    def position(self) -> int:
        """This process's place in what `exchange` returns."""

    @property
    def is_first(self) -> bool:
        """Whether this process keeps the run's records."""

    def train(self, first_minibatch: int, num_minibatches: int) -> int:
        """Train, then drain; return how many minibatches were trained on."""

    def evaluate(self) -> dict[str, float]:
        """Return `eval_loss` and every metric of the dataset for the newest weights."""

    def exchange(self, value: Any) -> list[Any]:
        """Return what every process gives, in the order of workers; JSON."""

    def switch_setup(self, setup: Setup) -> None:
        """Go on with another setup of the same model, at a drain."""

    def parts(self) -> Sequence[tuple[str, ModelState]]:
        """Return what this process contributes to a checkpoint, by name."""

    def announce(self, move: Repartition) -> None:
        """Let layers move in the next segment, while it goes on."""

    def take_decisions(self) -> list[Repartition]:
        """Return what was decided in the last segment, to balance the stages; numbered since the drain before it."""

    def replan(self, plan: Plan) -> None:
        """Go on under a plan with other cuts or memory policies, at a drain."""

    def restore(
        self, state: ModelState, facts: Mapping[str, Any] | None, clock_s: float, plan: Plan | None = None
    ) -> None:
        """Go on from a checkpoint, under `plan` if there is one; `facts` are this process's then, or None."""

    def facts(self) -> dict[str, Any]:
        """Return what was counted here; JSON: `num_bytes`, and lists by worker of peaks and of weight versions."""

    def set_activity(self, work: str) -> None:
        """Name what this process does now, for those who wait for it."""

    def sync_clock(self) -> None:
        """Let `clock_s` be the time now: what came since the drain belongs to neither training nor evaluation."""

    def measured(self, training_s: float) -> RunMeasurements:
        """Return what all workers measured; all processes call it."""


MakeEngine = Callable[[OnLoss, OnUnit], Engine]
OnPoint = Callable[[Point], None]


class ProgressSink(Protocol):
    """What a run tells while it goes on."""

    def update(self, samples: int, clock_s: float, loss: float, occupancy: float) -> None:
        """Tell of one minibatch; called often."""

    def evaluation(self, point: Point, epoch: float) -> None:
        """Tell of one evaluation."""

    def note(self, text: str) -> None:
        """Tell of anything else, in a line that stays."""
