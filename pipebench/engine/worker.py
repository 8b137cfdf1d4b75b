"""One worker: executes its list of instructions, on its replica of each of its stages.

It knows no clock. A transport sends values to other workers and receives theirs; collectives sum over the replicas of a
stage. The virtual engine implements both in one process, the distributed engine between processes. All else is the same
in both engines.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from pipebench.engine.accumulation import OnGradient
from pipebench.engine.crossing import BoundaryValues
from pipebench.engine.feed import Feed
from pipebench.engine.gradients import Gradients
from pipebench.engine.peaks import WorkerPeaks
from pipebench.engine.protocols import Collectives, Handler, Transport, UnitLoss, WorkerExtension
from pipebench.engine.replica import LiveBytes, UnitInput, Values
from pipebench.engine.scores import Scores
from pipebench.engine.setup import Setup
from pipebench.engine.updates import Updates
from pipebench.engine.worker_replicas import WorkerReplicas
from pipebench.errors import OutOfMemoryError, is_out_of_memory
from pipebench.formats import num_bytes
from pipebench.model.allocator import allocator_of
from pipebench.model.precision import precision_of
from pipebench.recipe.users_code import located
from pipebench.schedule.instructions import BACKWARDS, COPIES, Instruction
from pipebench.schedule.operations import ACTIVATION, GRADIENT, MOVE, OPERATIONS, ROUND, SWAP_IN, SWAP_OUT, Op
from pipebench.schedule.programs import NOTHING
from pipebench.schedule.syncs import ALL_GATHER
from pipebench.simulate.timeline import EVALUATION

# Instructions that have nothing to do for a unit without samples.
_SKIPPED_IF_EMPTY: Final = frozenset(
    {
        Op.LOAD_INPUT, Op.FORWARD, *BACKWARDS, *COPIES, Op.RECEIVE_ACTIVATION, Op.SEND_ACTIVATION, Op.RECEIVE_GRADIENT,
        Op.SEND_GRADIENT,
    }
)  # fmt: skip


class Worker(WorkerReplicas):
    """Executes one worker's instructions: a handler per operation, `handlers`."""

    def __init__(self, setup: Setup, index: int) -> None:
        super().__init__(setup, index)
        self.extensions: dict[str, WorkerExtension] = {}  # those enabled, by name
        self.peaks = WorkerPeaks(self.running)
        self.busy_until_s = 0.0  # end of its last instruction, on a virtual clock
        self.held_version = -1  # version for forwards whose instruction names none (asynchronous training)
        self.measure_memory()
        self.handlers: dict[Op, Handler] = {
            Op.LOAD_INPUT: self._load,
            Op.RECEIVE_ACTIVATION: self._receive_activation,
            Op.FORWARD: self._forward,
            Op.SEND_ACTIVATION: self._send_activation,
            Op.RECEIVE_GRADIENT: self._receive_gradient,
            Op.BACKWARD: self._backward,
            Op.BACKWARD_INPUT: self._backward_input,
            Op.BACKWARD_WEIGHT: self._backward_weight,
            Op.SEND_GRADIENT: self._send_gradient,
            Op.SWAP_OUT: self._swap_out,
            Op.SWAP_IN: self._swap_in,
            Op.WAIT_ALL_REDUCE: self._wait_all_reduce,
            Op.WAIT_SCATTER: self._wait_scatter,
            **dict.fromkeys((Op.GATHER, Op.WAIT_GATHER, Op.FREE), lambda it, _, sums: self.gather_or_free(it, sums)),
            Op.WAIT_TIED: self._wait_tied,
            Op.WAIT_NORM: self._wait_norm,
            Op.UPDATE: self._update,
        }
        for name, make in setup.pipeline.hooks("worker").items():
            self.extensions[name] = make(self)
            self.handlers.update(self.extensions[name].handlers)

    def begin_training(
        self, feed: Feed, first: int, num_minibatches: int, by_extension: Mapping[str, Any] = NOTHING
    ) -> None:
        """Start a segment of training, with nothing in flight.

        Args:
            feed: the segment's data.
            first: first minibatch, numbered since the run's start.
            num_minibatches: minibatches of the segment; `end_early` may lower it.
            by_extension: extensions' parts in the segment, by name.
        """
        scales = {stage: replica.scale for stage, replica in self.replicas.items() if replica.scale is not None}
        self._stages = {stage: replica.stage for stage, replica in self.replicas.items()}
        self._begin(feed, BoundaryValues(self.setup.graph, self.setup.pipeline, self._stages, scales), None)
        self.updates = Updates(self.setup, feed, first, num_minibatches)
        self._drained_versions = {stage: r.weights.newest.number for stage, r in self.replicas.items()}
        for name, extension in self.extensions.items():
            extension.begin(by_extension.get(name))

    def end_training(self) -> None:
        """End a segment of training."""
        for extension in self.extensions.values():
            extension.end()

    def close(self) -> None:
        """Break the reference cycle between the worker and its handlers, so that its memory is freed at once."""
        self.handlers.clear()
        self.extensions.clear()

    def begin_evaluation(self, feed: Feed, scores: Scores) -> None:
        """Start an evaluation, with nothing in flight; `scores` gets the model's outputs."""
        self._stages = {stage: replica.stage.evaluated for stage, replica in self.replicas.items()}
        self._begin(feed, BoundaryValues(self.setup.graph.evaluated, self.setup.pipeline, self._stages, {}), scores)

    def end_evaluation(self) -> None:
        """Drop the states that an evaluation carried between minibatches."""
        for replica in self.replicas.values():
            replica.states.forget("eval")

    def _begin(self, feed: Feed, crossing: BoundaryValues, scores: Scores | None) -> None:
        self.feed = feed
        self.crossing = crossing
        self.is_training = scores is None
        self._scores = scores
        self._activation = ACTIVATION if scores is None else EVALUATION  # kind of the messages forward
        self._inputs: dict[tuple[int, int], list[torch.Tensor]] = {}  # model inputs by stage and unit
        self._norm: torch.Tensor | None = None  # of the gradients of all stages, for the next updates
        self.peaks.change()

    def end_early(self, num_minibatches: int) -> None:
        """Shorten the segment to `num_minibatches`, which leaves out only rounds that have not started here."""
        self.updates.num_minibatches = num_minibatches

    def took(self, instruction: Instruction, seconds: float) -> None:
        """Report an instruction's duration to all extensions."""
        for extension in self.extensions.values():
            extension.took(instruction, seconds)

    def execute(self, instruction: Instruction, transport: Transport, collectives: Collectives) -> UnitLoss | None:
        """Execute an instruction.

        Returns:
            The unit's loss, after a forward through the last stage in training; otherwise None.

        Raises:
            CrossingError: a value can't be sent to another stage; names its layer.
            OutOfMemoryError: the device has no memory left.
            UserCodeError: a model, loss, optimizer or schedule of the user's own fails.
        """
        if instruction.op in _SKIPPED_IF_EMPTY and self.feed.size(instruction.number) == 0:
            # A minibatch with fewer samples than microbatches. Its last backward still ends the round.
            self._end_round(instruction, collectives)
            return None
        self.peaks.begin(instruction.stage)
        try:
            return self.handlers[instruction.op](instruction, transport, collectives)
        except BaseException as error:
            if is_out_of_memory(error):
                raise self._out_of_memory(instruction) from error
            if theirs := located(error, self._place(instruction)):
                raise theirs from error
            raise

    def _place(self, it: Instruction) -> str:
        """Return where in a run an instruction is, in words: the epoch and the minibatches of its unit or round."""
        setup = self.setup
        sampler, rounding = setup.sampler if self.is_training else setup.held_out, setup.graph.rounding
        training = "training" if rounding is None else f"training in {precision_of(rounding)} (train.precision)"
        counts = OPERATIONS[it.op].counts
        if counts == MOVE:
            return f"{training}, {it}"
        if counts == ROUND:
            size, update = setup.pipeline.round_size(it.stage), "update of "
            first = self.feed.minibatch(0)[0] + it.number * size
        else:
            size, update = 1, ""
            first, _ = self.feed.minibatch(it.number)
        epoch, index = divmod(first, sampler.minibatches_per_epoch)
        last = min(index + size, sampler.minibatches_per_epoch)
        which = f"minibatch {last}" if size == 1 else f"minibatches {index + 1} to {last}"
        minibatch = f"{update}{which} of {sampler.minibatches_per_epoch}"
        return f"{training}, epoch {epoch + 1}, {minibatch}" if self.is_training else minibatch

    def _out_of_memory(self, it: Instruction) -> OutOfMemoryError:
        """Return the error of a device without memory for an instruction; it says what this worker holds, by kind."""
        setup, allocator = self.setup, allocator_of(self.setup.device)
        layers, stage = setup.graph.layers, setup.plan.stages[it.stage]
        held = [sum(kind) for kind in zip(*(each.live_by_kind() for each in self.running.values()), strict=True)]
        named = sorted(zip(held, LiveBytes._fields, strict=True), reverse=True)
        parts = ", ".join(f"{kind.replace('_', ' ')} {num_bytes(size)}" for size, kind in named if size)
        most = "" if allocator is None else f", its allocator {num_bytes(allocator.held_bytes)}"
        return OutOfMemoryError(
            f"out of memory in {it}: worker {self.index} ({setup.pipeline.worker_names[self.index]}, "
            f"{layers[stage.start].name} to {layers[stage.stop - 1].name}) held {num_bytes(sum(held))} ({parts}){most}"
        )

    # Handlers, one per operation.

    def _load(self, it: Instruction, _: Transport, __: Collectives) -> None:
        names = self.running[it.stage].inputs if self.is_training else self._stages[it.stage].inputs
        inputs = self.feed.inputs(it.stage, self.index, it.number, names)
        self._inputs[it.stage, it.number] = inputs

    def _receive_activation(self, it: Instruction, transport: Transport, _: Collectives) -> None:
        values = transport.receive(self._activation, it.number, it.peer, it.stage)
        self.crossing.take_values(it.stage, it.number, values)

    def _forward(self, it: Instruction, _: Transport, __: Collectives) -> UnitLoss | None:
        unit = it.number
        inputs = self._inputs.pop((it.stage, unit), [])
        received = self.crossing.received(it.stage, unit)
        if self._scores is not None:
            self._evaluate(it.stage, unit, inputs, received, self._scores)
            return None
        replica, updates = self.running[it.stage], self.updates
        minibatch = self.setup.pipeline.minibatch(unit)[0]  # numbered since the drain, as are an instruction's versions
        version = self.held_version if it.version < 0 else self._drained_versions[it.stage] + it.version
        targets = self.feed.targets(self.index, unit) if replica.is_last else None
        weight = 0.0 if targets is None else self.feed.weight(unit)
        head = None if targets is None else updates.loss_function(targets, minibatch, weight)
        draw, place = self.feed.minibatch(unit), self.feed.place(unit)
        given = UnitInput(unit, draw, inputs, received, version, place, updates.move(it), head)
        values, loss = replica.forward(given)
        self.measure_memory()
        self.crossing.leave(it.stage, unit, values)
        if loss is None:
            return None
        return UnitLoss(updates.summed_loss(loss, minibatch), self.feed.size(unit), weight)

    def _evaluate(
        self, stage: int, unit: int, inputs: Sequence[torch.Tensor], received: Values, scores: Scores
    ) -> None:
        draw, place = self.feed.minibatch(unit), self.feed.place(unit)
        values, output = self.replicas[stage].evaluate(draw, inputs, received, place)
        self.crossing.leave(stage, unit, values)
        if self._stages[stage].is_last:
            scores.add(unit, output, self.feed.targets(self.index, unit), self.feed.weight(unit))

    def _send_activation(self, it: Instruction, transport: Transport, _: Collectives) -> None:
        values = self.crossing.values_for(it.stage, it.number, it.peer)
        transport.send(self._activation, it.number, it.stage, it.peer, values)

    def _receive_gradient(self, it: Instruction, transport: Transport, _: Collectives) -> None:
        gradients = transport.receive(GRADIENT, it.number, it.peer, it.stage)
        self.crossing.take_gradients(it.stage, it.number, it.peer, gradients)

    def _backward(self, it: Instruction, _: Transport, collectives: Collectives) -> None:
        replica, arrived = self.running[it.stage], self.crossing.arrived(it.stage, it.number)
        on_gradient, move = self._on_gradient(it, collectives), self.updates.move(it)
        self._return_gradients(it, replica.backward(it.number, arrived, on_gradient, move))
        for extension in self.extensions.values():
            extension.passed(it.stage)
        self._end_round(it, collectives)

    def _backward_input(self, it: Instruction, _: Transport, __: Collectives) -> None:
        replica, arrived = self.replicas[it.stage], self.crossing.arrived(it.stage, it.number)
        self._return_gradients(it, replica.backward_input(it.number, arrived, self.updates.move(it)))

    def _backward_weight(self, it: Instruction, _: Transport, collectives: Collectives) -> None:
        self.replicas[it.stage].backward_weight(it.number, self._on_gradient(it, collectives))
        self.measure_memory()
        self._end_round(it, collectives)

    def _send_gradient(self, it: Instruction, transport: Transport, _: Collectives) -> None:
        gradients = self.crossing.gradients_for(it.stage, it.number, it.peer)
        transport.send(GRADIENT, it.number, it.stage, it.peer, gradients)

    def _swap_out(self, it: Instruction, transport: Transport, _: Collectives) -> None:
        transport.copied(SWAP_OUT, self.running[it.stage].swap_out(it.number))
        self.measure_memory()

    def _swap_in(self, it: Instruction, transport: Transport, _: Collectives) -> None:
        transport.copied(SWAP_IN, self.running[it.stage].swap_in(it.number))
        self.measure_memory()

    def _wait_all_reduce(self, it: Instruction, _: Transport, collectives: Collectives) -> None:
        replica = self.replicas[it.stage]
        self._end_round(it, collectives)  # the wait ends it where this replica has no unit of the round
        summed = collectives.wait(it.stage, self.replica_index[it.stage], it.number)
        for position in replica.tied_positions:  # `_wait_tied` sums these
            summed[position] = replica.gradients[position]
        replica.accumulation.take_sums(summed)

    def _wait_scatter(self, it: Instruction, transport: Transport, collectives: Collectives) -> None:
        self._wait_all_reduce(it, transport, collectives)
        self.measure_memory()

    def gather_or_free(self, it: Instruction, collectives: Collectives) -> None:
        """Execute a GATHER, WAIT_GATHER or FREE of a sharded stage's weights."""
        weights = self.replicas[it.stage].weights
        if it.op is Op.GATHER:
            weights.allocate()
            collectives.gather(it.stage, ALL_GATHER if self.is_training else EVALUATION)
        elif it.op is Op.WAIT_GATHER:
            collectives.wait_gathered(it.stage)
        else:
            weights.free()
        self.measure_memory()

    def _wait_tied(self, it: Instruction, _: Transport, collectives: Collectives) -> None:
        copies, is_sharded = self.tied[it.peer], self.setup.pipeline.is_sharded
        copies.take(copies.gradients() if is_sharded else collectives.tied(it.peer, it.number))
        self.peaks.change()

    def _wait_norm(self, it: Instruction, _: Transport, collectives: Collectives) -> None:
        self._norm = collectives.norm(it.number)

    def _update(self, it: Instruction, _: Transport, __: Collectives) -> None:
        replica = self.running[it.stage]
        gradients = replica.stepped()
        self.measure_memory()  # in mixed precision these are new tensors, of the masters' types
        keep_from = self._drained_versions[it.stage] + it.version
        self.updates.apply(replica, gradients, it.stage, it.number, self._norm, keep_from=keep_from)
        self.measure_memory()

    def _return_gradients(self, it: Instruction, returning: Gradients) -> None:
        self.measure_memory(self.running[it.stage].recomputed_bytes)
        self.crossing.leave_back(it.stage, it.number, returning)

    def _on_gradient(self, it: Instruction, collectives: Collectives) -> OnGradient | None:
        return collectives.on_gradient(it.stage) if it.reduce >= 0 else None

    def _end_round(self, it: Instruction, collectives: Collectives) -> None:
        """If an instruction ends a round, contribute the round's gradients that no `on_gradient` has taken."""
        if it.reduce >= 0:
            gradients = self.replicas[it.stage].gradients
            collectives.contribute(it.stage, self.replica_index[it.stage], it.reduce, gradients)

    def follow(self, before: "Worker") -> None:
        """Continue the counters of `before`, this worker under other cuts. Until `before` ends, both hold memory."""
        replicas = (*before.replicas.values(), *self.replicas.values())
        at_once = sum(replica.live_bytes() for replica in replicas)
        self.recall(max(before.peaks.device_bytes, at_once), before.versions_max, before.peaks.host_bytes)

    def recall(self, peak_bytes: int, versions_max: int, host_peak_bytes: int) -> None:
        """Restore counters from a checkpoint."""
        self.peaks.device_bytes = max(self.peaks.device_bytes, peak_bytes)
        self.peaks.host_bytes = max(self.peaks.host_bytes, host_peak_bytes)
        for replica in self.replicas.values():
            versions = replica.weights.versions
            versions.most_alive = max(versions.most_alive, versions_max)

    def measure_memory(self, recomputed_bytes: int = 0) -> None:
        """Measure memory, at the end of an instruction or within one; see `WorkerPeaks.measure`."""
        self._report_memory(self.peaks.measure(recomputed_bytes))

    def measure_memory_beside(self, now_s: float) -> None:
        """Measure memory that another worker's instruction, which ends at `now_s`, has changed."""
        self._report_memory(self.peaks.measure_beside(is_idle=now_s >= self.busy_until_s))

    def _report_memory(self, num_bytes: int) -> None:
        for extension in self.extensions.values():
            extension.held(num_bytes)
