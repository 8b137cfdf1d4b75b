"""One worker: executes the instructions of its list on its replica of every stage it has.

It knows no clock. A transport sends and receives, and collectives combine replicas: the virtual engine has these in one
process, the distributed engine between processes. Everything else is the same in both.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from pipebench.engine.accumulation import OnGradient
from pipebench.engine.crossing import BoundaryValues
from pipebench.engine.feed import Feed
from pipebench.engine.gradients import Gradients
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
from pipebench.schedule.operations import ACTIVATION, GRADIENT, OPERATIONS, ROUND, SWAP_IN, SWAP_OUT, Op
from pipebench.schedule.programs import NOTHING
from pipebench.schedule.syncs import ALL_GATHER
from pipebench.simulate.timeline import EVALUATION

_OF_A_UNIT: Final = frozenset(
    {
        Op.LOAD_INPUT, Op.FORWARD, *BACKWARDS, *COPIES, Op.RECEIVE_ACTIVATION, Op.SEND_ACTIVATION, Op.RECEIVE_GRADIENT,
        Op.SEND_GRADIENT,
    }
)  # fmt: skip


class Worker(WorkerReplicas):
    """Executes one worker's computation."""

    def __init__(self, setup: Setup, index: int) -> None:
        super().__init__(setup, index)
        self.extensions: dict[str, WorkerExtension] = {}  # those enabled
        # Peaks over all its replicas, also within instructions (docs/memory.md); on the host, of swapped layers
        self.peak_bytes = self.host_peak_bytes = 0
        # Bytes of every stage at the last note, by kind and on the host; the stages whose may have changed since
        self._held: dict[int, tuple[LiveBytes, int]] = {}
        self._touched, self._stage = {*self.running}, -1  # the latter of the instruction that is executed
        self._live: list[int] = []  # likewise by stage and kind
        self._most: tuple[list[int], int] = [], 0  # likewise the most within its last instruction, and recomputed bytes
        self.busy_until_s = 0.0  # end of its last instruction, on a virtual clock
        self.note_memory()
        self.held_version = -1  # for forwards whose instruction names none (extensions)
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
            **dict.fromkeys((Op.GATHER, Op.WAIT_GATHER, Op.FREE), lambda it, _, sums: self.collective(it, sums)),
            Op.WAIT_TIED: self._wait_tied,
            Op.WAIT_NORM: self._wait_norm,
            Op.UPDATE: self._update,
        }
        for name, make in setup.pipeline.hooks("worker").items():
            self.extensions[name] = make(self)
            self.handlers.update(self.extensions[name].handlers)

    def begin_training(
        self,
        feed: Feed,
        first: int,
        num_minibatches: int,
        divisors: list[float] | None,
        by_extension: Mapping[str, Any] = NOTHING,
    ) -> None:
        """Start a segment of training at minibatch `first`, with nothing in flight.

        `end_early` may lower `num_minibatches`; `divisors` are of `loss_divisors`; `by_extension` has extensions' parts
        in the segment.
        """
        scales = {stage: replica.scale for stage, replica in self.replicas.items() if replica.scale is not None}
        self._stages = {stage: replica.stage for stage, replica in self.replicas.items()}
        self._begin(feed, BoundaryValues(self.setup.graph, self.setup.pipeline, self._stages, scales), None)
        self.updates = Updates(self.setup, first, num_minibatches, divisors)
        self._drained_versions = {stage: r.weights.newest.number for stage, r in self.replicas.items()}
        for name, extension in self.extensions.items():
            extension.begin(by_extension.get(name))

    def end_training(self) -> None:
        """End a segment."""
        for extension in self.extensions.values():
            extension.end()

    def close(self) -> None:
        """End it: its memory is freed with the last reference, since it and its handlers don't hold each other then."""
        self.handlers.clear()
        self.extensions.clear()

    def begin_evaluation(self, feed: Feed, scores: Scores) -> None:
        """Start an evaluation, with nothing in flight; `scores` sums over the model's outputs."""
        self._stages = {stage: replica.stage.evaluated for stage, replica in self.replicas.items()}
        self._begin(feed, BoundaryValues(self.setup.graph.evaluated, self.setup.pipeline, self._stages, {}), scores)

    def end_evaluation(self) -> None:
        """Drop the states that an evaluation carried between minibatches."""
        for replica in self.replicas.values():
            replica.states.forget("eval")

    def _begin(self, feed: Feed, crossing: BoundaryValues, scores: Scores | None) -> None:
        self.feed = feed
        self.crossing = crossing
        self._scores = scores
        self._touched.update(self.running)
        self._inputs: dict[tuple[int, int], list[torch.Tensor]] = {}  # by stage and unit
        self._norm: torch.Tensor | None = None

    def end_early(self, num_minibatches: int) -> None:
        """Shorten the segment by whole rounds of minibatches that have not started here."""
        self.updates.num_minibatches = num_minibatches

    @property
    def trains(self) -> bool:
        """Whether it trains, rather than evaluates."""
        return self._scores is None

    def took(self, instruction: Instruction, seconds: float) -> None:
        """Let extensions take note of an instruction's time."""
        for extension in self.extensions.values():
            extension.took(instruction, seconds)

    def execute(self, instruction: Instruction, transport: Transport, collectives: Collectives) -> UnitLoss | None:
        """Execute an instruction; return the loss of a unit after its forward through the last stage in training.

        Raises:
            CrossingError: a value can't be sent to another stage; names its layer.
        """
        if instruction.op in _OF_A_UNIT and self.feed.size(instruction.number) == 0:
            # In a minibatch with fewer samples than microbatches: nothing to do, but a backward may end a round.
            self._end_round(instruction, collectives)
            return None
        self._stage = instruction.stage
        self._touched.add(self._stage)
        try:
            return self.handlers[instruction.op](instruction, transport, collectives)
        except BaseException as error:
            if is_out_of_memory(error):
                raise self._out_of_memory(instruction) from error
            if theirs := located(error, self._place(instruction)):
                raise theirs from error
            raise

    def _place(self, it: Instruction) -> str:
        """Return where in a run an instruction is: epoch and minibatches, or the instruction if it is of none."""
        setup = self.setup
        sampler, rounding = setup.sampler if self.trains else setup.held_out, setup.graph.rounding
        training = "training" if rounding is None else f"training in {precision_of(rounding)} (train.precision)"
        of_round = OPERATIONS[it.op].about == ROUND
        if it.op not in _OF_A_UNIT and not of_round:
            return f"{training}, {it}"
        size = setup.pipeline.round_size(it.stage) if of_round else 1
        first = self.feed.minibatch(0)[0] + it.number * size if of_round else self.feed.minibatch(it.number)[0]
        epoch, index = divmod(first, sampler.minibatches_per_epoch)
        last = min(index + size, sampler.minibatches_per_epoch)
        which = f"minibatch {last}" if size == 1 else f"minibatches {index + 1} to {last}"
        minibatch = f"{'update of ' if of_round else ''}{which} of {sampler.minibatches_per_epoch}"
        return f"{training}, epoch {epoch + 1}, {minibatch}" if self.trains else minibatch

    def _out_of_memory(self, it: Instruction) -> OutOfMemoryError:
        """Return the error of a device that has no memory left for an instruction: where, and what is held there."""
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

    # One method per instruction.

    def _load(self, it: Instruction, _: Transport, __: Collectives) -> None:
        names = self.running[it.stage].inputs if self._scores is None else self._stages[it.stage].inputs
        inputs = self.feed.inputs(it.stage, self.index, it.number, names)
        self._inputs[it.stage, it.number] = inputs

    def _receive_activation(self, it: Instruction, transport: Transport, _: Collectives) -> None:
        kind = ACTIVATION if self._scores is None else EVALUATION
        values = transport.receive(kind, it.number, it.peer, it.stage)
        self.crossing.take_values(it.stage, it.number, values)

    def _forward(self, it: Instruction, _: Transport, __: Collectives) -> UnitLoss | None:
        unit = it.number
        inputs = self._inputs.pop((it.stage, unit), [])
        received = self.crossing.received(it.stage, unit)
        if self._scores is not None:
            self._evaluate(it.stage, unit, inputs, received, self._scores)
            return None
        replica, updates, minibatch = self.running[it.stage], self.updates, self.setup.pipeline.minibatch(unit)[0]
        version = self.held_version if it.version < 0 else self._drained_versions[it.stage] + it.version
        targets = self.feed.targets(self.index, unit) if replica.is_last else None
        head = None if targets is None else updates.loss_function(targets, minibatch)
        draw, place = self.feed.minibatch(unit), self.feed.place(unit)
        given = UnitInput(unit, draw, inputs, received, version, place, updates.move(it), head)
        values, loss = replica.forward(given)
        self.note_memory()
        self.crossing.leave(it.stage, unit, values)
        if loss is None:
            return None
        return UnitLoss(updates.summed_loss(loss, minibatch), self.feed.size(unit), self.feed.weight(unit))

    def _evaluate(
        self, stage: int, unit: int, inputs: Sequence[torch.Tensor], received: Values, scores: Scores
    ) -> None:
        draw, place = self.feed.minibatch(unit), self.feed.place(unit)
        values, output = self.replicas[stage].evaluate(draw, inputs, received, place)
        self.crossing.leave(stage, unit, values)
        if self._stages[stage].is_last:
            scores.add(output, self.feed.targets(self.index, unit), self.feed.weight(unit))

    def _send_activation(self, it: Instruction, transport: Transport, _: Collectives) -> None:
        kind = ACTIVATION if self._scores is None else EVALUATION
        values = self.crossing.values_for(it.stage, it.number, it.peer)
        transport.send(kind, it.number, it.stage, it.peer, values)

    def _receive_gradient(self, it: Instruction, transport: Transport, _: Collectives) -> None:
        gradients = transport.receive(GRADIENT, it.number, it.peer, it.stage)
        self.crossing.take_gradients(it.stage, it.number, it.peer, gradients)

    def _backward(self, it: Instruction, _: Transport, collectives: Collectives) -> None:
        replica, arrived = self.running[it.stage], self.crossing.arrived(it.stage, it.number)
        on_gradient, move = self._on_gradient(it, collectives), self.updates.move(it)
        self._leave_back(it, replica.backward(it.number, arrived, on_gradient, move))
        for extension in self.extensions.values():
            extension.passed(it.stage)
        self._end_round(it, collectives)

    def _backward_input(self, it: Instruction, _: Transport, __: Collectives) -> None:
        replica, arrived = self.replicas[it.stage], self.crossing.arrived(it.stage, it.number)
        self._leave_back(it, replica.backward_input(it.number, arrived, self.updates.move(it)))

    def _backward_weight(self, it: Instruction, _: Transport, collectives: Collectives) -> None:
        self.replicas[it.stage].backward_weight(it.number, self._on_gradient(it, collectives))
        self.note_memory()
        self._end_round(it, collectives)

    def _send_gradient(self, it: Instruction, transport: Transport, _: Collectives) -> None:
        gradients = self.crossing.gradients_for(it.stage, it.number, it.peer)
        transport.send(GRADIENT, it.number, it.stage, it.peer, gradients)

    def _swap_out(self, it: Instruction, transport: Transport, _: Collectives) -> None:
        transport.copied(SWAP_OUT, self.running[it.stage].swap_out(it.number))
        self.note_memory()

    def _swap_in(self, it: Instruction, transport: Transport, _: Collectives) -> None:
        transport.copied(SWAP_IN, self.running[it.stage].swap_in(it.number))
        self.note_memory()

    def _wait_all_reduce(self, it: Instruction, _: Transport, collectives: Collectives) -> None:
        replica = self.replicas[it.stage]
        if it.reduce >= 0:  # no backward of the round ran here
            collectives.contribute(it.stage, self.replica_index[it.stage], it.reduce, replica.gradients)
        summed = collectives.wait(it.stage, self.replica_index[it.stage], it.number)
        for position in replica.apart:
            summed[position] = replica.gradients[position]
        replica.take_sums(summed)

    def _wait_scatter(self, it: Instruction, transport: Transport, collectives: Collectives) -> None:
        self._wait_all_reduce(it, transport, collectives)
        self.note_memory()

    def collective(self, it: Instruction, collectives: Collectives) -> None:
        """Gather the weights of a sharded stage, wait for them, or free them."""
        weights = self.replicas[it.stage].weights
        if it.op is Op.GATHER:
            weights.allocate()
            collectives.gather(it.stage, ALL_GATHER if self.trains else EVALUATION)
        elif it.op is Op.WAIT_GATHER:
            collectives.wait_gathered(it.stage)
        else:
            weights.free()
        self.note_memory()

    def _wait_tied(self, it: Instruction, _: Transport, collectives: Collectives) -> None:
        self.tied[it.peer].take(collectives.tied(it.peer, it.number))
        self._touched.update(self.running)

    def _wait_norm(self, it: Instruction, _: Transport, collectives: Collectives) -> None:
        self._norm = collectives.norm(it.number)

    def _update(self, it: Instruction, _: Transport, __: Collectives) -> None:
        replica = self.running[it.stage]
        gradients = replica.stepped()
        self.note_memory()
        keep_from = self._drained_versions[it.stage] + it.version
        self.updates.apply(replica, gradients, it.stage, it.number, self._norm, keep_from=keep_from)
        self.note_memory()

    def _leave_back(self, it: Instruction, returning: Gradients) -> None:
        self.note_memory(self.running[it.stage].again_bytes)
        self.crossing.leave_back(it.stage, it.number, returning)

    def _on_gradient(self, it: Instruction, collectives: Collectives) -> OnGradient | None:
        return collectives.on_gradient(it.stage) if it.reduce >= 0 else None

    def _end_round(self, it: Instruction, collectives: Collectives) -> None:
        """Contribute the gradients of a round's last backward, or weight part, that were not taken during it."""
        if it.reduce >= 0:
            gradients = self.replicas[it.stage].gradients
            collectives.contribute(it.stage, self.replica_index[it.stage], it.reduce, gradients)

    def follow(self, before: "Worker") -> None:
        """Take over the counters of the worker before, which was cut otherwise; both hold memory until it ends."""
        replicas = (*before.replicas.values(), *self.replicas.values())
        at_once = sum(replica.live_bytes() for replica in replicas)
        self.recall(max(before.peak_bytes, at_once), before.versions_max, before.host_peak_bytes)

    def recall(self, peak_bytes: int, versions_max: int, host_peak_bytes: int) -> None:
        """Restore counters from a checkpoint."""
        self.peak_bytes = max(self.peak_bytes, peak_bytes)
        self.host_peak_bytes = max(self.host_peak_bytes, host_peak_bytes)
        for replica in self.replicas.values():
            versions = replica.weights.versions
            versions.most_alive = max(versions.most_alive, versions_max)

    def note_memory(self, again_bytes: int = 0) -> None:
        """Update the peak: of each kind the larger of now and the last note, plus `again_bytes` recomputed since."""
        self._most = self._live, again_bytes
        self._note_beside_the_most()

    def note_beside(self, now_s: float) -> None:
        """Update the peak when another worker has changed what this one holds, maybe while its instruction runs."""
        if now_s >= self.busy_until_s:
            self._most = [], 0
        self._touched.update(self.running)
        self._note_beside_the_most()

    def _note_beside_the_most(self) -> None:
        most, again_bytes = self._most
        for stage in self._touched & self.running.keys():
            self._held[stage] = self.running[stage].live_by_kind(), self.running[stage].host_bytes()
        self._touched = {self._stage}
        self._live = [each for kinds, _ in self._held.values() for each in kinds]
        most = [*map(max, self._live, most or self._live)]
        self._most, held_bytes = (most, again_bytes), again_bytes + sum(most)
        self.peak_bytes = max(self.peak_bytes, held_bytes)
        for extension in self.extensions.values():
            extension.held(held_bytes)
        self.host_peak_bytes = max(self.host_peak_bytes, sum(on_host for _, on_host in self._held.values()))


def host_peaks(facts: Mapping[str, Any]) -> list[int]:
    """Return every worker's peak bytes on the host; none in facts from before swapping existed."""
    found: list[int] = facts.get("host_peak_bytes") or [0] * len(facts["peak_bytes"])
    return found
