"""The interface of engines: a run goes from drain to drain, and may continue with another setup at a drain.

Engines that train also evaluate, count, and resume from checkpoints.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Final, Protocol

import torch

from pipebench.checkpoint.state import ModelState
from pipebench.engine.admission import EvaluationStoppedError
from pipebench.engine.feed import Feed
from pipebench.engine.loss_scale import scale_metrics
from pipebench.engine.protocols import Collectives, EngineExtension, SegmentExtension
from pipebench.engine.scores import Scores, WholeModel
from pipebench.engine.setup import Setup
from pipebench.engine.whole_set import WholeSet
from pipebench.engine.worker import Worker
from pipebench.model.loading import Loaders
from pipebench.model.plan import Plan
from pipebench.schedule.instructions import Instruction
from pipebench.schedule.operations import Op
from pipebench.simulate.meter import RunMeasurements

OnLoss = Callable[[torch.Tensor, int, float, float], None]  # summed loss, samples, weight, clock in seconds
OnUnit = Callable[[int, float, float], None]  # samples, mean loss, clock in seconds
Gather = Callable[[Any], list[Any]]  # a process's value to those of all processes
CUDA_LOSS_EVERY: Final = 50  # units between reads of the loss, each of which waits for the GPU


class Engine(ABC):
    """Executes a run: trains or simulates it."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup  # under the current cuts
        self.clock_s = 0.0  # the run's clock at the last drain

    @property
    @abstractmethod
    def extensions(self) -> Mapping[str, EngineExtension]:
        """The enabled extensions' parts in this process."""

    @abstractmethod
    def train(self, first_minibatch: int, num_minibatches: int) -> int:
        """Train a segment: minibatches from `first_minibatch` of the run on, then drain.

        Returns:
            The number of minibatches trained: fewer than requested if a stop or an extension ends the segment.
        """

    @abstractmethod
    def switch_setup(self, setup: Setup) -> None:
        """Continue at a drain with another setup of the same model: other cuts, or other cells of a search."""

    def replan(self, plan: Plan) -> None:
        """Continue at a drain under a plan with other cuts or memory policies; transfers of layers take link time.

        Raises:
            PlanError: stages, replicas, devices or depth differ.
        """
        self.switch_setup(self.setup.under(plan))

    def _begin_segment(self) -> dict[str, SegmentExtension]:
        """Return extensions' parts in the segment that begins now, by name."""
        found = {name: extension.segment() for name, extension in self.extensions.items()}
        return {name: part for name, part in found.items() if part is not None}

    def _end_segment(self) -> None:
        """Let extensions end a segment; each may return another setup to continue with."""
        for extension in self.extensions.values():
            self.setup = extension.ended(self.setup)


class WorkersMeter(Protocol):
    """Measures the workers of this process, training and evaluation apart."""

    evaluating: bool  # whether an evaluation runs

    @property
    def busy_s(self) -> float:
        """Seconds of forward, backward and update in training, summed over these workers."""


class TrainingEngine(Engine):
    """Trains all workers, in one process or as one of several processes, on a virtual or wall clock.

    Methods that aren't abstract are those of an engine in one process. Training and evaluation leave the pipeline
    drained.

    Args:
        setup: what to run.
        on_loss: called with every unit's loss (summed over its samples, a scalar on the engine's device), its number of
            samples, its weight in a mean loss, and the clock; may raise to end the run.
        on_unit: called with every finished unit's number of samples, the latest mean loss that is known without waiting
            for a GPU (NaN if none is), and the clock.
    """

    workers: list[Worker]  # of this process
    collectives: Collectives
    meter: WorkersMeter

    def __init__(self, setup: Setup, on_loss: OnLoss, on_unit: OnUnit) -> None:
        super().__init__(setup)
        # Payload sent by this process's workers, by kind and level
        self.num_bytes: Counter[tuple[str, str]] = Counter()
        self._on_loss = on_loss
        self._on_unit = on_unit
        self._not_training_s = 0.0  # in evaluations
        self.loaders = Loaders(setup.dataset, setup.device)  # closed by the training loop

    @property
    @abstractmethod
    def now_s(self) -> float:
        """The clock, also between drains."""

    @property
    @abstractmethod
    def stop_reason(self) -> str | None:
        """Why the run ends early, as far as this process knows; None if it doesn't."""

    @abstractmethod
    def start_clock(self, clock_s: float = 0.0) -> None:
        """Start the run's clock at `clock_s`, at the same moment on all workers."""

    @abstractmethod
    def measured(self, training_s: float) -> RunMeasurements:
        """Return the measurements of all workers; all processes call it."""

    @abstractmethod
    def _cut_stages(self, setup: Setup) -> None:
        """Cut this process's stages, with initial weights and nothing in flight."""

    @abstractmethod
    def _run_evaluation(self, feed: Feed) -> bool:
        """Run the minibatches of an evaluation forward; return False after an agreed stop."""

    @abstractmethod
    def _meter_facts(self) -> dict[str, Any]:
        """Return the meter's sums as JSON values."""

    @abstractmethod
    def _recall_meter(self, facts: Mapping[str, Any]) -> None:
        """Restore the meter's sums."""

    @property
    def extensions(self) -> Mapping[str, EngineExtension]:
        """See `Engine`."""
        return self.collectives.extensions

    @property
    def busy_fraction(self) -> float:
        """Share of the workers' training time that they compute."""
        elapsed_s = (self.now_s - self._not_training_s) * len(self.workers)
        return min(1.0, self.meter.busy_s / elapsed_s) if elapsed_s > 0 else 0.0

    @property
    def position(self) -> int:
        """This process's index in what `exchange` returns."""
        return 0

    @property
    def is_first(self) -> bool:
        """Whether this process writes the run's records."""
        return True

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all processes (JSON), in the order of workers; all processes call it."""
        return [value]

    def gathering(self) -> Gather:
        """Return a function that gathers values for a thread beside training.

        All processes call it with their value. It returns all values in the first process, and none in the others.
        """
        return lambda value: [value]

    def set_activity(self, work: str) -> None:
        """Name this process's current work, for processes that wait for it."""

    def sync_clock(self) -> None:
        """Set `clock_s` to now: time since the drain counts neither as training nor as evaluation.

        On a virtual clock no time has passed.
        """

    def evaluate(self) -> dict[str, float]:
        """Evaluate the newest weights on every held-out sample; return `eval_loss` and the dataset's metrics.

        Workers run forward in a pipeline. All processes return the same.

        Raises:
            EvaluationStoppedError: the workers have agreed to stop before its end.
        """
        setup, before_s, scores = self.setup, self.clock_s, Scores(self.setup.dataset)
        bytes_before = self.num_bytes.copy()
        feed = Feed(setup, "eval", 0, setup.held_out.minibatches_per_epoch, self.loaders)
        for worker in self.workers:
            worker.begin_evaluation(feed, scores)
        self.meter.evaluating = True
        try:
            is_complete = self._run_evaluation(feed)
        finally:
            feed.close()
        for worker in self.workers:
            worker.end_evaluation()
        metrics = self._metrics(scores) if is_complete else None
        self.sync_clock()
        self.meter.evaluating = False
        self._not_training_s += self.clock_s - before_s
        if metrics is None:  # the run that goes on repeats the evaluation
            self.num_bytes.clear()
            self.num_bytes.update(bytes_before)
            raise EvaluationStoppedError
        return metrics

    def _metrics(self, scores: Scores) -> dict[str, float]:
        """Return the metrics of a whole evaluation; all processes call it."""
        setup = self.setup
        self._complete(scores.whole_set)
        metrics = scores.metrics(self.exchange(scores.share()))
        if setup.loss_scale is not None:
            scales = [scale for worker in self.workers for scale in worker.loss_scales]
            metrics |= scale_metrics(scale for own in self.exchange(scales) for scale in own)
        if setup.dataset.generates_with is not None:
            self.gather_or_free(Op.GATHER, Op.WAIT_GATHER)
            metrics |= self._whole_model_metrics()
            self.gather_or_free(Op.FREE)
        return metrics

    def gather_or_free(self, *ops: Op) -> None:
        """Execute GATHER and WAIT_GATHER, or FREE, for all stages, if replicas keep shards of the weights only."""
        pipeline = self.setup.pipeline
        for op in ops if pipeline.gathers else ():
            for stage in range(pipeline.num_stages):
                for worker in self.workers:
                    worker.gather_or_free(Instruction(op, stage, 0), self.collectives)

    def _complete(self, whole_set: WholeSet) -> None:
        """Hand over what waits in other processes to the one that evaluates the first minibatch."""

    @cached_property
    def _whole(self) -> WholeModel:
        return WholeModel(self.setup)

    def _whole_model_metrics(self) -> dict[str, float]:
        return self._whole.metrics(worker.tensors() for worker in self.workers)

    def parts(self) -> list[tuple[str, ModelState]]:
        """Return this process's parts of a checkpoint, by name."""
        return [part for worker in self.workers for part in worker.parts()]

    def restore(
        self, state: ModelState, facts: Mapping[str, Any] | None, clock_s: float, plan: Plan | None = None
    ) -> None:
        """Resume from a checkpoint.

        Args:
            state: of the whole model.
            facts: what `facts` returned in this process at the checkpoint; None if engine or plan differed.
            clock_s: the run's clock.
            plan: to resume under; None: the present one.
        """
        if plan is not None:
            before = self.workers
            self._cut_stages(self.setup.under(plan))
            for worker in before:
                worker.close()
        for worker in self.workers:
            worker.restore(state)
        if facts is None:
            return
        self.num_bytes.clear()
        self.num_bytes.update({(kind, level): count for kind, level, count in facts["num_bytes"]})
        columns = (facts["peak_bytes"], facts["weight_versions_max"], facts["host_peak_bytes"])
        for worker, *counted in zip(self.workers, *columns, strict=True):
            worker.recall(*counted)
        self._recall_meter(facts)
        for name, extension in self.extensions.items():
            extension.restore(facts["extensions"].get(name, []))

    def facts(self) -> dict[str, Any]:
        """Return this process's counters as JSON values; lists are by worker of this process."""
        return {
            "num_bytes": [[kind, level, count] for (kind, level), count in self.num_bytes.items()],
            "peak_bytes": [worker.peaks.device_bytes for worker in self.workers],
            "weight_versions_max": [worker.versions_max for worker in self.workers],
            "host_peak_bytes": [worker.peaks.host_bytes for worker in self.workers],
            **self._meter_facts(),
            "extensions": {name: extension.facts() for name, extension in self.extensions.items()},
        }
