"""The virtual engine: N logical workers, real arithmetic, one process, one device, a virtual clock.

It executes the simulator's events in order. Weight versions, stale gradients and replicas are exactly those of N
processes; only time is simulated. What crosses between stages is stored until requested; at a drain, with an empty
pipeline, workers exchange averages and layers that move.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipebench.checkpoint.handover import keys_of, pieces, requests_of, retained, state_bytes
from pipebench.checkpoint.state import ModelState
from pipebench.engine.admission import StopRequest
from pipebench.engine.collectives import InProcessCollectives
from pipebench.engine.engine import CUDA_LOSS_EVERY, OnLoss, OnUnit, TrainingEngine
from pipebench.engine.feed import Feed, training_feed
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
    """Transfers values between stages and counts bytes; `num_bytes` counts them by kind and level."""

    def __init__(self, setup: Setup, num_bytes: Counter[tuple[str, str]]) -> None:
        self._setup = setup
        self._num_bytes = num_bytes
        self._mail: dict[tuple[str, int, int, int], Any] = {}

    def send(self, kind: str, unit: int, source: int, target: int, values: Any) -> None:
        """Store a unit's values until requested."""
        pipeline = self._setup.pipeline
        level = self._setup.level_between(pipeline.worker(source, unit), pipeline.worker(target, unit)).name
        self._num_bytes[kind, level] += sum(map(bytes_in, values.values()))
        self._mail[kind, unit, source, target] = values

    def receive(self, kind: str, unit: int, source: int, target: int) -> Any:
        """Return the sent values; the virtual clock guarantees that they have arrived."""
        return self._mail.pop((kind, unit, source, target))

    def copied(self, kind: str, num_bytes: int) -> None:
        """Count bytes copied between a device and its host."""
        self._num_bytes[kind, PCIE] += num_bytes


@dataclass(frozen=True)
class DrainExchange:
    """A drain's exchange: starts when the pipeline is empty; the run resumes when all messages have arrived."""

    setup: Setup
    workers: Sequence[Worker]  # all
    rings: InProcessCollectives  # the collectives, which count sent bytes
    network: Network
    clock_s: float  # when the pipeline is empty

    def average(self) -> float:
        """Average running statistics over the replicas of every stage; return the end time.

        Extensions' exchanges start at the same time.
        """
        pipeline, costs, ends = self.setup.pipeline, self.setup.costs, [self.clock_s]
        for stage in stages_that_average(pipeline, costs):
            ring = self.rings.of_stage(stage)
            for column in zip(*(self.workers[worker].buffers(stage) for worker in ring), strict=True):
                flats = [buffer.reshape(-1) for buffer in column]
                mean = self.rings.sum_buffers(ring, flats) / len(ring)
                for buffer in column:
                    buffer.copy_(mean.view(buffer.shape))
        average_statistics(pipeline, costs, self.network, self.clock_s, ends.append)
        sent = [self._send(*each) for extension in self.rings.extensions.values() for each in extension.drained()]
        ends.append(self._arrive(sent))  # by then the sums have ended, too
        return max(ends)

    def hand_over(self, before: Sequence[Worker]) -> float:
        """Transfer state from the workers `before` to those cut anew; return the end time."""
        given = [ModelState.merge(part for _, part in worker.parts()) for worker in before]
        offers = [keys_of(state) for state in given]
        messages = []
        for worker, old in zip(self.workers, before, strict=True):
            claim = worker.claim()
            state = retained(old.held(), claim)
            for giver, keys in requests_of(worker.index, offers, keys_of(state), claim).items():
                moved = pieces(given[giver], keys)
                messages.append(self._send(MIGRATION, giver, worker.index, state_bytes(moved), "layers"))
                state = ModelState.merge([state, moved])
            worker.restore(state)
            worker.follow(old)
        return self._arrive(messages)

    def _send(self, kind: str, sender: int, receiver: int, num_bytes: int, what: str) -> Message:
        self.rings.count(kind, sender, receiver, num_bytes)
        connection = self.network.connection(kind, sender, receiver)
        return self.network.send(connection, num_bytes, self.clock_s, what)

    def _arrive(self, messages: Sequence[Message]) -> float:
        """Complete the transfers before anything else runs; return the end time."""
        self.network.deliver(messages)
        return max([self.clock_s, *(message.arrival_s for message in messages)])


class VirtualEngine(TrainingEngine):
    """Trains on a virtual clock; training and evaluation leave the pipeline drained.

    `network` also counts predicted bytes; `observe` is called with every event after its execution; `meter` records
    events too; for `on_loss` and `on_unit` see `TrainingEngine`.

    Where layers are in slices, a worker computes the pieces of all its devices, whole values travel, and its memory is
    that of all: `num_bytes` are the network's times the devices, and `predicted_peaks` stands for the memory of one
    device of every worker, (device's, host's) bytes.
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
        self._counted: Counter[tuple[str, str]] = Counter()  # of the network's bytes, those in `num_bytes` for slices
        self._observe = observe
        self.meter = meter or Meter(setup.pipeline)
        self._stop = stop or StopRequest()
        self._num_losses, self._latest_loss = 0, math.nan
        self._cut_stages(setup)

    def _cut_stages(self, setup: Setup) -> None:
        self.setup = setup
        self.workers = [Worker(setup, index) for index in range(setup.pipeline.num_workers)]
        num_bytes = self.num_bytes if setup.costs.slices == 1 else Counter[tuple[str, str]]()  # see `_count`
        self._mailbox = InProcessTransport(setup, num_bytes)
        self.collectives = InProcessCollectives(setup, self.workers, num_bytes)

    @property
    def replicas(self) -> list[Replica]:
        """Every worker's replicas of its stages."""
        return [replica for worker in self.workers for replica in worker.replicas.values()]

    @property
    def peak_bytes(self) -> list[int]:
        """Every worker's peak bytes."""
        return [worker.peak_bytes for worker in self.workers]

    @property
    def stop_reason(self) -> str | None:
        """Why the run ends early, if it does."""
        return self._stop.reason

    def start_clock(self, clock_s: float = 0.0) -> None:
        """Continue the run's clock from `clock_s`."""
        self.clock_s = self.now_s = self.meter.origin_s = clock_s

    def switch_setup(self, setup: Setup) -> None:
        """See `Engine`."""
        before = self.workers
        self._cut_stages(setup)
        self.clock_s = self._drain.hand_over(before)
        for worker in before:
            worker.close()

    def facts(self) -> dict[str, Any]:
        """See `TrainingEngine`; with slices, memory is the prediction for one device of every worker."""
        self._count(0)  # layers that moved since the last segment
        found = super().facts()
        if self._predicted_peaks is not None:
            found["peak_bytes"], found["host_peak_bytes"] = map(list, self._predicted_peaks)
        return found

    def _count(self, samples: int) -> None:
        """Count what all devices of workers with slices sent since the last count, training on these samples."""
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
        self.meter.again_s, self.meter.swap_stall_s = facts.get("again_s", 0.0), facts.get("swap_stall_s", 0.0)
        self._not_training_s = facts["evaluation_s"]

    def measured(self, training_s: float) -> RunMeasurements:
        """Return the measurements on the virtual clock."""
        meter = self.meter
        num_workers, swaps = len(self.workers), bool(self.setup.pipeline.swaps)
        of_one = {key: count // self.setup.costs.slices for key, count in self.num_bytes.items()}
        metrics = fractions(
            meter.busy_s, meter.stall_s, num_workers, training_s,
            again_s=meter.again_s, swap_stall_s=meter.swap_stall_s if swaps else None,
        ) | pcie_fractions(self.setup.cluster, of_one, num_workers, training_s)  # fmt: skip
        return RunMeasurements(metrics, (), meter.timeline(), meter.busy_s, meter.stall_s, Counter(self.num_bytes))

    def train(self, first_minibatch: int, num_minibatches: int) -> int:
        """See `Engine`."""
        setup, by_extension = self.setup, self._begin_segment()
        self._feed, divisors = training_feed(setup, first_minibatch, num_minibatches, self.loaders)
        for worker in self.workers:
            worker.begin_training(self._feed, first_minibatch, num_minibatches, divisors, by_extension)
        segment = Segment(setup, by_extension, first_minibatch, num_minibatches, self._stop, self._cut)
        self.collectives.begin(segment.part)
        try:
            self._play(segment.simulation(self.network, self._feed.size, self.clock_s, self.meter))
        finally:
            self._feed.close()
        for worker in self.workers:
            worker.end_training()
        self._end_segment()
        if segment.limit > 0:
            self.clock_s = self._drain.average()
        before = setup.sampler.samples_before
        self._count(before(first_minibatch + segment.limit) - before(first_minibatch))
        return segment.limit

    def _cut(self, num_minibatches: int) -> None:
        for worker in self.workers:
            worker.end_early(num_minibatches)

    def _run_evaluation(self, feed: Feed) -> None:
        """Run an evaluation, counting its bytes apart."""
        evaluation, self._feed, before = self.setup.evaluation, feed, Counter(self.network.num_bytes)
        pipeline, costs = evaluation.pipeline, evaluation.costs(self.setup.costs)
        lists = forward_programs(pipeline, self.setup.held_out.minibatches_per_epoch)
        self._play(Simulation(pipeline, lists, costs, self.network, feed.size, self.clock_s, evaluates=True))
        self.network.num_bytes = _as_evaluation(before, self.network.num_bytes)
        self._count(0)

    def _play(self, simulation: Simulation) -> None:
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
        loss = worker.execute(event.instruction, self._mailbox, self.collectives)
        if loss is not None:
            self._on_loss(*loss, self.now_s)
            if not loss.total.is_cuda or self._num_losses % CUDA_LOSS_EVERY == 0:
                self._latest_loss = float(loss.total) / loss.weight
            self._num_losses += 1
            self._on_unit(loss.samples, self._latest_loss, self.now_s)

    @property
    def _drain(self) -> DrainExchange:
        return DrainExchange(self.setup, self.workers, self.collectives, self.network, self.clock_s)


def _as_evaluation(before: Counter[tuple[str, str]], after: Counter[tuple[str, str]]) -> Counter[tuple[str, str]]:
    """Count an evaluation's bytes under the kind `evaluation`."""
    booked = Counter(before)
    for (_, level), num_bytes in (after - before).items():
        booked[EVALUATION, level] += num_bytes
    return booked
