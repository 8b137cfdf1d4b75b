"""The virtual engine: N logical workers, real arithmetic, one process, one device, a virtual clock.

It plays the simulator's events in order and executes each. Weight versions, stale gradients and replicas are exactly
those of N processes; only time is the simulator's.
"""

import copy
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pipebench.engine.feed import Feed
from pipebench.engine.replica import LossFunction, Replica, Values
from pipebench.engine.ring import ring_all_reduce
from pipebench.engine.setup import Setup, loss_divisors, minibatch_weight
from pipebench.engine.stage import cut_stage
from pipebench.modes import NONE, VERTICAL_SYNC
from pipebench.network import Network
from pipebench.schedule.instructions import Instruction, Op
from pipebench.schedule.pipeline import forward_programs, programs
from pipebench.simulate import Event, Simulation
from pipebench.timeline import ACTIVATION, ALL_REDUCE, BUFFERS, CONTROL, EVALUATION, GRADIENT

_LOG = logging.getLogger("pipebench.engine")
_WEIGHT = "weight of all samples"

OnLoss = Callable[[torch.Tensor, int, float, float], None]


class VirtualEngine:
    """Trains on a virtual clock. `train` and `evaluate` leave the pipeline drained.

    Args:
        setup: what to run.
        network: the links, which also count the bytes the shapes predict.
        observe: told of every event, after it was executed.
        on_loss: told of every unit's summed loss (a scalar on the engine's device, not divided by its weight), number
            of samples, weight and the time; it may raise to end the run.
    """

    def __init__(
        self,
        setup: Setup,
        network: Network,
        observe: Callable[[Event], None] = lambda event: None,
        on_loss: OnLoss = lambda loss, samples, weight, clock_s: None,
    ) -> None:
        self.setup = setup
        self.network = network
        self._whole: nn.Module | None = None
        self.clock_s = 0.0  # at the last drain
        self.now_s = 0.0
        self.num_bytes: Counter[tuple[str, str]] = Counter()
        self._observe = observe
        self._on_loss = on_loss
        pipeline = setup.pipeline
        self.replicas = [
            Replica(
                cut_stage(setup.graph, setup.plan, stage),
                setup.make_optimizer,
                device=setup.device,
                seed=setup.seed,
                recompute=setup.recompute,
                overwrite=setup.weights == NONE,
            )
            for stage, _ in pipeline.places
        ]
        self.peak_bytes = [replica.live_bytes() for replica in self.replicas]
        self._handlers: dict[Op, Callable[[int, int, Instruction], None]] = {
            Op.LOAD_INPUT: self._load,
            Op.RECEIVE_ACTIVATION: self._receive_activation,
            Op.FORWARD: self._forward,
            Op.SEND_ACTIVATION: self._send_activation,
            Op.RECEIVE_GRADIENT: self._receive_gradient,
            Op.BACKWARD: self._backward,
            Op.SEND_GRADIENT: self._send_gradient,
            Op.WAIT_ALL_REDUCE: self._wait_all_reduce,
            Op.WAIT_NORM: self._wait_norm,
            Op.UPDATE: self._update,
        }
        self._begin("train", 0, 0)

    def _begin(self, split: str, first_minibatch: int, num_minibatches: int) -> None:
        """Start a segment with empty mailboxes."""
        self._first = first_minibatch
        self._num_minibatches = num_minibatches
        self._feed = Feed(self.setup, split, first_minibatch, num_minibatches)
        self._inputs: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._received: dict[tuple[int, int], Values] = {}
        self._outgoing: dict[tuple[int, int], Values] = {}
        self._arriving: dict[tuple[int, int], list[dict[int, list[torch.Tensor]]]] = {}
        self._returning: dict[tuple[int, int], dict[int, list[torch.Tensor]]] = {}
        self._mail: dict[tuple[Op, int, int, int], Any] = {}
        self._joined: dict[tuple[int, int], dict[int, list[torch.Tensor | None]]] = {}
        self._norms: dict[int, torch.Tensor] = {}
        self._reduced: dict[tuple[int, int], tuple[list[torch.Tensor | None], set[int]]] = {}

    def train(self, first_minibatch: int, num_minibatches: int) -> None:
        """Train on minibatches `first_minibatch` and after, then drain."""
        self._begin("train", first_minibatch, num_minibatches)
        self._divisors = loss_divisors(self.setup, first_minibatch, num_minibatches)
        self._drained_versions = [replica.weights.newest.number for replica in self.replicas]
        if self.setup.weights == VERTICAL_SYNC:
            for replica, version in zip(self.replicas, self._drained_versions, strict=True):
                replica.weights.keep_from = version
        self._play(programs(self.setup.pipeline, num_minibatches), self._feed.size, self._execute)
        self._average_buffers()

    def evaluate(self) -> dict[str, float]:
        """Evaluate the newest weights on every held-out sample; return `eval_loss` and every metric of the dataset."""
        dataset, count = self.setup.dataset, self.setup.held_out.minibatches_per_epoch
        self._begin("eval", 0, count)
        feed = self._feed
        sums: dict[str, float] = defaultdict(float)

        def execute(event: Event) -> None:
            worker, (op, number, peer, _) = event.worker, event.instruction
            replica = self.replicas[worker]
            if op is Op.RECEIVE_ACTIVATION:
                self._received.setdefault((worker, number), {}).update(self._mail.pop((op, number, peer, worker)))
            elif op is Op.SEND_ACTIVATION:
                self._post(Op.RECEIVE_ACTIVATION, number, worker, peer, EVALUATION)
            elif op is Op.FORWARD:
                inputs = feed.inputs(worker, number, replica.stage.inputs)
                received = self._in_order(replica, self._received.pop((worker, number), {}))
                self._outgoing[worker, number], output = replica.evaluate(inputs, received, feed.place(number))
                if replica.stage.is_last:
                    targets = feed.targets(number)
                    sums["eval_loss"] += float(dataset.loss(output, targets))
                    sums[_WEIGHT] += feed.weight(number)
                    for name, value in dataset.score(output, targets).items():
                        sums[name] += float(value)

        before = Counter(self.network.num_bytes)
        self._play(forward_programs(self.setup.pipeline, count), feed.size, execute)
        self.network.num_bytes = _as_evaluation(before, self.network.num_bytes)
        for replica in self.replicas:
            replica.forget("eval")
        weight = sums.pop(_WEIGHT)
        metrics = {"eval_loss": sums.pop("eval_loss") / weight, **dataset.summarise(sums, weight)}
        if dataset.generates_with is not None:
            metrics |= dataset.whole_model_metrics(self._whole_model())
        return metrics

    def _whole_model(self) -> nn.Module:
        """Return the model in one piece with the newest weights, in evaluation mode."""
        if self._whole is None:
            self._whole = copy.deepcopy(self.setup.graph.model).to(self.setup.device).eval()
        buffers = dict(self._whole.named_buffers())
        with torch.no_grad():
            for stage in range(self.setup.pipeline.num_stages):
                replica = self.replicas[self.setup.pipeline.worker(stage, 0)]
                for name, newest in zip(replica.weights.names, replica.weights.newest.parameters, strict=True):
                    self._whole.get_parameter(name).copy_(newest)
                for name, buffer in replica.module.named_buffers():
                    if name in buffers:  # tensors made in forward are buffers after tracing only
                        buffers[name].copy_(buffer)
        return self._whole

    def _play(self, lists: Sequence[Any], size_of: Callable[[int], int], execute: Callable[[Event], None]) -> None:
        setup = self.setup
        simulation = Simulation(setup.pipeline, lists, setup.costs, self.network, size_of, self.clock_s)
        verbose = _LOG.isEnabledFor(logging.DEBUG)
        try:
            for event in simulation:
                self.now_s = event.end_s
                if verbose:
                    duration_s = event.end_s - event.start_s
                    _LOG.debug(
                        "t=%.9f s worker %d %s (%.3g s)", event.start_s, event.worker, event.instruction, duration_s
                    )
                execute(event)
                self._observe(event)
        finally:
            self._feed.close()
        self.clock_s = simulation.end_s

    def _execute(self, event: Event) -> None:
        instruction = event.instruction
        self._handlers[instruction.op](event.worker, instruction.number, instruction)

    # One method per instruction.

    def _load(self, worker: int, unit: int, _: Instruction) -> None:
        self._inputs[worker, unit] = self._feed.inputs(worker, unit, self.replicas[worker].stage.inputs)

    def _receive_activation(self, worker: int, unit: int, instruction: Instruction) -> None:
        values = self._mail.pop((Op.RECEIVE_ACTIVATION, unit, instruction.peer, worker))
        self._received.setdefault((worker, unit), {}).update(values)

    def _forward(self, worker: int, unit: int, _: Instruction) -> None:
        replica, setup = self.replicas[worker], self.setup
        minibatch = setup.pipeline.minibatch(unit)[0]
        if self._feed.size(unit) == 0:  # a short minibatch with fewer samples than microbatches
            return
        version = None
        if setup.weights == VERTICAL_SYNC:
            version = self._synchronised_version(worker, minibatch)
        values, loss = replica.forward(
            unit,
            self._feed.minibatch(unit),
            self._inputs.pop((worker, unit), []),
            self._in_order(replica, self._received.pop((worker, unit), {})),
            self._feed.place(unit),
            version=version,
            loss=self._loss_function(unit) if replica.stage.is_last else None,
        )
        self._outgoing[worker, unit] = values
        self._note_memory(worker)
        if loss is not None:
            total = loss if self._divisors is None else loss * self._divisors[minibatch]
            self._on_loss(total, self._feed.size(unit), self._feed.weight(unit), self.now_s)

    def _send_activation(self, worker: int, unit: int, instruction: Instruction) -> None:
        self._post(Op.RECEIVE_ACTIVATION, unit, worker, instruction.peer, ACTIVATION)

    def _receive_gradient(self, worker: int, unit: int, instruction: Instruction) -> None:
        gradients = self._mail.pop((Op.RECEIVE_GRADIENT, unit, instruction.peer, worker))
        self._arriving.setdefault((worker, unit), []).append(gradients)

    def _backward(self, worker: int, unit: int, instruction: Instruction) -> None:
        replica = self.replicas[worker]
        if self._feed.size(unit) > 0:
            arriving = self._arriving.pop((worker, unit), [])
            self._returning[worker, unit] = replica.backward(unit, self._heads(replica, arriving))
            self._note_memory(worker)
        if instruction.reduce >= 0:
            self._join(worker, instruction.reduce)

    def _send_gradient(self, worker: int, unit: int, instruction: Instruction) -> None:
        source = self.setup.pipeline.places[instruction.peer][0]
        layers = self.replicas[worker].stage.receives[source]
        returning = self._returning.get((worker, unit), {})
        gradients = {layer: returning.pop(layer) for layer in layers if layer in returning}
        if not returning:
            self._returning.pop((worker, unit), None)
        self._count(GRADIENT, worker, instruction.peer, gradients)
        self._mail[Op.RECEIVE_GRADIENT, unit, worker, instruction.peer] = gradients

    def _wait_all_reduce(self, worker: int, round_index: int, _: Instruction) -> None:
        pipeline = self.setup.pipeline
        stage = pipeline.places[worker][0]
        key = (stage, round_index)
        if key not in self._reduced:
            joined = self._joined.pop(key)
            nothing: list[torch.Tensor | None] = [None] * len(self.replicas[worker].gradients)  # an idle replica's
            workers = self._replicas_of(stage)
            self._reduced[key] = self._ring(stage, [joined.get(w, nothing) for w in workers]), set(workers)
        gradients, still_waiting = self._reduced[key]
        self.replicas[worker].gradients = list(gradients)
        still_waiting.discard(worker)
        if not still_waiting:
            del self._reduced[key]

    def _wait_norm(self, worker: int, round_index: int, _: Instruction) -> None:
        """All stages agree on the gradient's norm; every stage's replicas hold the same gradients by now."""
        if round_index in self._norms:
            return
        pipeline = self.setup.pipeline
        workers = self.setup.cluster.ring(range(pipeline.num_workers))
        squares = [torch.zeros(1, device=self.setup.device) for _ in workers]
        for stage in range(pipeline.num_stages):
            first = pipeline.worker(stage, 0)
            squares[workers.index(first)] = _norm(self.replicas[first].gradients).square().float().reshape(1)
        self._norms[round_index] = ring_all_reduce(squares, self._counter(CONTROL, workers)).sqrt()

    def _update(self, worker: int, round_index: int, _: Instruction) -> None:
        setup, replica = self.setup, self.replicas[worker]
        stage = setup.pipeline.places[worker][0]
        minibatches = setup.pipeline.round_minibatches(stage, round_index, self._num_minibatches)
        first = self._first + minibatches.start
        samples = sum(setup.sampler.size(self._first + k) for k in minibatches)
        gradients: Sequence[torch.Tensor | None] = replica.gradients
        if self._divisors is None:
            weight = sum(minibatch_weight(setup, self._first + k) for k in minibatches)
            gradients = [None if g is None else g / weight for g in gradients]
        if setup.clip_norm is not None:
            norm = self._norms[round_index] if setup.pipeline.shares_norm else _norm(gradients)
            gradients = _clipped(gradients, norm, setup.clip_norm)
        replica.update(gradients, setup.lr(stage, setup.sampler.samples_before(first), samples))
        self._note_memory(worker)

    # What the instructions share.

    def _join(self, worker: int, round_index: int) -> None:
        stage = self.setup.pipeline.places[worker][0]
        self._joined.setdefault((stage, round_index), {})[worker] = self.replicas[worker].gradients

    def _ring(self, stage: int, members: Sequence[list[torch.Tensor | None]]) -> list[torch.Tensor | None]:
        """All-reduce a round's gradients bucket by bucket; a member without a gradient brings zeros."""
        replica = self.replicas[self.setup.pipeline.worker(stage, 0)]
        names = replica.weights.names
        result: list[torch.Tensor | None] = [None] * len(names)
        like = replica.weights.newest.parameters
        for bucket in self.setup.costs.stages[stage].buckets:
            indices = [names.index(name) for name in bucket.parameters]
            flats = [
                torch.cat([(like[i].detach() * 0 if m[i] is None else m[i]).reshape(-1) for i in indices])  # type: ignore[union-attr]
                for m in members
            ]
            total = ring_all_reduce(flats, self._counter(ALL_REDUCE, self._replicas_of(stage)))
            pieces = torch.split(total, [like[i].numel() for i in indices])
            for i, piece in zip(indices, pieces, strict=True):
                result[i] = piece.view(like[i].shape)
        return result

    def _average_buffers(self) -> None:
        """Average running statistics over the replicas of every stage, as part of the drain (DESIGN: BatchNorm)."""
        pipeline = self.setup.pipeline
        ends = [self.clock_s]
        for stage, r in enumerate(pipeline.replicas):
            num_bytes = self.setup.costs.stages[stage].buffer_bytes
            if r == 1 or num_bytes == 0:
                continue
            workers = self._replicas_of(stage)
            members = [list(self.replicas[worker].module.buffers()) for worker in workers]
            for column in zip(*members, strict=True):
                if column[0].is_floating_point():
                    flats = [buffer.reshape(-1) for buffer in column]
                    mean = ring_all_reduce(flats, self._counter(BUFFERS, workers)) / r
                    for buffer in column:
                        buffer.copy_(mean.view(buffer.shape))
            ends.append(self.network.all_reduce(BUFFERS, "buffers", workers, num_bytes, self.clock_s))
        self.clock_s = max(ends)

    def _post(self, op: Op, unit: int, worker: int, peer: int, kind: str) -> None:
        target = self.setup.pipeline.places[peer][0]
        layers = self.replicas[worker].stage.sends[target]
        outgoing = self._outgoing.get((worker, unit), {})
        values = {layer: outgoing[layer] for layer in layers if layer in outgoing}
        if target == max(self.replicas[worker].stage.sends):  # programs send in order of targets
            self._outgoing.pop((worker, unit), None)
        self._count(kind, worker, peer, values)
        self._mail[op, unit, worker, peer] = values

    def _count(self, kind: str, sender: int, receiver: int, values: Any) -> None:
        level = self.setup.cluster.levels[self.setup.cluster.level_between(sender, receiver)].name
        leaves = (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor))
        self.num_bytes[kind, level] += sum(leaf.nbytes for leaf in leaves)

    def _replicas_of(self, stage: int) -> list[int]:
        """Return a stage's workers in the order of their ring."""
        first = self.setup.pipeline.worker(stage, 0)
        return self.setup.cluster.ring(range(first, first + self.setup.pipeline.replicas[stage]))

    def _counter(self, kind: str, workers: Sequence[int]) -> Callable[[int, int, int], None]:
        cluster = self.setup.cluster

        def count(sender: int, receiver: int, num_bytes: int) -> None:
            level = cluster.levels[cluster.level_between(workers[sender], workers[receiver])].name
            self.num_bytes[kind, level] += num_bytes

        return count

    def _heads(self, replica: Replica, arriving: Sequence[Mapping[int, list[torch.Tensor]]]) -> list[torch.Tensor]:
        """Add gradients that meet, in order of arrival in the program: last reader first."""
        total: dict[int, list[torch.Tensor]] = {}
        for gradients in arriving:
            for layer, tensors in gradients.items():
                known = total.get(layer)
                total[layer] = tensors if known is None else [a + b for a, b in zip(known, tensors, strict=True)]
        return [tensor for layer in replica.stage.returns for tensor in total.get(layer, ())]

    def _in_order(self, replica: Replica, received: Values) -> Values:
        return {layer: received[layer] for layers in replica.stage.receives.values() for layer in layers}

    def _loss_function(self, unit: int) -> LossFunction:
        targets = self._feed.targets(unit)
        divisor = None if self._divisors is None else self._divisors[self.setup.pipeline.minibatch(unit)[0]]

        def loss(output: Any) -> torch.Tensor:
            value = self.setup.dataset.loss(output, targets)
            return value if divisor is None else value / divisor

        return loss

    def _synchronised_version(self, worker: int, minibatch: int) -> int:
        """Return the version of this stage that has seen what the input stage's version of this minibatch has seen.

        Versions count from the drain here; a stage's store counts from the start of the run.
        """
        pipeline = self.setup.pipeline
        stage = pipeline.places[worker][0]

        def version(k: int) -> int:
            seen = max(0, k // pipeline.replicas[0] - pipeline.depth + 1) * pipeline.replicas[0]
            return self._drained_versions[worker] + seen // pipeline.replicas[stage]

        next_here = minibatch + pipeline.replicas[stage]
        more = next_here < self._num_minibatches
        self.replicas[worker].weights.keep_from = version(next_here) if more else None
        return version(minibatch)

    def _note_memory(self, worker: int) -> None:
        self.peak_bytes[worker] = max(self.peak_bytes[worker], self.replicas[worker].live_bytes())


def _norm(gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Return the Euclidean norm of all gradients together."""
    norms = [torch.linalg.vector_norm(gradient) for gradient in gradients if gradient is not None]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


def _clipped(gradients: Sequence[torch.Tensor | None], norm: torch.Tensor, largest: float) -> list[torch.Tensor | None]:
    """Scale gradients down to a norm, by the factor torch.nn.utils.clip_grad_norm_ uses."""
    factor = (largest / (norm + 1e-6)).clamp(max=1.0)
    return [None if gradient is None else gradient * factor.to(gradient.dtype) for gradient in gradients]


def _as_evaluation(before: Counter[tuple[str, str]], after: Counter[tuple[str, str]]) -> Counter[tuple[str, str]]:
    """Book what an evaluation sent under the kind `evaluation`."""
    booked = Counter(before)
    for (_, level), num_bytes in (after - before).items():
        booked[EVALUATION, level] += num_bytes
    return booked
