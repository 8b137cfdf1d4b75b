"""What engines share: a run goes from drain to drain, and its layers may move at drains, or between them.

Moves are announced from outside, or decided on inside, where stages balance. Engines that train also evaluate, count
what their workers do, and go on from checkpoints.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Protocol

import torch

from pipebench.checkpoint.state import ModelState
from pipebench.engine.facts import facts_of, restore_extensions
from pipebench.engine.feed import Feed
from pipebench.engine.loss_scale import scale_metrics
from pipebench.engine.protocols import EngineExtension
from pipebench.engine.scores import Scores, WholeModel
from pipebench.engine.segment_cuts import SegmentCuts, phases_of
from pipebench.engine.setup import Setup
from pipebench.engine.worker import Worker, host_peaks
from pipebench.model.plan import Plan
from pipebench.schedule.moves import Repartition
from pipebench.simulate.meter import RunMeasurements

OnLoss = Callable[[torch.Tensor, int, float, float], None]
OnUnit = Callable[[int, float, float], None]


class Engine(ABC):
    """Plays a run: trains or simulates it.

    Attributes:
        setup: what is run, under the cuts there are now.
        clock_s: the run's clock at the last drain.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.clock_s = 0.0
        self._phases: SegmentCuts | None = None  # of the segment that runs, or of the next one where it has moves
        self._decisions: list[Repartition] = []

    @abstractmethod
    def train(self, first_minibatch: int, num_minibatches: int) -> int:
        """Train on minibatches `first_minibatch` and after, then drain.

        Returns:
            How many were trained on: fewer than asked for if a stop was asked for, or to move layers.
        """

    @abstractmethod
    def switch_setup(self, setup: Setup) -> None:
        """Go on with another setup of the same model, at a drain: other cuts, or other cells left out; see `replan`."""

    def replan(self, plan: Plan) -> None:
        """Go on under a plan with other cuts or memory policies, at a drain; what moves takes the links' time.

        Raises:
            PlanError: stages, replicas, devices or depth are others.
        """
        self.switch_setup(self.setup.under(plan))

    def announce(self, move: Repartition) -> None:
        """Let layers move in the next segment, or in the one that runs now, while it goes on.

        In processes all workers announce the same, before any has come to that place.

        Raises:
            PlanError: layers can't move so, or not from that minibatch on.
        """
        self._phases = self._phases or SegmentCuts(self.setup)
        self._phases.announce(move)

    def take_decisions(self) -> list[Repartition]:
        """Return what was decided to balance the stages since this was last asked, numbered since the drain before."""
        taken, self._decisions = self._decisions, []
        return taken

    def _begin_segment(self) -> SegmentCuts | None:
        """Return the cuts that the segment goes through that begins now, where layers may move meanwhile."""
        self._phases = self._phases or phases_of(self.setup)
        return self._phases

    def _end_segment(self) -> None:
        """Go on under the last cuts of the segment that has ended."""
        phases, self._phases = self._phases, None
        if phases is not None:
            self.setup = phases.last

    def _decided(self, move: Repartition) -> None:
        """A stage hears of a decision, those of one process one after the other: the first of them tells all."""
        if move in self._decisions:
            return
        self._decisions.append(move)
        if self.setup.live:
            self.announce(move)
        else:
            self._end_at(move.at)

    @abstractmethod
    def _end_at(self, minibatch: int) -> None:
        """Let the segment that runs end before a minibatch that nobody has begun."""


class WorkersMeter(Protocol):
    """Adds up what the workers of this process do, training and evaluation apart."""

    evaluating: bool

    @property
    def busy_s(self) -> float:
        """Seconds of forward, backward and update in training, over these workers."""


class TrainingEngine(Engine):
    """Trains all workers, in one process, or one of several. It also tells the time, virtual or of the wall.

    What is asked of it here has the answer of a single process; it leaves the pipeline drained.

    Args:
        setup: what to run.
        on_loss: told of every unit's summed loss (a scalar on the engine's device, not divided by its weight), number
            of samples, weight and the time; it may raise to end the run.
        on_unit: told of every unit that is done with: its samples, the latest mean loss that is known (NaN if none: a
            GPU isn't waited for), the time.

    Attributes:
        workers: those of this process.
        meter: adds up what they do.
        num_bytes: payload that this process's workers have sent, by kind and level.
    """

    workers: list[Worker]
    meter: WorkersMeter

    def __init__(self, setup: Setup, on_loss: OnLoss, on_unit: OnUnit) -> None:
        super().__init__(setup)
        self.num_bytes: Counter[tuple[str, str]] = Counter()
        self._on_loss = on_loss
        self._on_unit = on_unit
        self._not_training_s = 0.0

    @property
    @abstractmethod
    def now_s(self) -> float:
        """The time, also between two drains."""

    @property
    @abstractmethod
    def stop_reason(self) -> str | None:
        """Why the run ends early, as far as this process knows."""

    @property
    @abstractmethod
    def _extensions(self) -> Mapping[str, EngineExtension]:
        """What the extensions that are on add to this process."""

    @abstractmethod
    def start_clock(self, clock_s: float = 0.0) -> None:
        """Let the run's clock start, or go on from `clock_s`; at the same moment on all workers."""

    @abstractmethod
    def measured(self, training_s: float) -> RunMeasurements:
        """Return what all workers measured; all processes call it."""

    @abstractmethod
    def _cut_stages(self, setup: Setup) -> None:
        """Cut this process's stages anew, with their initial weights and nothing in flight."""

    @abstractmethod
    def _run_evaluation(self, feed: Feed) -> None:
        """Run the minibatches of an evaluation forward."""

    @abstractmethod
    def _meter_facts(self) -> dict[str, Any]:
        """Return what the meter has added up, in a form that JSON holds."""

    @abstractmethod
    def _recall_meter(self, facts: Mapping[str, Any]) -> None:
        """Let the meter go on from there."""

    @property
    def busy_fraction(self) -> float:
        """Share of the workers' time in training that they spent computing."""
        elapsed_s = (self.now_s - self._not_training_s) * len(self.workers)
        return min(1.0, self.meter.busy_s / elapsed_s) if elapsed_s > 0 else 0.0

    @property
    def position(self) -> int:
        """This process's place in what `exchange` returns."""
        return 0

    @property
    def is_first(self) -> bool:
        """Whether this process keeps the run's records."""
        return True

    def exchange(self, value: Any) -> list[Any]:
        """Return what every process gives, in the order of workers; JSON."""
        return [value]

    def set_activity(self, work: str) -> None:
        """Name what this process does now, for those who wait for it."""

    def sync_clock(self) -> None:
        """Let `clock_s` be the time now: what came since the drain belongs to neither training nor evaluation."""

    def evaluate(self) -> dict[str, float]:
        """Evaluate the newest weights on every held-out sample; return `eval_loss` and every metric of the dataset.

        The workers run forward in a pipeline, and all processes return the same.
        """
        setup, before_s, scores = self.setup, self.clock_s, Scores(self.setup.dataset)
        feed = Feed(setup, "eval", 0, setup.held_out.minibatches_per_epoch)
        for worker in self.workers:
            worker.begin_evaluation(feed, scores)
        self.meter.evaluating = True
        try:
            self._run_evaluation(feed)
        finally:
            feed.close()
        for worker in self.workers:
            worker.end_evaluation()
        scores.merge(self.exchange(scores.sums))
        metrics = scores.metrics()
        if setup.loss_scale is not None:
            scales = [scale for worker in self.workers for scale in worker.loss_scales]
            metrics |= scale_metrics(scale for own in self.exchange(scales) for scale in own)
        if setup.dataset.generates_with is not None:
            metrics |= self._whole_model_metrics()
        self.sync_clock()
        self.meter.evaluating = False
        self._not_training_s += self.clock_s - before_s
        return metrics

    @cached_property
    def _whole(self) -> WholeModel:
        return WholeModel(self.setup)

    def _whole_model_metrics(self) -> dict[str, float]:
        """Return what only the whole model can give."""
        return self.setup.dataset.whole_model_metrics(self._whole.filled(worker.tensors() for worker in self.workers))

    def parts(self) -> list[tuple[str, ModelState]]:
        """Return what this process contributes to a checkpoint, by name."""
        return [part for worker in self.workers for part in worker.parts()]

    def restore(
        self, state: ModelState, facts: Mapping[str, Any] | None, clock_s: float, plan: Plan | None = None
    ) -> None:
        """Go on from a checkpoint.

        Args:
            state: of the whole model.
            facts: what `facts` returned in this process when it was taken; None if engine or plan was another.
            clock_s: the run's clock then.
            plan: to go on under; None for the one there is.
        """
        if plan is not None:
            self._cut_stages(self.setup.under(plan))
        for worker in self.workers:
            worker.restore(state)
        if facts is None:
            return
        self.num_bytes.clear()
        self.num_bytes.update({(kind, level): count for kind, level, count in facts["num_bytes"]})
        columns = (facts["peak_bytes"], facts["weight_versions_max"], host_peaks(facts))
        for worker, *counted in zip(self.workers, *columns, strict=True):
            worker.recall(*counted)
        self._recall_meter(facts)
        restore_extensions(self._extensions, facts)

    def facts(self) -> dict[str, Any]:
        """Return what was counted here so far, in a form that JSON holds; lists are by worker of this process."""
        return {
            "num_bytes": [[kind, level, count] for (kind, level), count in self.num_bytes.items()],
            "peak_bytes": [worker.peak_bytes for worker in self.workers],
            "weight_versions_max": [worker.versions_max for worker in self.workers],
            "host_peak_bytes": [worker.host_peak_bytes for worker in self.workers],
            **self._meter_facts(),
            **facts_of(self._extensions),
        }
