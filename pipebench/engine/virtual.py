"""The virtual engine: N logical workers, real arithmetic, one process, one device, a virtual clock.

It plays the simulator's events in order and executes each. Weight versions, stale gradients and replicas are exactly
those of N processes; only time is the simulator's.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from pipebench.checkpoint.state import ModelState
from pipebench.engine.admission import StoppableAdmission, StopRequest, admitted_program
from pipebench.engine.collectives import InProcessCollectives
from pipebench.engine.drain import DrainExchange
from pipebench.engine.facts import facts_of, restore_extensions
from pipebench.engine.feed import Feed, training_feed
from pipebench.engine.loss_scale import scale_metrics
from pipebench.engine.mailbox import InProcessTransport
from pipebench.engine.migration_costs import PhaseCosts
from pipebench.engine.monitor import monitors
from pipebench.engine.movable import Movable
from pipebench.engine.replica import Replica
from pipebench.engine.scores import Scores
from pipebench.engine.segment_cuts import phases_of
from pipebench.engine.setup import Setup
from pipebench.engine.whole import WholeModel
from pipebench.engine.worker import Worker, host_peaks
from pipebench.model.plan import Plan
from pipebench.model.sampling import Size
from pipebench.schedule.instructions import Instruction
from pipebench.schedule.pipeline import Pipeline
from pipebench.schedule.programs import forward_programs
from pipebench.simulate.costs import Costs
from pipebench.simulate.meter import Meter, RunMeasurements, fractions, pcie_fractions, recomputing
from pipebench.simulate.network import Network
from pipebench.simulate.simulation import RunPart, Simulation, TimelineEvent
from pipebench.simulate.timeline import EVALUATION

_LOG = logging.getLogger("pipebench.engine")

OnLoss = Callable[[torch.Tensor, int, float, float], None]
OnUnit = Callable[[int, float, float], None]


class VirtualEngine(Movable):
    """Trains on a virtual clock. `train` and `evaluate` leave the pipeline drained.

    Args:
        setup: what to run.
        network: the links, which also count the bytes the shapes predict.
        observe: told of every event, after it was executed.
        on_loss: told of every unit's summed loss (a scalar on the engine's device, not divided by its weight), number
            of samples, weight and the time; it may raise to end the run.
        on_unit: told of every unit whose loss is known: its samples, its mean loss (NaN where reading it would keep a
            GPU waiting), the time.
        meter: takes note of every event, too.
        stop: asks for an early end.
    """

    def __init__(
        self,
        setup: Setup,
        network: Network,
        observe: Callable[[TimelineEvent], None] = lambda event: None,
        on_loss: OnLoss = lambda loss, samples, weight, clock_s: None,
        on_unit: OnUnit = lambda samples, loss, clock_s: None,
        meter: Meter | None = None,
        stop: StopRequest | None = None,
    ) -> None:
        super().__init__()
        self.network = network
        self.clock_s = 0.0  # at the last drain
        self.now_s = 0.0
        self.num_bytes: Counter[tuple[str, str]] = Counter()
        self._evaluation_s = 0.0
        self._observe = observe
        self._on_loss = on_loss
        self._on_unit = on_unit
        self._meter = meter or Meter(setup.pipeline)
        self._stop = stop or StopRequest()
        self._cut_stages(setup)

    def _cut_stages(self, setup: Setup) -> None:
        """Cut the stages of a setup, with their initial weights and nothing in flight."""
        self.setup = setup
        self._phases = None
        self.workers = [Worker(setup, index) for index in range(setup.pipeline.num_workers)]
        if setup.balances:
            for worker, monitor in zip(self.workers, monitors(setup, self._decided), strict=True):
                worker.monitor = monitor
        self._mailbox = InProcessTransport(setup, self.num_bytes)
        self._rings = InProcessCollectives(setup, self.workers, self.num_bytes)

    @property
    def replicas(self) -> list[Replica]:
        """Every worker's replica of every stage it has."""
        return [replica for worker in self.workers for replica in worker.replicas.values()]

    @property
    def peak_bytes(self) -> list[int]:
        """The most bytes that every worker has held."""
        return [worker.peak_bytes for worker in self.workers]

    @property
    def busy_fraction(self) -> float:
        """Share of the workers' time in training that they spent computing."""
        elapsed_s = (self.now_s - self._evaluation_s) * len(self.workers)
        return min(1.0, self._meter.busy_s / elapsed_s) if elapsed_s > 0 else 0.0

    @property
    def stop_reason(self) -> str | None:
        """Why the run ends early, if it does."""
        return self._stop.reason

    @property
    def position(self) -> int:
        """The one process there is."""
        return 0

    @property
    def is_first(self) -> bool:
        """The one process there is keeps the run's records."""
        return True

    def exchange(self, value: Any) -> list[Any]:
        """Return what every process gives: this one's."""
        return [value]

    def start_clock(self, clock_s: float = 0.0) -> None:
        """Let the run's clock go on from `clock_s`."""
        self.clock_s = self.now_s = self._meter.origin_s = clock_s

    def set_activity(self, work: str) -> None:
        """Nobody else waits."""

    def sync_clock(self) -> None:
        """On this clock nothing happens between two segments."""

    def parts(self) -> list[tuple[str, ModelState]]:
        """Return every worker's part of a checkpoint, by name."""
        return [part for worker in self.workers for part in worker.parts()]

    def replan(self, plan: Plan) -> None:
        """Go on under a plan with other cuts or memory policies, at a drain; what moves takes the links' time.

        Raises:
            PlanError: stages, replicas, devices or depth are others.
        """
        self.switch_setup(self.setup.under(plan))

    def switch_setup(self, setup: Setup) -> None:
        """Go on with another setup of the same model, at a drain: other cuts, or other cells left out; see `replan`."""
        before = self.workers
        self._cut_stages(setup)
        self.clock_s = self._drain.hand_over(before)

    def restore(
        self, state: ModelState, facts: Mapping[str, Any] | None, clock_s: float, plan: Plan | None = None
    ) -> None:
        """Go on from a checkpoint.

        Args:
            state: of the whole model.
            facts: what `facts` returned when it was taken; None if engine or plan was another.
            clock_s: the run's clock then.
            plan: to go on under; None for the one there is.
        """
        if plan is not None:
            self._cut_stages(self.setup.under(plan))
        for worker in self.workers:
            worker.restore(state)
        if facts is not None:
            self.num_bytes.clear()
            self.num_bytes.update({(kind, level): count for kind, level, count in facts["num_bytes"]})
            columns = (facts["peak_bytes"], facts["weight_versions_max"], host_peaks(facts))
            for worker, *counted in zip(self.workers, *columns, strict=True):
                worker.recall(*counted)
            self._meter.busy_s, self._meter.stall_s = facts["busy_s"], facts["stall_s"]
            self._meter.again_s, self._meter.swap_stall_s = facts.get("again_s", 0.0), facts.get("swap_stall_s", 0.0)
            self._evaluation_s = facts["evaluation_s"]
            restore_extensions(self._rings.extensions, facts)

    def facts(self) -> dict[str, Any]:
        """Return what was counted so far, in a form that JSON holds; lists are by worker."""
        return {
            "num_bytes": [[kind, level, count] for (kind, level), count in self.num_bytes.items()],
            "peak_bytes": self.peak_bytes,
            "weight_versions_max": [worker.versions_max for worker in self.workers],
            "host_peak_bytes": [worker.host_peak_bytes for worker in self.workers],
            "busy_s": self._meter.busy_s,
            "stall_s": self._meter.stall_s,
            "again_s": self._meter.again_s,
            "swap_stall_s": self._meter.swap_stall_s,
            "evaluation_s": self._evaluation_s,
            **facts_of(self._rings.extensions),
        }

    def measured(self, training_s: float) -> RunMeasurements:
        """Return what the workers did, on the virtual clock."""
        meter = self._meter
        num_workers, swaps = len(self.workers), bool(self.setup.pipeline.swaps)
        metrics = fractions(
            meter.busy_s, meter.stall_s, num_workers, training_s,
            again_s=meter.again_s, swap_stall_s=meter.swap_stall_s if swaps else None,
        ) | pcie_fractions(self.setup.cluster, self.num_bytes, num_workers, training_s)  # fmt: skip
        return RunMeasurements(metrics, (), meter.timeline(), meter.busy_s, meter.stall_s, Counter(self.num_bytes))

    def train(self, first_minibatch: int, num_minibatches: int) -> int:
        """Train on minibatches `first_minibatch` and after, then drain.

        Returns:
            How many were trained on: fewer than asked for if a stop was asked for.
        """
        pipeline = self.setup.pipeline
        self._feed, divisors = training_feed(self.setup, first_minibatch, num_minibatches)
        phases = self._phases or phases_of(self.setup)
        self._phases = phases
        for worker in self.workers:
            worker.begin_training(self._feed, first_minibatch, num_minibatches, divisors, phases)
        self._admission = admission = StoppableAdmission(
            self._stop, pipeline, num_minibatches, self.setup.sampler.streams or 1, self._cut
        )
        routes = None if phases is None else phases.routes
        lists = [admitted_program(pipeline, w.index, num_minibatches, admission, routes) for w in self.workers]
        self._rings.begin(first_minibatch, lambda: admission.limit)
        size_of, moving = self._feed.size, None
        if phases is not None:
            moving = PhaseCosts(phases, size_of, lambda unit: pipeline.minibatch(unit)[0])
        self._meter.begin(size_of, moving.recomputing_s if moving else recomputing(self.setup.costs, size_of))
        part = RunPart(first_minibatch, lambda: admission.limit)
        self._play(pipeline, self.setup.costs, lists, part, moving)
        for worker in self.workers:
            worker.end_training()
        if phases is not None:
            self.setup = phases.last
        self._phases = None
        if admission.limit > 0:
            self.clock_s = self._drain.average()
        return admission.limit

    def _end_at(self, minibatch: int) -> None:
        """Let the segment end before a minibatch that nobody has begun."""
        self._admission.end_at(minibatch)

    def _cut(self, num_minibatches: int) -> None:
        """Let the segment end early."""
        for worker in self.workers:
            worker.end_early(num_minibatches)

    def evaluate(self) -> dict[str, float]:
        """Evaluate the newest weights on every held-out sample; return `eval_loss` and every metric of the dataset."""
        dataset, count = self.setup.dataset, self.setup.held_out.minibatches_per_epoch
        before_s, self._meter.evaluating = self.clock_s, True
        self._feed = Feed(self.setup, "eval", 0, count)
        scores = Scores(dataset)
        for worker in self.workers:
            worker.begin_evaluation(self._feed, scores)
        before = Counter(self.network.num_bytes)
        evaluation = self.setup.evaluation
        costs = evaluation.costs(self.setup.costs)
        self._play(evaluation.pipeline, costs, forward_programs(evaluation.pipeline, count))
        self.network.num_bytes = _as_evaluation(before, self.network.num_bytes)
        self._meter.evaluating = False
        self._evaluation_s += self.clock_s - before_s
        for worker in self.workers:
            worker.end_evaluation()
        metrics = scores.metrics() | scale_metrics(each for worker in self.workers for each in worker.loss_scales)
        if dataset.generates_with is not None:
            metrics |= dataset.whole_model_metrics(self._whole.filled(worker.tensors() for worker in self.workers))
        return metrics

    @cached_property
    def _whole(self) -> WholeModel:
        return WholeModel(self.setup)

    def _play(
        self,
        pipeline: Pipeline,
        costs: Costs,
        lists: Sequence[Iterator[Instruction]],
        part: RunPart | None = None,
        moving: PhaseCosts | None = None,
    ) -> None:
        size_of: Callable[[int], Size] = self._feed.size
        if moving is not None:
            costs, size_of = moving.costs, moving.size_of
        simulation = Simulation(pipeline, lists, costs, self.network, size_of, self.clock_s, part, moving)
        verbose = _LOG.isEnabledFor(logging.DEBUG)
        try:
            for event in simulation:
                self.now_s = event.end_s
                if verbose:
                    duration_s = event.end_s - event.start_s
                    _LOG.debug(
                        "t=%.9f s worker %d %s (%.3g s)", event.start_s, event.worker, event.instruction, duration_s
                    )
                self._execute(event)
                self._observe(event)
                self._meter.event(event)
        finally:
            self._feed.close()
        self.clock_s = simulation.end_s

    def _execute(self, event: TimelineEvent) -> None:
        worker = self.workers[event.worker]
        if worker.monitor is not None:
            worker.monitor.note(event.instruction, event.end_s - event.start_s)
        loss = worker.execute(event.instruction, self._mailbox, self._rings)
        if loss is not None:
            self._on_loss(*loss, self.now_s)
            mean = math.nan if loss.total.is_cuda else float(loss.total) / loss.weight
            self._on_unit(loss.samples, mean, self.now_s)

    @property
    def _drain(self) -> DrainExchange:
        return DrainExchange(self.setup, self.workers, self._rings, self.network, self.clock_s)


def _as_evaluation(before: Counter[tuple[str, str]], after: Counter[tuple[str, str]]) -> Counter[tuple[str, str]]:
    """Book what an evaluation sent under the kind `evaluation`."""
    booked = Counter(before)
    for (_, level), num_bytes in (after - before).items():
        booked[EVALUATION, level] += num_bytes
    return booked
