"""The distributed engine: one worker of the plan in this process, on the wall clock.

It executes its worker's program. See `transport.py` on what blocks, `engine/worker.py` on the arithmetic, which the
virtual engine shares.
"""

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
from pipebench.engine.admission import admitted_program
from pipebench.engine.engine import CUDA_LOSS_EVERY, Gather, OnLoss, OnUnit, TrainingEngine
from pipebench.engine.feed import Feed, training_feed
from pipebench.engine.protocols import SegmentExtension, UnitLoss
from pipebench.engine.setup import Setup, ranks_of
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
    """Trains this process's worker. `train` and `evaluate` leave the pipeline drained; all processes call them alike.

    Where layers are divided, a worker is several processes; each sees the same one of every other worker's, and what
    they count is added up where it leaves the engine.

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
        self._all = world
        self._slices, self.world = connected_slices(setup, world, self.num_bytes)
        world = self.world
        self._control = control
        self._ranks = ranks_of(setup)
        self.workers = [Worker(setup, self._ranks.index(world.rank))]
        self._first_stage = min(self.worker.replicas)
        ahead = runs_ahead(setup.device)
        direct = ahead and world.direct
        self.meter = MeasuredMeter(setup.pipeline, self.worker.index, self._all.rank, tells_overlap=direct)
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
        if not setup.repartitions and (not self.is_first or setup.dataset.generates_with is None):
            # The stage has copies of what it needs; frees the rest of the model's memory.
            for whole in (setup.graph.model, setup.graph.root, setup.graph.evaluated.root):
                whole.to("meta")

    # Called by the training loop.

    def start_clock(self, clock_s: float = 0.0) -> None:
        """Start the run's clock here, at the same moment on all workers."""
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
        """Return every worker's value, by worker; values travel as JSON."""
        self.set_activity("exchange")
        values = self.world.exchange(value)
        self.set_activity("")
        return [values[rank] for rank in self._ranks]

    def gathering(self) -> Gather:
        """See `TrainingEngine`; beside the group of all processes, whose collectives are the training thread's."""
        gather, slices = self.world.gathering(), self.world.slices

        def by_worker(value: Any) -> list[Any]:
            found = gather(value)
            return [found[rank * slices + index] for rank in self._ranks for index in range(slices)] if found else []

        return by_worker

    def train(self, first_minibatch: int, num_minibatches: int) -> int:
        """Train on minibatches from `first_minibatch`, then drain; return how many, fewer after an agreed stop."""
        feed, divisors = training_feed(self.setup, first_minibatch, num_minibatches, self.loaders)
        self._feed, by_extension = feed, self._begin_segment()
        self.worker.begin_training(feed, first_minibatch, num_minibatches, divisors, by_extension)
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

    def _run_evaluation(self, feed: Feed) -> None:
        self._feed, pipeline, count = feed, self.setup.evaluation.pipeline, self.setup.held_out.minibatches_per_epoch
        expected, own = (forward_programs(pipeline, count)[self.worker.index] for _ in range(2))
        self._transport.expect(expected, lambda unit: False)
        for instruction in own:
            self._execute(instruction)
        self._settle()

    def _settle(self) -> None:
        """Wait until everything executed is done, and record it."""
        self._transport.flush()
        self._timer.sync_clock()
        self.set_activity("exchange")
        self._transport.settle(self.world)
        self.set_activity("")

    def switch_setup(self, setup: Setup) -> None:
        """Continue at a drain with another setup of the same model: other cuts or other idle cells; see `replan`."""
        assert self.setup.repartitions, "the model that stages are cut from is gone"
        old = self.worker
        self._cut_stages(setup)
        given = ModelState.merge(part for _, part in old.parts())
        offers = [[(section, name) for section, name in keys] for keys in self.exchange(keys_of(given))]
        claim = self.worker.claim()
        state = retained(old.held(), claim)
        asks = self.exchange(list(requests_of(self.worker.index, offers, keys_of(state), claim).items()))
        parcels = {
            taker: pieces(given, [(section, name) for section, name in keys])
            for taker, of_taker in enumerate(asks)
            for giver, keys in of_taker
            if giver == self.worker.index
        }
        start_s = self.clock()
        self.set_activity("migration")
        arrived = self.world.hand_over({self._ranks[taker]: to_bytes(moved) for taker, moved in parcels.items()})
        for taker, moved in parcels.items():
            self.num_bytes[MIGRATION, self.setup.level_between(old.index, taker).name] += state_bytes(moved)
        for rank, content in arrived.items():
            moved = from_bytes(content)
            state = ModelState.merge([state, moved])
            sender, own = self._ranks.index(rank), old.index
            level, end_s = self.setup.level_between(sender, own).name, self.clock()
            size = state_bytes(moved)
            self.meter.transfer(Transfer(MIGRATION, "layers", (sender,), (own,), level, size, start_s, end_s))
        self.worker.restore(state)
        self.worker.follow(old)
        old.close()
        self.set_activity("")
        self.sync_clock()

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
        """See `TrainingEngine`; of all of the worker's processes: bytes of all, and the most that one held."""
        found = super().facts()
        return found if self._slices is None else combined(self._all.exchange(found), self.world)

    def restore(self, *given: Any, **named: Any) -> None:
        """See `TrainingEngine`."""
        self.set_activity("taking up a checkpoint")
        super().restore(*given, **named)
        self.set_activity("")
        if self.world.slice_index > 0:  # the worker's first process goes on with what all have counted
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
        shares = self.exchange([self.meter.share(), allocated])
        found = with_allocated(
            merge([share for share, _ in shares], self.setup.pipeline, training_s), [most for _, most in shares]
        )
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
        if instruction.op in ENDS and instruction.stage == self._first_stage:  # its last of the unit
            # Counts for all replicas of the stage, which are as far as this one.
            samples = self._feed.size(instruction.number) * self.setup.pipeline.replicas[instruction.stage]
            self._on_unit(samples, transport.latest_loss, self.clock())

    def _take_loss(self, loss: UnitLoss) -> None:
        try:
            self._on_loss(*loss, self.clock())
        except DivergedError as diverged:
            self._stop = self._stop or str(diverged)
            self._control.request_stop(str(diverged))
        # Every so many of this worker's own losses: its units depend on the number of replicas.
        if not loss.total.is_cuda or self._num_losses % CUDA_LOSS_EVERY == 0:
            self._transport.latest_loss = float(loss.total) / loss.weight
        self._num_losses += 1

    def _whole_model_metrics(self) -> dict[str, float]:
        """Gather the newest weights on rank 0, which computes the metrics of the whole model while the others wait."""
        self.set_activity("whole-model metrics")
        stages = self._all.gather(self.worker.tensors())
        found: dict[str, float] = {}
        if self.is_first:
            found = self._whole.metrics(joined(stages, self.setup.graph.slices))
        return next(metrics for metrics in self._all.exchange(found) if metrics)
