"""The distributed engine: one worker of the plan in this process, the others in theirs, on the wall clock.

It executes its worker's list, instruction by instruction. What blocks and what doesn't is `transport.py`'s subject;
the arithmetic is `worker.py`'s, the same as the virtual engine's.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from pipebench.checkpoint.state import ModelState
from pipebench.distributed.collectives import Together
from pipebench.distributed.control import Control
from pipebench.distributed.cores import core_share, crowding
from pipebench.distributed.gather import gather_tensors
from pipebench.distributed.meter import MeasuredMeter, merge
from pipebench.distributed.rehearsal import gains_by_rehearsal, rehearse
from pipebench.distributed.transport import Transport
from pipebench.distributed.watch import DeviceWatch, HostWatch, Watch
from pipebench.distributed.world import World
from pipebench.engine.feed import Feed
from pipebench.engine.gate import admitted_program
from pipebench.engine.pace import Pace
from pipebench.engine.scores import Scores
from pipebench.engine.setup import Setup, ranks_of
from pipebench.engine.whole import WholeModel
from pipebench.engine.worker import Worker, training_feed
from pipebench.errors import DivergedError
from pipebench.schedule.instructions import Instruction, Op
from pipebench.schedule.pipeline import forward_programs, programs
from pipebench.simulate.meter import PREDICTION, Measured
from pipebench.simulate.timeline import ACTIVATION, EVALUATION, GRADIENT, Transfer

_MOST_LEAVING = 4  # messages of an evaluation that a worker may be ahead of the next one
_CUDA_LOSS_EVERY = 50  # reading a loss waits for the GPU

OnLoss = Callable[[torch.Tensor, int, float, float], None]
OnUnit = Callable[[int, float, float], None]


class DistributedEngine:
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
        self.setup = setup
        self.world = world
        self._control = control
        self._on_loss = on_loss
        self._on_unit = on_unit
        self._ranks = ranks_of(setup)
        self.worker = Worker(setup, self._ranks.index(world.rank))
        on_gpu = setup.device.type == "cuda"
        # The host runs ahead of its GPU: when it hands over a message says nothing about when that travels.
        self.meter = MeasuredMeter(setup.pipeline, self.worker.index, world.rank, times_transfers=not on_gpu)
        self.num_bytes: Counter[tuple[str, str]] = Counter()
        self.clock_s = 0.0
        self._origin_s = time.perf_counter()
        self._not_training_s = 0.0
        self._segment = 0
        self._latest_loss = math.nan
        self._num_losses = 0
        self._stop: str | None = None
        self._norm: torch.Tensor | None = None
        self._watch: Watch = (DeviceWatch if on_gpu else HostWatch)(self.worker.index, self.clock, self.meter.event)
        self._transport = Transport(setup, world, self.worker.index, self.clock)
        self._together = Together(setup, world, self.worker, self.clock, self.meter, self.num_bytes)
        self._pace = Pace(setup.device)
        if gains_by_rehearsal(setup.device):
            rehearse(setup, world, self.worker.index)
        if world.rank > 0 or setup.dataset.generates_with is None:
            # The stage holds copies of what it needs: the rest of the model would only take memory.
            for whole in (setup.graph.model, setup.graph.root, setup.graph.evaluated.root):
                whole.to("meta")
        self._handlers: dict[Op, Callable[[int, Instruction], float]] = {
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
        self._watch.settle()

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
        self._at(None, "exchange")
        values = self.world.exchange(value)
        self._at(None, "")
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
        self.worker.begin_training(feed, first_minibatch, num_minibatches, divisors)
        try:
            done = self._train(num_minibatches)
            self._transport.flush()
        finally:
            feed.close()
        self._watch.settle()
        self._together.average_buffers()
        self.settle()
        return done

    def evaluate(self) -> dict[str, float]:
        """Evaluate the newest weights on every held-out sample, pipelined; return the metrics, on all workers.

        Raises:
            PeerLostError: a worker is gone.
        """
        dataset, count = self.setup.dataset, self.setup.held_out.minibatches_per_epoch
        self._feed = Feed(self.setup, "eval", 0, count)
        self.worker.begin(self._feed, 0, count)
        self.meter.evaluating = True
        scores = Scores(dataset)
        pipeline = self.setup.evaluation.pipeline
        self._transport.expect(forward_programs(pipeline, count)[self.worker.index], lambda unit: False)
        try:
            for instruction in forward_programs(pipeline, count)[self.worker.index]:
                self._timed(instruction, self._evaluate_one(instruction, scores))
            self._transport.flush()
        finally:
            self._feed.close()
        self.worker.replica.forget("eval")
        scores.merge(self.exchange(scores.sums))
        metrics = scores.metrics()
        if dataset.generates_with is not None:
            metrics |= self._whole_model_metrics()
        self._watch.settle()
        self.meter.evaluating = False
        before_s = self.clock_s
        self.settle()
        self._not_training_s += self.clock_s - before_s
        return metrics

    def parts(self) -> list[tuple[str, ModelState]]:
        """Return what this process contributes to a checkpoint."""
        return [self.worker.part()]

    def restore(self, state: ModelState, facts: Mapping[str, Any] | None, clock_s: float) -> None:
        """Go on from a checkpoint.

        Args:
            state: of the whole model.
            facts: what `facts` returned on this worker when it was taken; None if the plan was another.
            clock_s: the run's clock then.
        """
        self.worker.restore(state)
        if facts is not None:
            self.meter.restore(facts["meter"])
            self.num_bytes.update({(kind, level): count for kind, level, count in facts["num_bytes"]})
            self.worker.peak_bytes = max(self.worker.peak_bytes, *facts["peak_bytes"])
            weights = self.worker.replica.weights
            weights.most_alive = max(weights.most_alive, *facts["weight_versions_max"])

    def close(self) -> None:
        """Give up the connections to the other workers, when everybody has ended; all workers call it."""
        self.exchange(None)
        self._transport.close()
        self._together.close()

    def facts(self) -> dict[str, Any]:
        """Return what this worker has measured so far, in a form that JSON holds."""
        return {
            "meter": self.meter.state(),
            "num_bytes": [[kind, level, count] for (kind, level), count in self.num_bytes.items()],
            "peak_bytes": [self.worker.peak_bytes],
            "weight_versions_max": [self.worker.replica.weights.most_alive],
        }

    def turn_to(self, work: str) -> None:
        """Name what this process does now, for the others' watchdogs."""
        self._at(None, work)

    def settle(self) -> None:
        """All workers agree on the time: the last one's."""
        if self.setup.device.type == "cuda":
            torch.cuda.synchronize(self.setup.device)
        self.clock_s = max(self.exchange(self.clock()))

    def measured(self, training_s: float) -> Measured:
        """Return what all workers measured; all call it."""
        shares = self.exchange([self.meter.share(), core_share(self.setup.device)])
        found = merge([share for share, _ in shares], self.setup.pipeline, training_s)
        crowded = crowding([cores for _, cores in shares])
        return replace(found, notes={**found.notes, PREDICTION: crowded}) if crowded else found

    # The loop.

    def _train(self, num_minibatches: int) -> int:
        """Execute this worker's list; it becomes that of a shorter segment where the workers agree on one."""
        pipeline, index = self.setup.pipeline, self.worker.index
        self._transport.expect(programs(pipeline, num_minibatches)[index], lambda unit: self._feed.size(unit) == 0)
        if self._control is None:
            for instruction in programs(pipeline, num_minibatches)[index]:
                self._timed(instruction)
            return num_minibatches
        self._control.begin(self._segment, num_minibatches)
        self._segment += 1
        for instruction in admitted_program(pipeline, index, num_minibatches, self._control):
            if self._control.limit < num_minibatches:
                num_minibatches = self._control.limit
                self.worker.end_early(num_minibatches)
            self._timed(instruction)
        return self._control.limit

    def _timed(self, instruction: Instruction, handler: Callable[[int, Instruction], float] | None = None) -> None:
        """Execute an instruction, watched and measured."""
        self._at(instruction, "")
        handle = handler or self._handlers[instruction.op]
        self._watch.timed(instruction, lambda: handle(instruction.number, instruction))

    def _at(self, instruction: Instruction | None, wait: str) -> None:
        if self._control is not None:
            self._control.at(instruction, wait)

    # One method per instruction; each returns the seconds it waited for bytes that were on their way.

    def _load(self, unit: int, _: Instruction) -> float:
        self.worker.load(unit)
        return 0.0

    def _receive_activation(self, unit: int, instruction: Instruction) -> float:
        if self._feed.size(unit) == 0:
            return 0.0
        values, stall_s = self._receive(ACTIVATION, unit, instruction.peer)
        self.worker.take_activation(unit, values)
        return stall_s

    def _forward(self, unit: int, _: Instruction) -> float:
        loss = self.worker.forward(unit)
        self._pace.step()
        if loss is not None:
            try:
                self._on_loss(*loss, self.clock())
            except DivergedError as diverged:
                self._stop = self._stop or str(diverged)
                if self._control is not None:
                    self._control.request_stop(str(diverged))
            # Of this worker's own losses: which units it has depends on how many replicas there are.
            if not loss.total.is_cuda or self._num_losses % _CUDA_LOSS_EVERY == 0:
                self._latest_loss = float(loss.total) / loss.weight
            self._num_losses += 1
        return 0.0

    def _send_activation(self, unit: int, instruction: Instruction) -> float:
        if self._feed.size(unit) > 0:
            values = self.worker.activation_for(unit, self.setup.pipeline.places[instruction.peer][0])
            self._send(ACTIVATION, ACTIVATION, unit, instruction.peer, values)
        return 0.0

    def _receive_gradient(self, unit: int, instruction: Instruction) -> float:
        if self._feed.size(unit) == 0:
            return 0.0
        gradients, stall_s = self._receive(GRADIENT, unit, instruction.peer)
        self.worker.take_gradient(unit, gradients)
        return stall_s

    def _backward(self, unit: int, instruction: Instruction) -> float:
        if instruction.reduce >= 0:
            self._together.backward(unit)
        else:
            self.worker.backward(unit)
        self._pace.step()
        # This worker's turn among its stage's replicas: together they are as far as it is.
        samples = self._feed.size(unit) * self.setup.pipeline.replicas[self.worker.stage_index]
        self._on_unit(samples, self._latest_loss, self.clock())
        return 0.0

    def _send_gradient(self, unit: int, instruction: Instruction) -> float:
        if self._feed.size(unit) > 0:
            gradients = self.worker.gradient_for(unit, self.setup.pipeline.places[instruction.peer][0])
            self._send(GRADIENT, GRADIENT, unit, instruction.peer, gradients)
        return 0.0

    def _wait_all_reduce(self, round_index: int, instruction: Instruction) -> float:
        start_s = self.clock()
        self._together.wait(round_index, has_begun=instruction.reduce < 0)
        return self.clock() - start_s

    def _wait_norm(self, round_index: int, _: Instruction) -> float:
        start_s = self.clock()
        self._norm = self._together.norm()
        return self.clock() - start_s

    def _update(self, round_index: int, _: Instruction) -> float:
        self.worker.update(round_index, self._norm if self.setup.pipeline.shares_norm else None)
        return 0.0

    def _evaluate_one(self, instruction: Instruction, scores: Scores) -> Callable[[int, Instruction], float]:
        """Return what executes an instruction of an evaluation."""
        if instruction.op is Op.FORWARD:
            return lambda unit, _: self._score(unit, scores)
        if instruction.op is Op.SEND_ACTIVATION:
            return self._send_evaluated
        if instruction.op is Op.LOAD_INPUT:
            return lambda unit, _: 0.0  # loaded by the forward
        return self._receive_activation

    def _score(self, unit: int, scores: Scores) -> float:
        output = self.worker.evaluate(unit)
        self._pace.step()
        if self.worker.replica.stage.is_last:
            scores.add(output, self._feed.targets(unit), self._feed.weight(unit))
        return 0.0

    def _send_evaluated(self, unit: int, instruction: Instruction) -> float:
        values = self.worker.activation_for(unit, self.setup.pipeline.places[instruction.peer][0])
        self._send(ACTIVATION, EVALUATION, unit, instruction.peer, values, _MOST_LEAVING)
        return 0.0

    # What the instructions share.

    def _send(
        self, channel: str, kind: str, unit: int, peer: int, values: Any, most_leaving: int | None = None
    ) -> None:
        sent = self._transport.send(channel, unit, peer, values, self._latest_loss, most_leaving)
        self.num_bytes[kind, self._level(self.worker.index, peer)] += sent

    def _receive(self, kind: str, unit: int, peer: int) -> tuple[Any, float]:
        start_s = self.clock()
        message = self._transport.receive(kind, unit, peer)
        if kind == GRADIENT:
            self._latest_loss = message.note
        booked = EVALUATION if self.meter.evaluating else kind
        letter = "B" if kind == GRADIENT else "F"
        label = f"{letter}{unit if self.meter.evaluating else self.setup.pipeline.label(unit)}"
        level = self._level(peer, self.worker.index)
        ends_s = max(message.sent_s, message.arrived_s)
        self.meter.transfer(
            Transfer(booked, label, (peer,), (self.worker.index,), level, message.payload_bytes, message.sent_s, ends_s)
        )
        return message.values, max(0.0, message.arrived_s - max(start_s, message.sent_s))

    def _level(self, sender: int, receiver: int) -> str:
        return self.setup.level_between(sender, receiver).name

    @cached_property
    def _whole(self) -> WholeModel:
        return WholeModel(self.setup)

    def _whole_model_metrics(self) -> dict[str, float]:
        """Gather the newest weights on rank 0, which computes what only the whole model can give; the others wait."""
        own = self.worker.replica.tensors() if self.worker.replica_index == 0 else {}
        self.turn_to("whole-model metrics")
        stages = gather_tensors(own, self.world)
        found: dict[str, float] = {}
        if self.world.rank == 0:
            found = self.setup.dataset.whole_model_metrics(self._whole.filled(stages))
        return next(metrics for metrics in self.exchange(found) if metrics)
