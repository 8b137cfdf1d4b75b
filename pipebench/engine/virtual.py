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
from torch.utils import _pytree as pytree

from pipebench.checkpoint.state import ModelState
from pipebench.engine.feed import Feed
from pipebench.engine.gate import StoppableAdmission, StopRequest, admitted_program
from pipebench.engine.replica import Replica
from pipebench.engine.ring import of_one_type, ring_all_reduce
from pipebench.engine.scores import Scores
from pipebench.engine.setup import Setup
from pipebench.engine.whole import WholeModel
from pipebench.engine.worker import Worker, training_feed
from pipebench.schedule.instructions import Instruction, Op
from pipebench.schedule.pipeline import Pipeline, forward_programs
from pipebench.simulate.costs import Costs
from pipebench.simulate.meter import Measured, Meter, fractions
from pipebench.simulate.network import Network
from pipebench.simulate.simulation import Event, Simulation
from pipebench.simulate.timeline import ACTIVATION, ALL_REDUCE, BUFFERS, CONTROL, EVALUATION, GRADIENT

_LOG = logging.getLogger("pipebench.engine")

OnLoss = Callable[[torch.Tensor, int, float, float], None]
OnUnit = Callable[[int, float, float], None]


class VirtualEngine:
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
        observe: Callable[[Event], None] = lambda event: None,
        on_loss: OnLoss = lambda loss, samples, weight, clock_s: None,
        on_unit: OnUnit = lambda samples, loss, clock_s: None,
        meter: Meter | None = None,
        stop: StopRequest | None = None,
    ) -> None:
        self.setup = setup
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
        self.workers = [Worker(setup, index) for index in range(setup.pipeline.num_workers)]
        self._handlers: dict[Op, Callable[[Worker, int, Instruction], None]] = {
            Op.LOAD_INPUT: lambda worker, unit, _: worker.load(unit),
            Op.RECEIVE_ACTIVATION: self._receive_activation,
            Op.FORWARD: self._forward,
            Op.SEND_ACTIVATION: lambda worker, unit, it: self._send_activation(worker, unit, it.peer, ACTIVATION),
            Op.RECEIVE_GRADIENT: self._receive_gradient,
            Op.BACKWARD: self._backward,
            Op.SEND_GRADIENT: self._send_gradient,
            Op.WAIT_ALL_REDUCE: self._wait_all_reduce,
            Op.WAIT_NORM: self._wait_norm,
            Op.UPDATE: self._update,
        }
        self._clear()

    @property
    def replicas(self) -> list[Replica]:
        """Every worker's replica."""
        return [worker.replica for worker in self.workers]

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

    def turn_to(self, work: str) -> None:
        """Nobody else waits."""

    def settle(self) -> None:
        """On this clock nothing happens between two segments."""

    def parts(self) -> list[tuple[str, ModelState]]:
        """Return every worker's part of a checkpoint, by name."""
        return [worker.part() for worker in self.workers]

    def restore(self, state: ModelState, facts: Mapping[str, Any] | None, clock_s: float) -> None:
        """Go on from a checkpoint.

        Args:
            state: of the whole model.
            facts: what `facts` returned when it was taken; None if engine or plan was another.
            clock_s: the run's clock then.
        """
        for worker in self.workers:
            worker.restore(state)
        if facts is not None:
            self.num_bytes = Counter({(kind, level): count for kind, level, count in facts["num_bytes"]})
            columns = zip(self.workers, facts["peak_bytes"], facts["weight_versions_max"], strict=True)
            for worker, peak_bytes, most_alive in columns:
                worker.peak_bytes = max(worker.peak_bytes, peak_bytes)
                worker.replica.weights.most_alive = max(worker.replica.weights.most_alive, most_alive)
            self._meter.busy_s, self._meter.stall_s = facts["busy_s"], facts["stall_s"]
            self._evaluation_s = facts["evaluation_s"]

    def facts(self) -> dict[str, Any]:
        """Return what was counted so far, in a form that JSON holds; lists are by worker."""
        return {
            "num_bytes": [[kind, level, count] for (kind, level), count in self.num_bytes.items()],
            "peak_bytes": self.peak_bytes,
            "weight_versions_max": [replica.weights.most_alive for replica in self.replicas],
            "busy_s": self._meter.busy_s,
            "stall_s": self._meter.stall_s,
            "evaluation_s": self._evaluation_s,
        }

    def measured(self, training_s: float) -> Measured:
        """Return what the workers did, on the virtual clock."""
        meter = self._meter
        metrics = fractions(meter.busy_s, meter.stall_s, len(self.workers), training_s)
        return Measured(metrics, (), meter.timeline(), meter.busy_s, meter.stall_s, Counter(self.num_bytes))

    def _clear(self) -> None:
        """Empty the mailboxes."""
        self._mail: dict[tuple[Op, int, int, int], Any] = {}
        self._joined: dict[tuple[int, int], dict[int, list[torch.Tensor | None]]] = {}
        self._norms: dict[int, torch.Tensor] = {}
        self._reduced: dict[tuple[int, int], tuple[list[torch.Tensor | None], set[int]]] = {}

    def train(self, first_minibatch: int, num_minibatches: int) -> int:
        """Train on minibatches `first_minibatch` and after, then drain.

        Returns:
            How many were trained on: fewer than asked for if a stop was asked for.
        """
        self._clear()
        pipeline = self.setup.pipeline
        self._feed, divisors = training_feed(self.setup, first_minibatch, num_minibatches)
        for worker in self.workers:
            worker.begin_training(self._feed, first_minibatch, num_minibatches, divisors)
        admission = StoppableAdmission(
            self._stop, pipeline, num_minibatches, self.setup.sampler.streams or 1, self._cut
        )
        lists = [admitted_program(pipeline, index, num_minibatches, admission) for index in range(len(self.workers))]
        self._play(pipeline, self.setup.costs, lists, self._execute)
        if admission.limit > 0:
            self._average_buffers()
        return admission.limit

    def _cut(self, num_minibatches: int) -> None:
        """Let the segment end early."""
        for worker in self.workers:
            worker.end_early(num_minibatches)

    def evaluate(self) -> dict[str, float]:
        """Evaluate the newest weights on every held-out sample; return `eval_loss` and every metric of the dataset."""
        dataset, count = self.setup.dataset, self.setup.held_out.minibatches_per_epoch
        self._clear()
        before_s, self._meter.evaluating = self.clock_s, True
        self._feed = Feed(self.setup, "eval", 0, count)
        for worker in self.workers:
            worker.begin(self._feed, 0, count)
        scores = Scores(dataset)

        def execute(event: Event) -> None:
            worker, (op, unit, peer, _) = self.workers[event.worker], event.instruction
            if op is Op.RECEIVE_ACTIVATION:
                self._receive_activation(worker, unit, event.instruction)
            elif op is Op.SEND_ACTIVATION:
                self._send_activation(worker, unit, peer, EVALUATION)
            elif op is Op.FORWARD:
                output = worker.evaluate(unit)
                if worker.replica.stage.is_last:
                    scores.add(output, self._feed.targets(unit), self._feed.weight(unit))

        before = Counter(self.network.num_bytes)
        evaluation = self.setup.evaluation
        costs = evaluation.costs(self.setup.costs)
        self._play(evaluation.pipeline, costs, forward_programs(evaluation.pipeline, count), execute)
        self.network.num_bytes = _as_evaluation(before, self.network.num_bytes)
        self._meter.evaluating = False
        self._evaluation_s += self.clock_s - before_s
        for replica in self.replicas:
            replica.forget("eval")
        metrics = scores.metrics()
        if dataset.generates_with is not None:
            stages = (worker.replica.tensors() for worker in self.workers if worker.replica_index == 0)
            metrics |= dataset.whole_model_metrics(self._whole.filled(stages))
        return metrics

    @cached_property
    def _whole(self) -> WholeModel:
        return WholeModel(self.setup)

    def _play(
        self,
        pipeline: Pipeline,
        costs: Costs,
        lists: Sequence[Iterator[Instruction]],
        execute: Callable[[Event], None],
    ) -> None:
        simulation = Simulation(pipeline, lists, costs, self.network, self._feed.size, self.clock_s)
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
                self._meter.event(event)
        finally:
            self._feed.close()
        self.clock_s = simulation.end_s

    def _execute(self, event: Event) -> None:
        instruction = event.instruction
        self._handlers[instruction.op](self.workers[event.worker], instruction.number, instruction)

    # One method per instruction that does more than compute.

    def _receive_activation(self, worker: Worker, unit: int, instruction: Instruction) -> None:
        values = self._mail.pop((Op.RECEIVE_ACTIVATION, unit, instruction.peer, worker.index))
        worker.take_activation(unit, values)

    def _forward(self, worker: Worker, unit: int, _: Instruction) -> None:
        loss = worker.forward(unit)
        if loss is not None:
            self._on_loss(*loss, self.now_s)
            mean = math.nan if loss.total.is_cuda else float(loss.total) / loss.weight
            self._on_unit(loss.samples, mean, self.now_s)

    def _send_activation(self, worker: Worker, unit: int, peer: int, kind: str) -> None:
        values = worker.activation_for(unit, self.setup.pipeline.places[peer][0])
        self._post(Op.RECEIVE_ACTIVATION, unit, worker.index, peer, kind, values)

    def _receive_gradient(self, worker: Worker, unit: int, instruction: Instruction) -> None:
        worker.take_gradient(unit, self._mail.pop((Op.RECEIVE_GRADIENT, unit, instruction.peer, worker.index)))

    def _backward(self, worker: Worker, unit: int, instruction: Instruction) -> None:
        worker.backward(unit)
        if instruction.reduce >= 0:
            key = (worker.stage_index, instruction.reduce)
            self._joined.setdefault(key, {})[worker.index] = worker.replica.gradients

    def _send_gradient(self, worker: Worker, unit: int, instruction: Instruction) -> None:
        gradients = worker.gradient_for(unit, self.setup.pipeline.places[instruction.peer][0])
        self._post(Op.RECEIVE_GRADIENT, unit, worker.index, instruction.peer, GRADIENT, gradients)

    def _wait_all_reduce(self, worker: Worker, round_index: int, _: Instruction) -> None:
        key = (worker.stage_index, round_index)
        if key not in self._reduced:
            joined = self._joined.pop(key)
            nothing: list[torch.Tensor | None] = [None] * len(worker.replica.gradients)  # an idle replica's
            workers = self._replicas_of(worker.stage_index)
            self._reduced[key] = self._ring(worker, [joined.get(w, nothing) for w in workers]), set(workers)
        gradients, still_waiting = self._reduced[key]
        worker.replica.gradients = list(gradients)
        still_waiting.discard(worker.index)
        if not still_waiting:
            del self._reduced[key]

    def _wait_norm(self, worker: Worker, round_index: int, _: Instruction) -> None:
        """All stages agree on the gradient's norm; every stage's replicas hold the same gradients by now."""
        if round_index in self._norms:
            return
        pipeline = self.setup.pipeline
        workers = self.setup.ring(range(pipeline.num_workers))
        squares = [torch.zeros(1, device=self.setup.device) for _ in workers]
        for stage in range(pipeline.num_stages):
            first = pipeline.worker(stage, 0)
            squares[workers.index(first)] = self.workers[first].squared_norm()
        self._norms[round_index] = ring_all_reduce(squares, self._counter(CONTROL, workers)).sqrt()

    def _update(self, worker: Worker, round_index: int, _: Instruction) -> None:
        worker.update(round_index, self._norms[round_index] if self.setup.pipeline.shares_norm else None)

    # What the instructions share.

    def _ring(self, worker: Worker, members: Sequence[list[torch.Tensor | None]]) -> list[torch.Tensor | None]:
        """All-reduce a round's gradients bucket by bucket; a member without a gradient brings zeros."""
        names, like = worker.replica.weights.names, worker.replica.weights.newest.parameters
        result: list[torch.Tensor | None] = [None] * len(names)
        buckets = self.setup.costs.stages[worker.stage_index].buckets
        named = ([names.index(name) for name in bucket.parameters] for bucket in buckets)
        for indices in (part for bucket in named for part in of_one_type(bucket, like)):
            flats = [
                torch.cat([(like[i].detach() * 0 if m[i] is None else m[i]).reshape(-1) for i in indices])  # type: ignore[union-attr]
                for m in members
            ]
            total = ring_all_reduce(flats, self._counter(ALL_REDUCE, self._replicas_of(worker.stage_index)))
            pieces = torch.split(total, [like[i].numel() for i in indices])
            for i, piece in zip(indices, pieces, strict=True):
                result[i] = None if all(m[i] is None for m in members) else piece.view(like[i].shape)
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
            for column in zip(*(self.workers[worker].buffers() for worker in workers), strict=True):
                flats = [buffer.reshape(-1) for buffer in column]
                mean = ring_all_reduce(flats, self._counter(BUFFERS, workers)) / r
                for buffer in column:
                    buffer.copy_(mean.view(buffer.shape))
            ends.append(self.network.all_reduce(BUFFERS, "buffers", workers, num_bytes, self.clock_s))
        self.clock_s = max(ends)

    def _post(self, op: Op, unit: int, sender: int, receiver: int, kind: str, values: Any) -> None:
        level = self.setup.level_between(sender, receiver).name
        leaves = (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor))
        self.num_bytes[kind, level] += sum(leaf.nbytes for leaf in leaves)
        self._mail[op, unit, sender, receiver] = values

    def _replicas_of(self, stage: int) -> list[int]:
        """Return a stage's workers in the order of their ring."""
        first = self.setup.pipeline.worker(stage, 0)
        return self.setup.ring(range(first, first + self.setup.pipeline.replicas[stage]))

    def _counter(self, kind: str, workers: Sequence[int]) -> Callable[[int, int, int], None]:
        def count(sender: int, receiver: int, num_bytes: int) -> None:
            level = self.setup.level_between(workers[sender], workers[receiver]).name
            self.num_bytes[kind, level] += num_bytes

        return count


def _as_evaluation(before: Counter[tuple[str, str]], after: Counter[tuple[str, str]]) -> Counter[tuple[str, str]]:
    """Book what an evaluation sent under the kind `evaluation`."""
    booked = Counter(before)
    for (_, level), num_bytes in (after - before).items():
        booked[EVALUATION, level] += num_bytes
    return booked
