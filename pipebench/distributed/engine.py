"""The distributed engine: one worker of the plan in this process, on the wall clock.

It executes its worker's program. `transport.py` says what blocks. The arithmetic is in `engine/worker.py`, which the
virtual engine shares.
"""

import pickle
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from pipebench.checkpoint.handover import keys_of, pieces, requests_of, retained, state_bytes
from pipebench.checkpoint.state import ModelState
from pipebench.checkpoint.store import from_bytes, to_bytes
from pipebench.distributed.collectives import ProcessCollectives
from pipebench.distributed.control import Control
from pipebench.distributed.cores import crowding, processor_shares
from pipebench.distributed.instruction_times import DeviceTimer, HostTimer, Pace, runs_ahead
from pipebench.distributed.meter import MeasuredMeter, merge, with_allocated
from pipebench.distributed.slices import combined, connected_slices, joined
from pipebench.distributed.transport import ChannelTransport
from pipebench.distributed.warm_up import needs_warm_up, warm_up
from pipebench.distributed.world import World
from pipebench.engine.admission import admitted_program, evaluation_program
from pipebench.engine.engine import CUDA_LOSS_EVERY, Gather, OnLoss, OnUnit, TrainingEngine
from pipebench.engine.feed import Feed
from pipebench.engine.protocols import SegmentExtension, UnitLoss
from pipebench.engine.setup import Setup, ranks_of
from pipebench.engine.whole_set import WholeSet
from pipebench.engine.worker import Worker
from pipebench.errors import DivergedError
from pipebench.model.allocator import allocator_of
from pipebench.model.first_backward import import_for_backward
from pipebench.schedule.instructions import BACKWARDS, ENDS, Instruction
from pipebench.schedule.operations import MIGRATION, Op
from pipebench.schedule.programs import forward_programs, programs
from pipebench.simulate.meter import PREDICTION, RunMeasurements
from pipebench.simulate.simulation import RunPart, TimelineEvent
from pipebench.simulate.timeline import Transfer


class DistributedEngine(TrainingEngine):
    """Trains this process's worker. All processes call `train` and `evaluate`, which leave the pipeline drained.

    If layers are divided, a worker is several processes. Each exchanges values with its counterpart of every other
    worker, and `facts` adds up what a worker's processes count.

    Args:
        setup: what to run, on this process's `setup.device`. Its model loses its weights to the stage.
        world: the processes, as many as the plan's workers have slices together.
        control: watches this worker and agrees with the others on early ends.
        on_loss: see `TrainingEngine`; `DivergedError` stops all workers.
        on_unit: see `TrainingEngine`.
    """

    collectives: ProcessCollectives
    meter: MeasuredMeter

    def __init__(
        self,
        setup: Setup,
        world: World,
        control: Control,
        *,
        on_loss: OnLoss = lambda loss, samples, weight, clock_s: None,
        on_unit: OnUnit = lambda samples, loss, clock_s: None,
    ) -> None:
        super().__init__(setup, on_loss, on_unit)
        self._all = world  # of all processes
        self._slices, self.world = connected_slices(setup, world, self.num_bytes)  # `self.world`: of this one's slice
        world = self.world
        self._control = control
        self._ranks = ranks_of(setup)  # by worker
        self.workers = [Worker(setup, self._ranks.index(world.rank))]
        self._first_stage = min(self.worker.replicas)
        ahead = runs_ahead(setup.device)
        direct = ahead and world.direct
        self.meter = MeasuredMeter(setup.pipeline, self.worker.index, self._all.rank, measures_overlap=direct)
        self._origin_s = time.perf_counter()
        self._segment = 0
        self._num_losses = 0
        self._stop: str | None = None
        timed = (self.worker.index, self.clock, self._note)
        self._timer = DeviceTimer(*timed, direct=direct) if ahead else HostTimer(*timed)
        self._transport = ChannelTransport(setup, world, self.worker.index, self._timer, self.meter, self.num_bytes)
        self.collectives = self._connected()
        self._pace = Pace(setup.device)
        if needs_warm_up(setup):
            warm_up(setup, world, self.worker)
        elif any(not replica.is_last or replica.scale is not None for replica in self.worker.replicas.values()):
            import_for_backward()
        needs_whole_model = setup.repartitions or (self.is_first and setup.dataset.generates_with is not None)
        if not needs_whole_model:
            # Free the model's memory: the stage has copies of its part.
            for module in (setup.graph.model, setup.graph.root, setup.graph.evaluated.root):
                module.to("meta")

    # Called by the training loop.

    def start_clock(self, clock_s: float = 0.0) -> None:
        """Start the run's clock at `clock_s`, at the same moment on all workers."""
        self.set_activity("opening data")
        self.worker.open_data()
        self.loaders.prepare()
        self.exchange(None)
        self.world.mark_started()
        if (allocator := allocator_of(self.setup.device)) is not None:
            allocator.begin()
        self._origin_s = time.perf_counter() - clock_s
        self.clock_s = clock_s
        self._not_training_s = max(0.0, clock_s - self.meter.busy_s)
        self.meter.begin(clock_s)
        self._timer.sync_clock()

    def clock(self) -> float:
        """Return the run's clock, seconds."""
        return time.perf_counter() - self._origin_s

    @property
    def now_s(self) -> float:
        """The run's clock."""
        return self.clock()

    @property
    def worker(self) -> Worker:
        """This process's worker."""
        return self.workers[0]

    @property
    def position(self) -> int:
        """This worker's index, as in the list that `exchange` returns."""
        return self.worker.index

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes the run's records."""
        return self._all.rank == 0

    @property
    def stop_reason(self) -> str | None:
        """Why the run ends early, if this worker knows it does."""
        return self._stop or self._control.stop_reason

    def exchange(self, value: Any) -> list[Any]:
        """Return every worker's value, by worker; values are JSON data."""
        self.set_activity("exchange")
        values = self.world.exchange(value)
        self.set_activity("")
        return [values[rank] for rank in self._ranks]

    def gathering(self) -> Gather:
        """See `TrainingEngine`. Values travel by the store, as the training thread alone uses the default group."""
        gather, slices = self.world.gathering(), self.world.slices

        def by_worker(value: Any) -> list[Any]:
            found = gather(value)
            return [found[rank * slices + index] for rank in self._ranks for index in range(slices)] if found else []

        return by_worker

    def train(self, first_minibatch: int, num_minibatches: int) -> int:
        """Train on minibatches from `first_minibatch`, then drain; return how many, fewer after an agreed stop."""
        feed = Feed(self.setup, "train", first_minibatch, num_minibatches, self.loaders)
        self._feed = feed
        by_extension = self._begin_segment()
        self.worker.begin_training(feed, first_minibatch, num_minibatches, by_extension)
        with nullcontext() if self._slices is None else self._slices.counting():
            try:
                done = self._train(first_minibatch, num_minibatches, by_extension)
                self._settle()
            finally:
                feed.close()
        self.worker.end_training()
        self._end_segment()
        if by_extension:
            self._transport.switch_setup(self.setup)
        self.collectives.drained()
        self.sync_clock()
        return done

    def _note(self, event: TimelineEvent) -> None:
        self.meter.event(event)
        if not self.meter.evaluating:
            self.worker.took(event.instruction, event.end_s - event.start_s)

    def _run_evaluation(self, feed: Feed) -> bool:
        self._feed, control = feed, self._control
        pipeline, num_minibatches = self.setup.evaluation.pipeline, self.setup.held_out.minibatches_per_epoch
        expected, program = (forward_programs(pipeline, num_minibatches)[self.worker.index] for _ in range(2))
        self._transport.expect(expected, lambda unit: False)
        if not pipeline.gathers:
            control.begin(self._segment, num_minibatches)
            self._segment += 1
        for instruction in evaluation_program(pipeline, program, num_minibatches, control):
            self._execute(instruction)
        self._settle()
        return pipeline.gathers or control.limit == num_minibatches

    def _settle(self) -> None:
        """Wait until all executed instructions are done, and record their transfers."""
        self._transport.flush()
        self._timer.sync_clock()
        self.set_activity("exchange")
        self._transport.settle(self.world)
        self.set_activity("")

    def switch_setup(self, setup: Setup) -> None:
        """Continue at a drain with another setup of the same model: other cuts or other idle cells; see `replan`.

        Every worker offers the states that it has. Each then asks for what its new stages need and it doesn't have
        itself, and gets it in one message per worker.
        """
        assert self.setup.repartitions, "the model that stages are cut from is gone"
        old = self.worker
        self._cut_stages(setup)
        offered = ModelState.merge(part for _, part in old.parts())
        offers = [[(section, name) for section, name in keys] for keys in self.exchange(keys_of(offered))]
        claim = self.worker.claim()
        state = retained(old.held(), claim)
        requests = self.exchange(list(requests_of(old.index, offers, keys_of(state), claim).items()))
        parcels = {
            receiver: pieces(offered, [(section, name) for section, name in keys])
            for receiver, by_sender in enumerate(requests)
            for sender, keys in by_sender
            if sender == old.index
        }
        self.worker.restore(ModelState.merge([state, *self._handed_over(parcels)]))
        self.worker.follow(old)
        old.close()
        self.set_activity("")
        self.sync_clock()

    def _handed_over(self, parcels: Mapping[int, ModelState]) -> list[ModelState]:
        """Send states to workers, by worker; return the states sent to this one, and record their transfers."""
        start_s, own, setup = self.clock(), self.worker.index, self.setup
        self.set_activity("migration")
        arrived = self.world.hand_over({self._ranks[receiver]: to_bytes(part) for receiver, part in parcels.items()})
        for receiver, part in parcels.items():
            self.num_bytes[MIGRATION, setup.level_between(own, receiver).name] += state_bytes(part)
        found = []
        for rank, content in arrived.items():
            sender, part = self._ranks.index(rank), from_bytes(content)
            level, workers = setup.level_between(sender, own).name, ((sender,), (own,))
            transfer = Transfer(MIGRATION, "layers", *workers, level, state_bytes(part), start_s, self.clock())
            self.meter.transfer(transfer)
            found.append(part)
        return found

    def _cut_stages(self, setup: Setup) -> None:
        self.setup = setup
        self.workers = [Worker(setup, self.worker.index)]
        self._transport.switch_setup(setup)
        self.collectives.close()
        self.collectives = self._connected()

    def _connected(self) -> ProcessCollectives:
        return ProcessCollectives(self.setup, self.world, self.worker, self._timer, self.meter, self.num_bytes)

    def close(self) -> None:
        """Close the connections to the other workers; all workers call it."""
        self.exchange(None)
        self._transport.close()
        self.collectives.close()
        if self._slices is not None:
            self._slices.close()

    def facts(self) -> dict[str, Any]:
        """See `TrainingEngine`. Of a worker's processes, bytes are added up, and peaks are those of the largest."""
        found = super().facts()
        return found if self._slices is None else combined(self._all.exchange(found), self.world)

    def restore(self, *given: Any, **named: Any) -> None:
        """See `TrainingEngine`."""
        self.set_activity("taking up a checkpoint")
        super().restore(*given, **named)
        self.set_activity("")
        if self.world.slice_index > 0:  # a checkpoint has the sum over a worker's processes, which the first continues
            self.num_bytes.clear()

    def _meter_facts(self) -> dict[str, Any]:
        return {"meter": self.meter.state()}

    def _recall_meter(self, facts: Mapping[str, Any]) -> None:
        self.meter.restore(facts["meter"])

    def set_activity(self, work: str) -> None:
        """Name this process's current work, for the others' watchdogs."""
        self._control.at(None, work)

    def sync_clock(self) -> None:
        """Set all workers' clocks to the latest of them."""
        self._timer.sync_clock()
        self.clock_s = max(self.exchange(self.clock()))

    def measured(self, training_s: float) -> RunMeasurements:
        """Return all workers' measurements; all call it."""
        allocator = allocator_of(self.setup.device)
        allocated = {} if allocator is None else allocator.most_bytes
        shares, columns = zip(*self.exchange([self.meter.share(), allocated]), strict=True)
        found = with_allocated(merge(shares, self.setup.pipeline, training_s), columns)
        simulated = self.setup.costs.host.shared is not None
        crowded = crowding(self._all.exchange(processor_shares(self.setup.device)), simulated=simulated)
        return replace(found, notes={**found.notes, PREDICTION: crowded}) if crowded else found

    # The loop.

    def _train(self, first: int, num_minibatches: int, by_extension: Mapping[str, SegmentExtension]) -> int:
        """Execute this worker's program, shortened if the workers agree on a stop."""
        pipeline, index = self.setup.pipeline, self.worker.index
        foreseen = {name: part.foreseen() for name, part in by_extension.items()}
        foreseeable = programs(pipeline, num_minibatches, foreseen)[index]
        self._transport.expect(foreseeable, lambda unit: self._feed.size(unit) == 0)
        control = self._control
        control.begin(self._segment, num_minibatches)
        self._segment += 1
        self.collectives.begin(RunPart(first, lambda: control.limit, by_extension, control.end_at))
        for instruction in admitted_program(pipeline, index, num_minibatches, control, by_extension):
            if control.limit < num_minibatches:
                num_minibatches = control.limit
                self.worker.end_early(num_minibatches)
            self._execute(instruction)
        return control.limit

    def _execute(self, instruction: Instruction) -> None:
        """Execute an instruction, watched and timed."""
        self._control.at(instruction)
        self._timer.timed(instruction, lambda: self._executed(instruction))

    def _executed(self, instruction: Instruction) -> None:
        transport, collectives = self._transport, self.collectives
        loss = self.worker.execute(instruction, transport, collectives)
        if instruction.op is Op.FORWARD or instruction.op in BACKWARDS:
            self._pace.step()
        if loss is not None:
            self._take_loss(loss)
        if instruction.op in ENDS and instruction.stage == self._first_stage:  # this worker's last one of the unit
            # An estimate: it assumes that all replicas of the stage have trained on as many units as this one.
            samples = self._feed.size(instruction.number) * self.setup.pipeline.replicas[instruction.stage]
            self._on_unit(samples, transport.latest_loss, self.clock())

    def _take_loss(self, loss: UnitLoss) -> None:
        try:
            self._on_loss(*loss, self.clock())
        except DivergedError as diverged:
            self._stop = self._stop or str(diverged)
            self._control.request_stop(str(diverged))
        # Reading a loss from a GPU waits for it, so only every so many of this worker's own losses are read.
        if not loss.total.is_cuda or self._num_losses % CUDA_LOSS_EVERY == 0:
            self._transport.latest_loss = loss.mean
        self._num_losses += 1

    def _complete(self, whole_set: WholeSet) -> None:
        """See `TrainingEngine`. A stage's replicas take turns, so where the last has several, each has a part."""
        pipeline = self.setup.evaluation.pipeline
        last = pipeline.num_stages - 1
        if pipeline.replicas[last] == 1 or not whole_set.metrics:
            return
        self.set_activity("metrics of the whole set")
        first = self._ranks[pipeline.worker(last, 0)]
        parcels = {first: pickle.dumps(whole_set.waiting)} if self.world.rank != first else {}
        for parcel in self.world.hand_over(parcels).values():
            whole_set.take(pickle.loads(parcel))
        self.set_activity("")

    def _whole_model_metrics(self) -> dict[str, float]:
        """Gather the newest weights on rank 0, which computes the whole model's metrics while the others wait."""
        self.set_activity("whole-model metrics")
        stages = self._all.gather(self.worker.tensors())
        found: dict[str, float] = {}
        if self.is_first:
            found = self._whole.metrics(joined(stages, self.setup.graph.slices))
        return next(metrics for metrics in self._all.exchange(found) if metrics)
