"""The virtual engine: N logical workers and their real arithmetic, in one process on one device, on a virtual clock.

It executes the simulator's events in the order of their times. Weight versions, stale gradients and replicas are
exactly those of N processes; only time is simulated. A message is stored from its SEND to its RECEIVE, which the
simulator places after its arrival. At a drain the pipeline is empty: workers then average running statistics over
replicas, and hand over layers that move.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipebench.checkpoint.handover import keys_of, pieces, requests_of, retained, state_bytes
from pipebench.checkpoint.state import ModelState
from pipebench.engine.admission import StoppableAdmission, StopRequest, evaluation_program
from pipebench.engine.collectives import InProcessCollectives
from pipebench.engine.engine import CUDA_LOSS_EVERY, OnLoss, OnUnit, TrainingEngine
from pipebench.engine.feed import Feed
from pipebench.engine.replica import Replica
from pipebench.engine.segment import Segment
from pipebench.engine.setup import Setup
from pipebench.engine.worker import Worker
from pipebench.model.values import bytes_in
from pipebench.schedule.operations import MIGRATION
from pipebench.schedule.programs import forward_programs
from pipebench.simulate.meter import Meter, RunMeasurements, fractions, pcie_fractions
from pipebench.simulate.network import Message, Network
from pipebench.simulate.simulation import Simulation, TimelineEvent
from pipebench.simulate.statistics import average_statistics, stages_that_average
from pipebench.simulate.timeline import EVALUATION, PCIE

_LOG = logging.getLogger("pipebench.engine")


class InProcessTransport:
    """Messages between the workers of this process; their bytes are added to `num_bytes`, by kind and level."""

    def __init__(self, setup: Setup, num_bytes: Counter[tuple[str, str]]) -> None:
        self._setup = setup
        self._num_bytes = num_bytes
        self._sent: dict[tuple[str, int, int, int], Any] = {}  # by kind, unit, sending and receiving stage

    def send(self, kind: str, unit: int, source: int, target: int, values: Any) -> None:
        """Store a unit's values until they are received."""
        pipeline = self._setup.pipeline
        level = self._setup.level_between(pipeline.worker(source, unit), pipeline.worker(target, unit)).name
        self._num_bytes[kind, level] += sum(map(bytes_in, values.values()))
        self._sent[kind, unit, source, target] = values

    def receive(self, kind: str, unit: int, source: int, target: int) -> Any:
        """Return the values sent; the virtual clock guarantees that they have arrived."""
        return self._sent.pop((kind, unit, source, target))

    def copied(self, kind: str, num_bytes: int) -> None:
        """Count bytes copied between a device and its host."""
        self._num_bytes[kind, PCIE] += num_bytes


class VirtualEngine(TrainingEngine):
    """Trains on a virtual clock; training and evaluation leave the pipeline drained.

    Where layers are divided into tensor slices, a worker computes the slices of all its devices, and whole values
    travel. The bytes sent are then the network's times the devices, and the memory of one device is predicted.

    Args:
        setup: what to run.
        network: the links in time.
        observe: called with every event after its execution.
        on_loss: see `TrainingEngine`.
        on_unit: see `TrainingEngine`.
        meter: records events, too; None: one of its own.
        stop: a request to end the run early, which a signal handler may set.
        predicted_peaks: with slices, the peak bytes of one device of every worker, and those on its host.
    """

    collectives: InProcessCollectives
    meter: Meter
    now_s = 0.0  # end of the last executed event

    def __init__(
        self,
        setup: Setup,
        network: Network,
        observe: Callable[[TimelineEvent], None] = lambda event: None,
        on_loss: OnLoss = lambda loss, samples, weight, clock_s: None,
        on_unit: OnUnit = lambda samples, loss, clock_s: None,
        meter: Meter | None = None,
        stop: StopRequest | None = None,
        predicted_peaks: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> None:
        super().__init__(setup, on_loss, on_unit)
        self.network = network
        self._predicted_peaks = predicted_peaks
        self._counted: Counter[tuple[str, str]] = Counter()  # the network's bytes at the last `_count_slices`
        self._observe = observe
        self.meter = meter or Meter(setup.pipeline)
        self._stop = stop or StopRequest()
        self._num_losses, self._latest_loss = 0, math.nan
        self._cut_stages(setup)

    def _cut_stages(self, setup: Setup) -> None:
        self.setup = setup
        self.workers = [Worker(setup, index) for index in range(setup.pipeline.num_workers)]
        num_bytes = self.num_bytes if setup.costs.slices == 1 else Counter[tuple[str, str]]()  # see `_count_slices`
        self._transport = InProcessTransport(setup, num_bytes)
        self.collectives = InProcessCollectives(setup, self.workers, num_bytes)

    @property
    def replicas(self) -> list[Replica]:
        """Every worker's replicas of its stages."""
        return [replica for worker in self.workers for replica in worker.replicas.values()]

    @property
    def peak_bytes(self) -> list[int]:
        """Every worker's peak bytes."""
        return [worker.peaks.device_bytes for worker in self.workers]

    @property
    def stop_reason(self) -> str | None:
        """Why the run ends early; None if it doesn't."""
        return self._stop.reason

    def start_clock(self, clock_s: float = 0.0) -> None:
        """Continue the run's clock from `clock_s`."""
        self.clock_s = self.now_s = self.meter.origin_s = clock_s

    def switch_setup(self, setup: Setup) -> None:
        """See `Engine`."""
        before = self.workers
        self._cut_stages(setup)
        self.clock_s = self._hand_over(before)
        for worker in before:
            worker.close()

    def facts(self) -> dict[str, Any]:
        """See `TrainingEngine`; with slices, memory is the prediction for one device of every worker."""
        self._count_slices(0)  # layers that moved since the last segment
        found = super().facts()
        if self._predicted_peaks is not None:
            found["peak_bytes"], found["host_peak_bytes"] = map(list, self._predicted_peaks)
        return found

    def _count_slices(self, samples: int) -> None:
        """With slices, count the bytes that all devices have sent since the last count, training on these samples."""
        costs, inside = self.setup.costs, self.setup.cluster.levels[0].name
        if costs.slices > 1:
            now = Counter(self.network.num_bytes)
            self.num_bytes.update(costs.of_all_devices(now - self._counted, samples, inside))
            self._counted = now

    def _meter_facts(self) -> dict[str, Any]:
        meter = self.meter
        return {
            "busy_s": meter.busy_s,
            "stall_s": meter.stall_s,
            "again_s": meter.again_s,
            "swap_stall_s": meter.swap_stall_s,
            "evaluation_s": self._not_training_s,
        }

    def _recall_meter(self, facts: Mapping[str, Any]) -> None:
        self.meter.busy_s, self.meter.stall_s = facts["busy_s"], facts["stall_s"]
        self.meter.again_s, self.meter.swap_stall_s = facts["again_s"], facts["swap_stall_s"]
        self._not_training_s = facts["evaluation_s"]

    def measured(self, training_s: float) -> RunMeasurements:
        """Return the measurements on the virtual clock."""
        meter = self.meter
        num_workers, swaps = len(self.workers), bool(self.setup.pipeline.swaps)
        bytes_per_slice = {key: count // self.setup.costs.slices for key, count in self.num_bytes.items()}
        metrics = fractions(
            meter.busy_s, meter.stall_s, num_workers, training_s,
            again_s=meter.again_s, swap_stall_s=meter.swap_stall_s if swaps else None,
        ) | pcie_fractions(self.setup.cluster, bytes_per_slice, num_workers, training_s)  # fmt: skip
        return RunMeasurements(metrics, (), meter.timeline(), meter.busy_s, meter.stall_s, Counter(self.num_bytes))

    def train(self, first_minibatch: int, num_minibatches: int) -> int:
        """See `Engine`."""
        setup, by_extension = self.setup, self._begin_segment()
        feed = Feed(setup, "train", first_minibatch, num_minibatches, self.loaders)
        for worker in self.workers:
            worker.begin_training(feed, first_minibatch, num_minibatches, by_extension)
        segment = Segment(setup, by_extension, first_minibatch, num_minibatches, self._stop, self._end_early)
        self.collectives.begin(segment.part)
        try:
            self._play(segment.simulation(self.network, feed.size, self.clock_s, self.meter))
        finally:
            feed.close()
        for worker in self.workers:
            worker.end_training()
        self._end_segment()
        if segment.limit > 0:
            self.clock_s = self._average()
        before = setup.sampler.samples_before
        self._count_slices(before(first_minibatch + segment.limit) - before(first_minibatch))
        return segment.limit

    def _end_early(self, num_minibatches: int) -> None:
        for worker in self.workers:
            worker.end_early(num_minibatches)

    def _run_evaluation(self, feed: Feed) -> bool:
        """See `Engine`; bytes of an evaluation are of the kind `evaluation`. If it stops, it takes no time."""
        bytes_before, start_s = Counter(self.network.num_bytes), self.clock_s
        evaluation = self.setup.evaluation
        pipeline, costs = evaluation.pipeline, evaluation.costs(self.setup.costs)
        num_minibatches = self.setup.held_out.minibatches_per_epoch
        admission = StoppableAdmission(self._stop, pipeline, num_minibatches, 1, lambda limit: None)
        lists = [
            evaluation_program(pipeline, program, num_minibatches, admission)
            for program in forward_programs(pipeline, num_minibatches)
        ]
        self._play(Simulation(pipeline, lists, costs, self.network, feed.size, self.clock_s, evaluates=True))
        if admission.limit < num_minibatches:
            self.network.num_bytes, self.clock_s = bytes_before, start_s
            return False
        self.network.num_bytes = _as_evaluation(bytes_before, self.network.num_bytes)
        self._count_slices(0)
        return True

    def _play(self, simulation: Simulation) -> None:
        """Execute a simulation's events, in order."""
        verbose = _LOG.isEnabledFor(logging.DEBUG)
        for event in simulation:
            self.now_s = event.end_s
            if verbose:
                duration_s = event.end_s - event.start_s
                _LOG.debug("t=%.9f s worker %d %s (%.3g s)", event.start_s, event.worker, event.instruction, duration_s)
            self._execute(event)
            self._observe(event)
            self.meter.event(event)
        self.clock_s = simulation.end_s

    def _execute(self, event: TimelineEvent) -> None:
        worker = self.workers[event.worker]
        worker.busy_until_s = event.end_s
        worker.took(event.instruction, event.end_s - event.start_s)
        loss = worker.execute(event.instruction, self._transport, self.collectives)
        if loss is not None:
            self._on_loss(*loss, self.now_s)
            if not loss.total.is_cuda or self._num_losses % CUDA_LOSS_EVERY == 0:
                self._latest_loss = loss.mean
            self._num_losses += 1
            self._on_unit(loss.samples, self._latest_loss, self.now_s)

    # Exchanges at a drain: they begin when the pipeline is empty, and end when all messages have arrived.

    def _average(self) -> float:
        """Average running statistics over the replicas of every stage; return the end time.

        Extensions' exchanges start at the same time.
        """
        pipeline, costs, collectives = self.setup.pipeline, self.setup.costs, self.collectives
        for stage in stages_that_average(pipeline, costs):
            ring = collectives.of_stage(stage)
            for buffers in zip(*(self.workers[worker].buffers(stage) for worker in ring), strict=True):
                flats = [buffer.reshape(-1) for buffer in buffers]
                mean = collectives.sum_buffers(ring, flats) / len(ring)
                for buffer in buffers:
                    buffer.copy_(mean.view(buffer.shape))
        ends_s = [self.clock_s]
        average_statistics(pipeline, costs, self.network, self.clock_s, ends_s.append)
        extensions = collectives.extensions.values()
        messages = [self._send(*sent) for extension in extensions for sent in extension.drained()]
        ends_s.append(_delivered(messages, self.network, self.clock_s))  # which also ends the averages
        return max(ends_s)

    def _hand_over(self, before: Sequence[Worker]) -> float:
        """Transfer state from the workers `before` to the present ones, of other cuts; return the end time."""
        offered = [ModelState.merge(part for _, part in worker.parts()) for worker in before]
        offered_keys = [keys_of(state) for state in offered]
        messages = []
        for worker, old in zip(self.workers, before, strict=True):
            claim = worker.claim()
            state = retained(old.held(), claim)
            for giver, keys in requests_of(worker.index, offered_keys, keys_of(state), claim).items():
                moved = pieces(offered[giver], keys)
                messages.append(self._send(MIGRATION, giver, worker.index, state_bytes(moved), "layers"))
                state = ModelState.merge([state, moved])
            worker.restore(state)
            worker.follow(old)
        return _delivered(messages, self.network, self.clock_s)

    def _send(self, kind: str, sender: int, receiver: int, num_bytes: int, label: str) -> Message:
        self.collectives.count(kind, sender, receiver, num_bytes)
        connection = self.network.connection(kind, sender, receiver)
        return self.network.send(connection, num_bytes, self.clock_s, label)


def _delivered(messages: Sequence[Message], network: Network, since_s: float) -> float:
    """Complete transfers before anything else runs; return the end time, at least `since_s`."""
    network.deliver(messages)
    return max([since_s, *(message.arrival_s for message in messages)])


def _as_evaluation(before: Counter[tuple[str, str]], after: Counter[tuple[str, str]]) -> Counter[tuple[str, str]]:
    """Return the bytes sent `after` an evaluation, those since `before` under the kind `evaluation`."""
    counted = Counter(before)
    for (_, level), num_bytes in (after - before).items():
        counted[EVALUATION, level] += num_bytes
    return counted
