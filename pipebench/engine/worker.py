"""One worker: executes the instructions of its list on its replica of every stage it has.

It knows no clock. What leaves is handed to a transport, what arrives is asked of it, and what replicas do together is
left to collectives: the virtual engine has these in one process, the distributed engine between processes. Everything
else about an instruction, in training and in evaluation, is the same in both.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from pipebench.checkpoint.handover import Claim
from pipebench.checkpoint.state import ModelState
from pipebench.engine.accumulation import OnGradient
from pipebench.engine.clipping import clipped, gradient_norm
from pipebench.engine.feed import Feed
from pipebench.engine.migration import GivenUnit, Migrating
from pipebench.engine.monitor import Monitor
from pipebench.engine.phases import Phases
from pipebench.engine.prediction import AS_IT_IS, Move
from pipebench.engine.protocols import Collectives, Transport, UnitLoss
from pipebench.engine.replica import Replica, Values
from pipebench.engine.replica_state import held_by, names_in, restore, state_of
from pipebench.engine.scores import Scores
from pipebench.engine.setup import Setup, loss_divisors, minibatch_weight, share_of
from pipebench.engine.structure import CrossingError, flatten
from pipebench.model.stage import LossFunction, Stage, cut_stage
from pipebench.schedule.instructions import Instruction, Op
from pipebench.schedule.moves import HandOver
from pipebench.schedule.pipeline import SPLIT
from pipebench.schedule.syncs import SYNCS
from pipebench.schedule.weights import WEIGHT_POLICIES
from pipebench.simulate.timeline import ACTIVATION, EVALUATION, GRADIENT, MIGRATION, SWAP_IN, SWAP_OUT

Gradients = dict[int, list[Any]]  # layer index to the gradients of its output's tensors
_SCALE = -1  # in the place of a layer: the one number that these gradients are multiplied by, if they are
Key = tuple[int, int]  # stage, unit


class Worker:
    """Executes what one worker computes.

    Args:
        setup: what is run.
        index: which worker.

    Attributes:
        replicas: its replica of every stage it has, by stage.
        replica_index: which replica of its stages it is.
        peak_bytes: the most bytes that they have held together.
        host_peak_bytes: likewise on the host, of layers that are swapped.
        monitor: measures its stage, where Algorithm 1 balances stages.
    """

    def __init__(self, setup: Setup, index: int) -> None:
        self.setup = setup
        self.index = index
        self.replica_index = setup.pipeline.replica_of(index)
        self.replicas = {
            stage: make_replica(setup, stage, cut_stage(setup.graph, setup.plan, stage))
            for stage in setup.pipeline.stages_of(index)
        }
        self._phases: Phases | None = None
        self._running: dict[int, Replica | Migrating] = {**self.replicas}
        self.monitor: Monitor | None = None
        self.peak_bytes = self.host_peak_bytes = 0
        self._note_memory()
        self._shares = {stage: share_of(setup, stage, self.replica_index) for stage in self.replicas}
        self._handlers: dict[Op, Callable[[Instruction, Transport, Collectives], UnitLoss | None]] = {
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
            Op.WAIT_NORM: self._wait_norm,
            Op.UPDATE: self._update,
            Op.PUSH: self._push,
            Op.PULL: self._pull,
            Op.RECUT: self._recut,
            Op.GIVE_UNIT: self._give_unit,
            Op.GIVE: self._give,
            Op.TAKE_UNIT: self._take_unit,
            Op.FORWARD_AGAIN: self._forward_again,
            Op.TAKE: self._take,
        }

    @property
    def is_last(self) -> bool:
        """Whether it has the last stage, which computes the loss."""
        return self.setup.pipeline.num_stages - 1 in self.replicas

    def open_data(self) -> None:
        """Fetch a minibatch of what this worker reads: a data set may open files only now, and no clock runs yet."""
        fields = dict(zip(self.setup.graph.inputs, self.setup.dataset.inputs, strict=True))
        names = [fields[name] for replica in self.replicas.values() for name in replica.stage.inputs]
        names += self.setup.dataset.targets if self.is_last else []
        if names:
            self.setup.dataset.fetch("train", self.setup.sampler.indices(0), names)

    def begin_training(
        self,
        feed: Feed,
        first: int,
        num_minibatches: int,
        divisors: list[float] | None,
        phases: Phases | None = None,
    ) -> None:
        """Start a segment of training, with nothing in flight.

        Args:
            feed: the segment's data.
            first: the minibatch that the segment begins with.
            num_minibatches: its length; `end_early` may lower it.
            divisors: `loss_divisors` of it.
            phases: the cuts that it goes through, where layers may move.
        """
        self._begin(feed, {stage: replica.stage for stage, replica in self.replicas.items()}, None)
        if self.monitor is not None:
            self.monitor.begin()
        self._first = first
        self._num_minibatches = num_minibatches
        self._divisors = divisors
        self._phases = phases
        self._bounds = {s: (self.setup.plan.stages[s].start, self.setup.plan.stages[s].stop) for s in self.replicas}
        self._given_units: dict[tuple[int, int, int], GivenUnit] = {}  # by stage, unit and where it comes from
        self._drained_versions = {stage: r.weights.newest.number for stage, r in self.replicas.items()}
        if not SYNCS[self.setup.pipeline.sync].waits:
            self._held = {stage: replica.weights.hold() for stage, replica in self.replicas.items()}

    def end_training(self) -> None:
        """End a segment: where layers have moved, the stages are cut as they stand now, for evaluations, too."""
        phases, self._phases = self._phases, None
        if phases is None or not phases.routes.moves.announced:
            return
        self.setup = phases.last
        for stage, replica in self.replicas.items():
            made = make_replica(self.setup, stage, cut_stage(self.setup.graph, self.setup.plan, stage))
            restore(made, held_by(replica, self._shares[stage]), self._shares[stage])
            made.weights.newest.number = replica.weights.newest.number
            made.weights.most_alive = replica.weights.most_alive
            self.replicas[stage] = self._running[stage] = made

    def begin_evaluation(self, feed: Feed, scores: Scores) -> None:
        """Start an evaluation, with nothing in flight; `scores` takes what the model puts out."""
        self._begin(feed, {stage: replica.stage.evaluated for stage, replica in self.replicas.items()}, scores)

    def end_evaluation(self) -> None:
        """Let go of what an evaluation carried from minibatch to minibatch."""
        for replica in self.replicas.values():
            replica.forget("eval")

    def _begin(self, feed: Feed, stages: Mapping[int, Stage], scores: Scores | None) -> None:
        self._feed = feed
        self._stages = stages
        self._scores = scores
        self._inputs: dict[Key, list[torch.Tensor]] = {}
        self._received: dict[Key, Values] = {}
        self._outgoing: dict[Key, Values] = {}
        self._can_cross: set[tuple[int, int]] = set()
        self._arriving: dict[Key, dict[int, Gradients]] = {}  # by the stage that sends them
        self._returning: dict[Key, Gradients] = {}
        self._norm: torch.Tensor | None = None

    def end_early(self, num_minibatches: int) -> None:
        """Let the segment be shorter, by whole rounds of minibatches that haven't begun here."""
        self._num_minibatches = num_minibatches

    def execute(self, instruction: Instruction, transport: Transport, collectives: Collectives) -> UnitLoss | None:
        """Execute an instruction; return the loss of a unit that has run through the last stage in training.

        Raises:
            CrossingError: a value can't be handed to another stage, in processes or not; names its layer.
        """
        return self._handlers[instruction.op](instruction, transport, collectives)

    # One method per instruction. A unit without samples, of a short minibatch with fewer than microbatches, does
    # nothing anywhere, but that its backward may be the last of a round.

    def _load(self, it: Instruction, _: Transport, __: Collectives) -> None:
        if self._feed.size(it.number) > 0:
            names = self._running[it.stage].inputs if self._scores is None else self._stages[it.stage].inputs
            inputs = self._feed.inputs(it.stage, self.index, it.number, names)
            self._inputs[it.stage, it.number] = inputs

    def _receive_activation(self, it: Instruction, transport: Transport, _: Collectives) -> None:
        if self._feed.size(it.number) > 0:
            kind = ACTIVATION if self._scores is None else EVALUATION
            self._take_activation(it.stage, it.number, transport.receive(kind, it.number, it.peer, it.stage))
            if self.monitor is not None and self._scores is None:
                self.monitor.received(it, transport)

    def _forward(self, it: Instruction, _: Transport, __: Collectives) -> UnitLoss | None:
        unit = it.number
        if self._feed.size(unit) == 0:
            return None
        inputs = self._inputs.pop((it.stage, unit), [])
        received = self._received.pop((it.stage, unit), {})
        if self._scores is not None:
            self._evaluate(it.stage, unit, inputs, received, self._scores)
            return None
        replica, minibatch = self._running[it.stage], self.setup.pipeline.minibatch(unit)[0]
        values, loss = replica.forward(
            unit,
            self._feed.minibatch(unit),
            inputs,
            received,
            self._feed.place(unit),
            version=self._held[it.stage] if it.version < 0 else self._drained_versions[it.stage] + it.version,
            move=self._move(it),
            loss=self._loss_function(unit) if replica.is_last else None,
        )
        if self._sends(it.stage, unit):  # else nobody asks for them
            self._outgoing[it.stage, unit] = values
        self._note_memory()
        self._hand_over(it.stage, unit)
        if loss is None:
            return None
        total = loss if self._divisors is None else loss * self._divisors[minibatch]
        return UnitLoss(total, self._feed.size(unit), self._feed.weight(unit))

    def _evaluate(
        self, stage: int, unit: int, inputs: Sequence[torch.Tensor], received: Values, scores: Scores
    ) -> None:
        draw, place = self._feed.minibatch(unit), self._feed.place(unit)
        self._outgoing[stage, unit], output = self.replicas[stage].evaluate(draw, inputs, received, place)
        self._hand_over(stage, unit)
        if self._stages[stage].is_last:
            scores.add(output, self._feed.targets(unit), self._feed.weight(unit))

    def _send_activation(self, it: Instruction, transport: Transport, _: Collectives) -> None:
        if self._feed.size(it.number) > 0:
            kind = ACTIVATION if self._scores is None else EVALUATION
            transport.send(kind, it.number, it.stage, it.peer, self._activation_for(it.stage, it.number, it.peer))
            if self.monitor is not None and self._scores is None:
                self.monitor.sent(it, transport)

    def _receive_gradient(self, it: Instruction, transport: Transport, _: Collectives) -> None:
        if self._feed.size(it.number) > 0:
            gradients = transport.receive(GRADIENT, it.number, it.peer, it.stage)
            self._arriving.setdefault((it.stage, it.number), {})[it.peer] = gradients
            if self.monitor is not None:
                self.monitor.received(it, transport)

    def _backward(self, it: Instruction, _: Transport, collectives: Collectives) -> None:
        if self._feed.size(it.number) > 0:
            replica, arrived = self._running[it.stage], self._arrived(it)
            on_gradient = self._on_gradient(it, collectives)
            if isinstance(replica, Migrating):
                self._return(it, replica.backward(it.number, arrived))
                self._gather(it.stage)
            else:
                self._return(it, replica.backward(it.number, replica.heads(arrived), on_gradient, self._move(it)))
        self._end_round(it, collectives)

    def _backward_input(self, it: Instruction, _: Transport, __: Collectives) -> None:
        if self._feed.size(it.number) > 0:
            replica = self.replicas[it.stage]
            heads = replica.heads(self._arrived(it))
            self._return(it, replica.backward_input(it.number, heads, self._move(it)))

    def _backward_weight(self, it: Instruction, _: Transport, collectives: Collectives) -> None:
        if self._feed.size(it.number) > 0:
            self.replicas[it.stage].backward_weight(it.number, self._on_gradient(it, collectives))
            self._note_memory()
        self._end_round(it, collectives)

    def _send_gradient(self, it: Instruction, transport: Transport, _: Collectives) -> None:
        if self._feed.size(it.number) > 0:
            transport.send(GRADIENT, it.number, it.stage, it.peer, self._gradient_for(it.stage, it.number, it.peer))
            if self.monitor is not None:
                self.monitor.sent(it, transport)

    def _swap_out(self, it: Instruction, transport: Transport, _: Collectives) -> None:
        if self._feed.size(it.number) > 0:
            transport.copied(SWAP_OUT, self._running[it.stage].swap_out(it.number))
            self._note_memory()

    def _swap_in(self, it: Instruction, transport: Transport, _: Collectives) -> None:
        if self._feed.size(it.number) > 0:
            transport.copied(SWAP_IN, self._running[it.stage].swap_in(it.number))
            self._note_memory()

    def _wait_all_reduce(self, it: Instruction, _: Transport, collectives: Collectives) -> None:
        replica = self.replicas[it.stage]
        if it.reduce >= 0:  # no backward of the round ran here
            collectives.contribute(it.stage, self.replica_index, it.reduce, replica.gradients)
        replica.gradients = collectives.wait(it.stage, it.number)

    def _wait_norm(self, it: Instruction, _: Transport, collectives: Collectives) -> None:
        self._norm = collectives.norm(it.number)

    def _update(self, it: Instruction, _: Transport, __: Collectives) -> None:
        setup, replica = self.setup, self._running[it.stage]
        gradients = replica.stepped()
        self._note_memory()
        keep_from = self._drained_versions[it.stage] + it.version
        if replica.scale is not None:
            gradients = [None if g is None else g / replica.scale.value for g in gradients]
            norm = gradient_norm(gradients) if self._norm is None else self._norm
            finite = bool(norm.isfinite())  # a GPU is waited for here, as by torch's GradScaler
            replica.scale.update(finite=finite)
            if not finite:
                replica.skip_update(keep_from=keep_from)
                return
        if self._divisors is None:
            weight = sum(minibatch_weight(setup, self._first + k) for k in self._round(it.stage, it.number))
            gradients = [None if g is None else g / weight for g in gradients]
        if setup.clip_norm is not None:
            norm = gradient_norm(gradients) if self._norm is None else self._norm
            gradients = clipped(gradients, norm, setup.clip_norm)
        lr = self._lr(it.stage, it.number)
        replica.update(gradients, lr, keep_from=keep_from)
        self._note_memory()

    # Layers that move: see `Migrating`.

    def _recut(self, it: Instruction, _: Transport, __: Collectives) -> None:
        self._migrating(it.stage).part(self._block(it.stage, it.peer, it.number))
        self._note_memory()

    def _give_unit(self, it: Instruction, transport: Transport, _: Collectives) -> None:
        if self._feed.size(it.number) > 0:
            given = self._migrating(it.stage).give_unit(it.number, it.peer)
            transport.send(MIGRATION, it.number, it.stage, it.peer, given.to_plain())

    def _give(self, it: Instruction, transport: Transport, _: Collectives) -> None:
        state = self._migrating(it.stage).give(it.peer)
        transport.send(MIGRATION, it.number, it.stage, it.peer, vars(state))
        self._gather(it.stage)

    def _take_unit(self, it: Instruction, transport: Transport, _: Collectives) -> None:
        if self._feed.size(it.number) > 0:
            given = transport.receive(MIGRATION, it.number, it.peer, it.stage)
            self._given_units[it.stage, it.number, it.peer] = GivenUnit.from_plain(given)

    def _forward_again(self, it: Instruction, _: Transport, __: Collectives) -> None:
        given = self._given_units.pop((it.stage, it.number, it.peer), None)
        if given is not None:
            block, draw, place = (
                self._block(it.peer, it.stage, it.number),
                self._feed.minibatch(it.number),
                self._feed.place(it.number),
            )
            self._migrating(it.stage).forward_again(block, it.number, given, draw, place)
            self._note_memory()

    def _take(self, it: Instruction, transport: Transport, _: Collectives) -> None:
        state = ModelState(**transport.receive(MIGRATION, it.number, it.peer, it.stage))
        self._migrating(it.stage).take(self._block(it.peer, it.stage, it.number), state)
        self._note_memory()
        self._gather(it.stage)

    def _block(self, source: int, target: int, minibatch: int) -> HandOver:
        assert self._phases is not None
        return self._phases.routes.moves.handed(source, target, minibatch)

    def _migrating(self, stage: int) -> Migrating:
        """Return a stage some of whose layers move; the first to ask makes it of its replica."""
        replica, phases = self._running[stage], self._phases
        if isinstance(replica, Migrating):
            return replica
        assert phases is not None
        bounds = self._bounds[stage]
        made = Migrating(replica, bounds, self._shares[stage], phases, lambda cut: make_replica(self.setup, stage, cut))
        self._running[stage] = made
        return made

    def _gather(self, stage: int) -> None:
        """Let one replica run a stage again, if nothing more is handed over or in flight in others."""
        migrating = self._running[stage]
        if isinstance(migrating, Migrating) and (whole := migrating.whole) is not None:
            self.replicas[stage] = self._running[stage] = whole.replica
            self._bounds[stage] = whole.bounds

    def _push(self, it: Instruction, _: Transport, collectives: Collectives) -> None:
        replica, gradients = self.replicas[it.stage], self.replicas[it.stage].gradients
        if self.setup.clip_norm is not None:
            gradients = clipped(gradients, gradient_norm(gradients), self.setup.clip_norm)
        collectives.push(it.stage, self.replica_index, it.number, self._held[it.stage], gradients)
        replica.gradients = [None] * len(gradients)
        self._note_memory()

    def _pull(self, it: Instruction, _: Transport, collectives: Collectives) -> None:
        number, parameters = collectives.pull(it.stage, self.replica_index, it.version)
        if parameters is not None:
            self.replicas[it.stage].weights.take(number, parameters)
        self._held[it.stage] = number

    def _move(self, it: Instruction) -> Move:
        """Return how far a pass's weights are from their version; the rate is that of the update after the version."""
        return Move(it.ahead, self._lr(it.stage, it.version)) if it.ahead else AS_IT_IS

    def _round(self, stage: int, round_index: int) -> range:
        """Return the minibatches of a stage's round, numbered since the drain."""
        return self.setup.pipeline.round_minibatches(stage, round_index, self._num_minibatches)

    def _lr(self, stage: int, round_index: int) -> float:
        """Return the learning rate of the update that a round of a stage gives."""
        sampler, minibatches = self.setup.sampler, self._round(stage, round_index)
        samples = sum(sampler.size(self._first + k) for k in minibatches)
        return self.setup.lr(stage, sampler.samples_before(self._first + minibatches.start), samples)

    # What else is asked of a worker.

    def squared_norm(self) -> torch.Tensor:
        """Return the squared norm of the round's gradients, one float32: what a norm shared by all stages sums.

        The first replicas speak for their stages, the others say 0: by then all have the same gradients.
        """
        total = torch.zeros(1, device=self.setup.device)
        if self.replica_index == 0:
            for replica in self.replicas.values():
                norm = gradient_norm(replica.gradients) / (1.0 if replica.scale is None else replica.scale.value)
                total += norm.square().float().to(self.setup.device)
        return total

    def buffers(self, stage: int) -> list[torch.Tensor]:
        """Return a stage's running statistics, which a drain averages over its replicas."""
        return [buffer for buffer in self.replicas[stage].module.buffers() if buffer.is_floating_point()]

    def parts(self) -> list[tuple[str, ModelState]]:
        """Return what this worker contributes to a checkpoint, by name."""
        return [
            (f"stage-{stage}-replica-{self.replica_index}", state_of(replica, self._shares[stage]))
            for stage, replica in self.replicas.items()
        ]

    def restore(self, state: ModelState) -> None:
        """Go on from a checkpoint of the whole model, taken under any plan."""
        for stage, replica in self.replicas.items():
            restore(replica, state, self._shares[stage])

    def held(self) -> ModelState:
        """Return all that this worker holds of the model's state at a drain: references, not copies."""
        return ModelState.merge(held_by(replica, self._shares[stage]) for stage, replica in self.replicas.items())

    def claim(self) -> Claim:
        """Return what this worker needs of a model's state."""
        shares = self._shares
        return Claim(
            frozenset(shares[stage].names[n] for stage, replica in self.replicas.items() for n in names_in(replica)),
            frozenset(path for replica in self.replicas.values() for path in replica.stage.stateful),
            next(iter(shares.values())),
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return what `Replica.tensors` does of the stages that this worker speaks for."""
        if self.replica_index > 0:
            return {}
        return {name: tensor for replica in self.replicas.values() for name, tensor in replica.tensors().items()}

    @property
    def loss_scales(self) -> list[tuple[float, int]]:
        """The scale of every stage's gradients and the updates that it has skipped; empty without scaling."""
        scales = (replica.scale for replica in self.replicas.values())
        return [(scale.value, scale.num_skipped) for scale in scales if scale is not None]

    @property
    def versions_max(self) -> int:
        """The most weight versions of a stage that were alive at once."""
        return max(replica.weights.most_alive for replica in self.replicas.values())

    def recall(self, peak_bytes: int, versions_max: int, host_peak_bytes: int) -> None:
        """Take up what was counted before the checkpoint that this worker goes on from."""
        self.peak_bytes = max(self.peak_bytes, peak_bytes)
        self.host_peak_bytes = max(self.host_peak_bytes, host_peak_bytes)
        for replica in self.replicas.values():
            replica.weights.most_alive = max(replica.weights.most_alive, versions_max)

    # Values on their way.

    def _within_worker(self, others: Iterable[int], stage: int) -> list[int]:
        """Return those stages that this worker has, too: what goes from one of its stages to another doesn't travel."""
        return [other for other in others if other in self.replicas and other != stage]

    def _sends(self, stage: int, unit: int) -> Mapping[int, tuple[int, ...]]:
        """Return the layers whose values of a unit go to other stages, by stage."""
        if self._phases is None or self._scores is not None:
            return self._stages[stage].sends
        return self._phases.sends(stage, self.setup.pipeline.minibatch(unit)[0])

    def _returns(self, stage: int, unit: int) -> Mapping[int, tuple[int, ...]]:
        """Return the layers whose gradients of a unit go back to other stages, by stage."""
        if self._phases is None:
            return self.replicas[stage].stage.receives
        return self._phases.returns(stage, self.setup.pipeline.minibatch(unit)[0])

    def _hand_over(self, stage: int, unit: int) -> None:
        for target in self._within_worker(self._stages[stage].sends, stage):
            self._take_activation(target, unit, self._activation_for(stage, unit, target))

    def _take_activation(self, stage: int, unit: int, values: Values) -> None:
        self._received.setdefault((stage, unit), {}).update(values)

    def _activation_for(self, stage: int, unit: int, target: int) -> Values:
        """Return the values of a unit that stage `target` reads; it asks once, the last one to ask takes the rest."""
        outgoing, sends = self._outgoing.get((stage, unit), {}), self._sends(stage, unit)
        values = {layer: outgoing[layer] for layer in sends[target] if layer in outgoing}
        if values and (stage, target) not in self._can_cross:  # the first unit shows what the others will be
            self._check_crossing(values)
            self._can_cross.add((stage, target))
        if target == self._asks_last(sends):
            self._outgoing.pop((stage, unit), None)
        return values

    def _asks_last(self, sends: Iterable[int]) -> int:
        """Return the last stage to be given a unit's values: those of this worker are served before all others."""
        away = [target for target in sends if target not in self.replicas]
        return max(away or sends)

    def _arrived(self, it: Instruction) -> Gradients:
        return self._total(it.stage, self._arriving.pop((it.stage, it.number), {}))

    def _return(self, it: Instruction, returning: Gradients) -> None:
        """Keep the gradients that a backward gave until they are sent; stages of this worker have them at once."""
        if gradients := {layer: found for layer, found in returning.items() if found}:
            self._returning[it.stage, it.number] = gradients
        self._note_memory()
        for source in self._within_worker(self.replicas[it.stage].stage.receives, it.stage):
            if own := self._gradient_for(it.stage, it.number, source):
                self._arriving.setdefault((source, it.number), {})[it.stage] = own

    def _on_gradient(self, it: Instruction, collectives: Collectives) -> OnGradient | None:
        return collectives.on_gradient(it.stage) if it.reduce >= 0 else None

    def _end_round(self, it: Instruction, collectives: Collectives) -> None:
        """Give what a round's last backward, or its weight part, left for after it."""
        if it.reduce >= 0:
            gradients = self.replicas[it.stage].gradients
            collectives.contribute(it.stage, self.replica_index, it.reduce, gradients)

    def _gradient_for(self, stage: int, unit: int, source: int) -> Gradients:
        """Return the gradients of the values that came from stage `source`; asked for once."""
        returning = self._returning.get((stage, unit), {})
        layers = self._returns(stage, unit)[source]
        gradients = {layer: returning.pop(layer) for layer in layers if layer in returning}
        scale = self.replicas[stage].scale
        if gradients and scale is not None:
            gradients[_SCALE] = [scale.value]
        if not returning:
            self._returning.pop((stage, unit), None)
        return gradients

    def _check_crossing(self, values: Values) -> None:
        graph = self.setup.graph if self._scores is None else self.setup.graph.evaluated
        for layer, value in values.items():
            try:
                flatten(value)
            except CrossingError as error:
                raise CrossingError(f"layer {graph.layers[layer].name}: {error}") from None

    def _total(self, stage: int, arriving: Mapping[int, Gradients]) -> Gradients:
        """Add gradients that meet, in one order whatever the plan: last reader first; all in this stage's scale."""
        total: Gradients = {}
        for reader in sorted(arriving, reverse=True):
            for layer, tensors in self._in_own_scale(stage, arriving[reader]).items():
                known = total.get(layer)
                total[layer] = tensors if known is None else [a + b for a, b in zip(known, tensors, strict=True)]
        return total

    def _in_own_scale(self, stage: int, gradients: Gradients) -> Gradients:
        scale = self.replicas[stage].scale
        (given,) = gradients.pop(_SCALE, [None])
        if scale is None or given in (None, scale.value):
            return gradients
        return {layer: [tensor * (scale.value / given) for tensor in tensors] for layer, tensors in gradients.items()}

    def _loss_function(self, unit: int) -> LossFunction:
        targets = self._feed.targets(unit)
        divisor = None if self._divisors is None else self._divisors[self.setup.pipeline.minibatch(unit)[0]]

        def loss(output: Any) -> torch.Tensor:
            value = self.setup.dataset.loss(output, targets)
            return value if divisor is None else value / divisor

        return loss

    def _note_memory(self) -> None:
        self.peak_bytes = max(self.peak_bytes, sum(replica.live_bytes() for replica in self._running.values()))
        self.host_peak_bytes = max(self.host_peak_bytes, sum(each.host_bytes() for each in self._running.values()))


def make_replica(setup: Setup, stage: int, cut: Stage) -> Replica:
    """Return a replica of layers that were cut out for a stage, with their initial weights."""
    policy = WEIGHT_POLICIES[setup.pipeline.weights]
    return Replica(
        cut,
        setup.make_optimizer,
        device=setup.device,
        seed=setup.seed,
        split=setup.pipeline.backward == SPLIT,
        overwrite=not policy.stashed,
        moves=policy.moves(setup.pipeline, stage),
        gamma=setup.gamma(stage),
        loss_scale=setup.loss_scale,
    )


def training_feed(setup: Setup, first: int, num_minibatches: int) -> tuple[Feed, list[float] | None]:
    """Return the data of a segment of training, and what its losses are divided by."""
    return Feed(setup, "train", first, num_minibatches), loss_divisors(setup, first, num_minibatches)


def host_peaks(facts: Mapping[str, Any]) -> list[int]:
    """Return the most bytes that every worker has had on its host: none in facts from before anything was swapped."""
    found: list[int] = facts.get("host_peak_bytes") or [0] * len(facts["peak_bytes"])
    return found


def scale_metrics(scales: Iterable[Sequence[float]]) -> dict[str, float]:
    """Return metrics of all workers' `loss_scales`: the smallest scale, and the most updates that a stage skipped."""
    found = list(scales)
    if not found:
        return {}
    return {"loss_scale": min(scale for scale, _ in found), "skipped_updates": max(skipped for _, skipped in found)}
