"""The distributed engine: one worker of the plan in this process, the others in theirs, on the wall clock.

It executes its worker's list, instruction by instruction. What blocks and what doesn't is `transport.py`'s subject;
the arithmetic is `worker.py`'s, the same as the virtual engine's.
"""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from pipebench.checkpoint.handover import keys_of, pieces, requests_of, retained, state_bytes
from pipebench.checkpoint.state import ModelState
from pipebench.checkpoint.store import from_bytes, to_bytes
from pipebench.distributed.collectives import ProcessCollectives
from pipebench.distributed.control import Control
from pipebench.distributed.cores import core_share, crowding
from pipebench.distributed.instruction_times import DeviceWatch, HostWatch
from pipebench.distributed.meter import MeasuredMeter, merge
from pipebench.distributed.transport import ChannelTransport
from pipebench.distributed.warm_up import gains_by_warm_up, warm_up
from pipebench.distributed.world import World
from pipebench.engine.admission import admitted_program
from pipebench.engine.facts import facts_of, restore_extensions
from pipebench.engine.feed import Feed, training_feed
from pipebench.engine.loss_scale import scale_metrics
from pipebench.engine.monitor import AllocatorPeak, monitors
from pipebench.engine.movable import Movable
from pipebench.engine.pace import Pace
from pipebench.engine.protocols import UnitLoss
from pipebench.engine.scores import Scores
from pipebench.engine.segment_cuts import SegmentCuts, phases_of
from pipebench.engine.setup import Setup, ranks_of
from pipebench.engine.virtual import OnLoss, OnUnit
from pipebench.engine.whole import WholeModel
from pipebench.engine.worker import Worker, host_peaks
from pipebench.errors import DivergedError
from pipebench.model.plan import Plan
from pipebench.schedule.instructions import BACKWARDS, ENDS, Instruction
from pipebench.schedule.operations import MIGRATION, Op
from pipebench.schedule.programs import forward_programs, programs
from pipebench.schedule.routes import Routes
from pipebench.simulate.meter import PREDICTION, RunMeasurements
from pipebench.simulate.simulation import TimelineEvent
from pipebench.simulate.timeline import Transfer

_CUDA_LOSS_EVERY = 50  # reading a loss waits for the GPU


class DistributedEngine(Movable):
    """Trains this process's worker. `train` and `evaluate` leave the pipeline drained; all processes call them alike.

    Args:
        setup: what to run; `setup.device` is this process's. Its model loses its weights to the stage.
        world: the processes; as many as the plan has workers.
        control: watches this worker and agrees with the others on early ends; None for neither.
        on_loss: told of every unit's summed loss on the workers of the last stage; `DivergedError` stops all workers.
        on_unit: told of every unit that this worker has done with: its samples, the latest mean loss it knows (NaN if
            none), the time.

    Attributes:
        worker: this process's worker.
        meter: what it measures.
        num_bytes: payload it has sent, by kind and level.
        clock_s: the run's clock at the last drain, the same on all workers.
    """

    def __init__(
        self,
        setup: Setup,
        world: World,
        *,
        control: Control | None = None,
        on_loss: OnLoss = lambda loss, samples, weight, clock_s: None,
        on_unit: OnUnit = lambda samples, loss, clock_s: None,
    ) -> None:
        super().__init__()
        self.setup = setup
        self.world = world
        self._control = control
        self._on_loss = on_loss
        self._on_unit = on_unit
        self._ranks = ranks_of(setup)
        self.worker = Worker(setup, self._ranks.index(world.rank))
        self._first_stage = min(self.worker.replicas)
        on_gpu = setup.device.type == "cuda"
        # The host runs ahead of its GPU: when it hands over a message says nothing about when that travels.
        self.meter = MeasuredMeter(setup.pipeline, self.worker.index, world.rank, times_transfers=not on_gpu)
        self.num_bytes: Counter[tuple[str, str]] = Counter()
        self.clock_s = 0.0
        self._origin_s = time.perf_counter()
        self._not_training_s = 0.0
        self._segment = 0
        self._num_losses = 0
        self._stop: str | None = None
        self._monitor()
        self._watch = (DeviceWatch if on_gpu else HostWatch)(self.worker.index, self.clock, self._note)
        self._transport = ChannelTransport(setup, world, self.worker.index, self.clock, self.meter, self.num_bytes)
        self._collectives = self._connected()
        self._pace = Pace(setup.device)
        if gains_by_warm_up(setup.device):
            warm_up(setup, world, self.worker.index)
        if not setup.repartitions and (world.rank > 0 or setup.dataset.generates_with is None):
            # The stage holds copies of what it needs: the rest of the model would only take memory.
            for whole in (setup.graph.model, setup.graph.root, setup.graph.evaluated.root):
                whole.to("meta")

    # What the training loop asks for.

    def start_clock(self, clock_s: float = 0.0) -> None:
        """Let the run's clock start here, at the same moment on all workers."""
        self.worker.open_data()
        self.exchange(None)
        self.world.mark_started()
        self._origin_s = time.perf_counter() - clock_s
        self.clock_s = clock_s
        self._not_training_s = max(0.0, clock_s - self.meter.busy_s)
        self.meter.begin(clock_s)
        self._watch.sync_clock()

    def clock(self) -> float:
        """Return the run's clock, seconds."""
        return time.perf_counter() - self._origin_s

    @property
    def now_s(self) -> float:
        """The run's clock now."""
        return self.clock()

    @property
    def busy_fraction(self) -> float:
        """Share of this worker's time in training that it spent computing."""
        elapsed_s = self.clock() - self._not_training_s
        return min(1.0, self.meter.busy_s / elapsed_s) if elapsed_s > 0 else 0.0

    @property
    def position(self) -> int:
        """This process's place in what `exchange` returns: its worker's number."""
        return self.worker.index

    @property
    def is_first(self) -> bool:
        """Rank 0 keeps the run's records."""
        return self.world.rank == 0

    @property
    def stop_reason(self) -> str | None:
        """Why this worker knows that the run ends early, if it does."""
        return self._stop or (self._control.stop_reason if self._control is not None else None)

    def exchange(self, value: Any) -> list[Any]:
        """Return every worker's value, in the order of workers; JSON travels.

        Raises:
            PeerLostError: a worker is gone.
        """
        self.set_activity("exchange")
        values = self.world.exchange(value)
        self.set_activity("")
        return [values[rank] for rank in self._ranks]

    def train(self, first_minibatch: int, num_minibatches: int) -> int:
        """Train on minibatches `first_minibatch` and after, then drain.

        Returns:
            How many were trained on: fewer than asked for if a stop was agreed on.

        Raises:
            PeerLostError: a worker is gone.
        """
        feed, divisors = training_feed(self.setup, first_minibatch, num_minibatches)
        self._feed = feed
        self._phases = phases = self._phases or phases_of(self.setup)
        self.worker.begin_training(feed, first_minibatch, num_minibatches, divisors, phases)
        try:
            done = self._train(first_minibatch, num_minibatches, None if phases is None else phases.routes)
            self._transport.flush()
        finally:
            feed.close()
        self._watch.sync_clock()
        self.worker.end_training()
        if phases is not None:
            self.setup = phases.last
            self._transport.go_under(self.setup)
        self._phases = None
        self._collectives.drained()
        self.sync_clock()
        return done

    def _end_at(self, minibatch: int) -> None:
        """Let the segment end before a minibatch that nobody has begun."""
        if self._control is not None:
            self._control.end_at(minibatch)

    def _note(self, event: TimelineEvent) -> None:
        """Take note of one instruction of this worker."""
        self.meter.event(event)
        if self.worker.monitor is not None and not self.meter.evaluating:
            self.worker.monitor.note(event.instruction, event.end_s - event.start_s)

    def evaluate(self) -> dict[str, float]:
        """Evaluate the newest weights on every held-out sample, pipelined; return the metrics, on all workers.

        Raises:
            PeerLostError: a worker is gone.
        """
        dataset, count = self.setup.dataset, self.setup.held_out.minibatches_per_epoch
        self._feed = Feed(self.setup, "eval", 0, count)
        scores = Scores(dataset)
        self.worker.begin_evaluation(self._feed, scores)
        self.meter.evaluating = True
        pipeline = self.setup.evaluation.pipeline
        self._transport.expect(forward_programs(pipeline, count)[self.worker.index], lambda unit: False)
        try:
            for instruction in forward_programs(pipeline, count)[self.worker.index]:
                self._execute(instruction)
            self._transport.flush()
        finally:
            self._feed.close()
        self.worker.end_evaluation()
        scores.merge(self.exchange(scores.sums))
        metrics = scores.metrics()
        if self.setup.loss_scale is not None:
            metrics |= scale_metrics(each for own in self.exchange(self.worker.loss_scales) for each in own)
        if dataset.generates_with is not None:
            metrics |= self._whole_model_metrics()
        self._watch.sync_clock()
        self.meter.evaluating = False
        before_s = self.clock_s
        self.sync_clock()
        self._not_training_s += self.clock_s - before_s
        return metrics

    def parts(self) -> list[tuple[str, ModelState]]:
        """Return what this process contributes to a checkpoint."""
        return self.worker.parts()

    def replan(self, plan: Plan) -> None:
        """Go on under a plan with other cuts or memory policies, at a drain; processes and connections stay.

        Raises:
            PlanError: stages, replicas, devices or depth are others.
            PeerLostError: a worker is gone.
        """
        self.switch_setup(self.setup.under(plan))

    def switch_setup(self, setup: Setup) -> None:
        """Go on with another setup of the same model, at a drain: other cuts, or other cells left out; see `replan`."""
        assert self.setup.repartitions, "the model that stages are cut from is gone"
        old = self.worker
        self._cut_stage(setup)
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
            self._note_migration(self._ranks.index(rank), state_bytes(moved), start_s)
        self.worker.restore(state)
        self.worker.recall(old.peak_bytes, old.versions_max, old.host_peak_bytes)
        self._collectives = self._connected()
        self.set_activity("")
        self.sync_clock()

    def _note_migration(self, sender: int, num_bytes: int, start_s: float) -> None:
        """Tell the meter of layers that have come from another worker."""
        own = self.worker.index
        level = self.setup.level_between(sender, own).name
        self.meter.transfer(Transfer(MIGRATION, "layers", (sender,), (own,), level, num_bytes, start_s, self.clock()))

    def _cut_stage(self, setup: Setup) -> None:
        """Cut this worker's stages anew, with their initial weights and nothing in flight."""
        self.setup = setup
        self._phases = None
        self.worker = Worker(setup, self.worker.index)
        self._monitor()
        self._transport.go_under(setup)
        self._collectives.close()

    def _monitor(self) -> None:
        """Let this worker's stage be measured, where stages are balanced."""
        if self.setup.balances:
            allocator = AllocatorPeak(self.setup.device) if self.setup.device.type == "cuda" else None
            self.worker.monitor = monitors(self.setup, self._decided, allocator)[self.worker.index]

    def _connected(self) -> ProcessCollectives:
        return ProcessCollectives(self.setup, self.world, self.worker, self.clock, self.meter, self.num_bytes)

    def restore(
        self, state: ModelState, facts: Mapping[str, Any] | None, clock_s: float, plan: Plan | None = None
    ) -> None:
        """Go on from a checkpoint.

        Args:
            state: of the whole model.
            facts: what `facts` returned on this worker when it was taken; None if the plan was another.
            clock_s: the run's clock then.
            plan: to go on under; None for the one there is.
        """
        if plan is not None:
            self._cut_stage(self.setup.under(plan))
            self._collectives = self._connected()
        self.worker.restore(state)
        if facts is not None:
            self.meter.restore(facts["meter"])
            self.num_bytes.update({(kind, level): count for kind, level, count in facts["num_bytes"]})
            self.worker.recall(*facts["peak_bytes"], *facts["weight_versions_max"], *host_peaks(facts))
            restore_extensions(self._collectives.extensions, facts)

    def close(self) -> None:
        """Give up the connections to the other workers, when everybody has ended; all workers call it."""
        self.exchange(None)
        self._transport.close()
        self._collectives.close()

    def facts(self) -> dict[str, Any]:
        """Return what this worker has measured so far, in a form that JSON holds."""
        return {
            "meter": self.meter.state(),
            "num_bytes": [[kind, level, count] for (kind, level), count in self.num_bytes.items()],
            "peak_bytes": [self.worker.peak_bytes],
            "weight_versions_max": [self.worker.versions_max],
            "host_peak_bytes": [self.worker.host_peak_bytes],
            **facts_of(self._collectives.extensions),
        }

    def set_activity(self, work: str) -> None:
        """Name what this process does now, for the others' watchdogs."""
        if self._control is not None:
            self._control.at(None, work)

    def sync_clock(self) -> None:
        """All workers agree on the time: the last one's."""
        if self.setup.device.type == "cuda":
            torch.cuda.synchronize(self.setup.device)
        self.clock_s = max(self.exchange(self.clock()))

    def measured(self, training_s: float) -> RunMeasurements:
        """Return what all workers measured; all call it."""
        shares = self.exchange([self.meter.share(), core_share(self.setup.device)])
        found = merge([share for share, _ in shares], self.setup.pipeline, training_s)
        simulated = self.setup.costs.host.cores is not None
        crowded = crowding([cores for _, cores in shares], simulated=simulated)
        return replace(found, notes={**found.notes, PREDICTION: crowded}) if crowded else found

    # The loop.

    def _train(self, first_minibatch: int, num_minibatches: int, routes: Routes | None) -> int:
        """Execute this worker's list; it becomes that of a shorter segment where the workers agree on one."""
        pipeline, index = self.setup.pipeline, self.worker.index
        foreseen = None if routes is None else self._foreseen(routes)
        foreseeable = programs(pipeline, num_minibatches, foreseen)[index]
        self._transport.expect(foreseeable, lambda unit: self._feed.size(unit) == 0)
        if self._control is None:
            self._collectives.begin(first_minibatch, lambda: num_minibatches)
            for instruction in programs(pipeline, num_minibatches, routes)[index]:
                self._execute(instruction)
            return num_minibatches
        self._control.begin(self._segment, num_minibatches)
        self._segment += 1
        control = self._control
        self._collectives.begin(first_minibatch, lambda: control.limit)
        for instruction in admitted_program(pipeline, index, num_minibatches, self._control, routes):
            if self._control.limit < num_minibatches:
                num_minibatches = self._control.limit
                self.worker.end_early(num_minibatches)
            self._execute(instruction)
        return self._control.limit

    def _foreseen(self, routes: Routes) -> Routes:
        """Return routes of the moves that are known now, to read a list from that nobody executes."""
        phases = SegmentCuts(self.setup)
        for move in routes.moves.announced:
            phases.announce(move)
        return phases.routes

    def _execute(self, instruction: Instruction) -> None:
        """Execute an instruction, watched and measured."""
        if self._control is not None:
            self._control.at(instruction)
        self._watch.timed(instruction, lambda: self._executed(instruction))

    def _executed(self, instruction: Instruction) -> float:
        """Execute an instruction; return the seconds it waited for bytes that were on their way."""
        transport, collectives = self._transport, self._collectives
        transport.stall_s = collectives.stall_s = 0.0
        loss = self.worker.execute(instruction, transport, collectives)
        if instruction.op is Op.FORWARD or instruction.op in BACKWARDS:
            self._pace.step()
        if loss is not None:
            self._take_loss(loss)
        if instruction.op in ENDS and instruction.stage == self._first_stage:  # done with the unit here
            # This worker's turn among its stage's replicas: together they are as far as it is.
            samples = self._feed.size(instruction.number) * self.setup.pipeline.replicas[instruction.stage]
            self._on_unit(samples, transport.latest_loss, self.clock())
        return transport.stall_s + collectives.stall_s

    def _take_loss(self, loss: UnitLoss) -> None:
        try:
            self._on_loss(*loss, self.clock())
        except DivergedError as diverged:
            self._stop = self._stop or str(diverged)
            if self._control is not None:
                self._control.request_stop(str(diverged))
        # Of this worker's own losses: which units it has depends on how many replicas there are.
        if not loss.total.is_cuda or self._num_losses % _CUDA_LOSS_EVERY == 0:
            self._transport.latest_loss = float(loss.total) / loss.weight
        self._num_losses += 1

    @cached_property
    def _whole(self) -> WholeModel:
        return WholeModel(self.setup)

    def _whole_model_metrics(self) -> dict[str, float]:
        """Gather the newest weights on rank 0, which computes what only the whole model can give; the others wait."""
        self.set_activity("whole-model metrics")
        stages = self.world.gather(self.worker.tensors())
        found: dict[str, float] = {}
        if self.world.rank == 0:
            found = self.setup.dataset.whole_model_metrics(self._whole.filled(stages))
        return next(metrics for metrics in self.exchange(found) if metrics)
