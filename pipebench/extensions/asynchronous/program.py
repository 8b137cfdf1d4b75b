"""The instruction list of a worker that pushes gradients to a server and pulls weights, and the server's simulation."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from pipebench.extensions.asynchronous.pushes import Turns
from pipebench.schedule.instructions import COPIES, Instruction
from pipebench.schedule.operations import Op
from pipebench.schedule.pipeline import Pipeline
from pipebench.schedule.programs import Parts, StageProgram, passes_of
from pipebench.schedule.syncs import ASYNCHRONOUS, SYNCS
from pipebench.simulate.simulation import LATER, Simulation, SimulationExtension, TimelineEvent


def pushing_program(p: Pipeline, worker: int, num_minibatches: int, whole: Parts, _: Any) -> Parts:
    """Yield a pull, the forward, the backward and a push for every minibatch; last, a pull that waits for all pushes.

    The first minibatch has no pull, since all replicas have the newest weights after a drain.
    """
    (stage,) = p.stages_of(worker)
    program = StageProgram(p, stage, worker, num_minibatches)
    for index, (_, op, unit) in enumerate(passes_of(p, worker, range(num_minibatches))):
        if op is Op.FORWARD:
            pull = [Instruction(Op.PULL, stage, unit)] if index > 0 else []
            yield pull + program.forward(unit, *program.read(unit, unit))
        elif op in COPIES:
            yield [Instruction(op, stage, unit)]
        else:
            yield [Instruction(op, stage, unit), Instruction(Op.PUSH, stage, unit)]
    if num_minibatches > 0:
        yield [Instruction(Op.PULL, stage, num_minibatches - 1, version=num_minibatches)]


class Pushing(SimulationExtension):
    """Simulates the server, which is beside the first replica; the workers are replicas of one stage."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation, self._network, part = simulation, simulation.network, simulation.part
        (stage,) = simulation.costs.stages
        self._update_s = stage.update_s
        self._num_bytes = sum(bucket.num_bytes for bucket in stage.buckets)  # of a gradient, and of the weights
        self._own_s = simulation.costs.host.message(self._num_bytes)  # a worker's own seconds per message
        self._kind = SYNCS[simulation.pipeline.sync].algorithm
        order = simulation.pipeline.extensions.get(ASYNCHRONOUS, {})
        self._turns = Turns() if part is None else Turns(order.get(part.first), part.limit)
        self._there: dict[int, tuple[int, Instruction]] = {}  # arrived pushes that wait for their turn, by minibatch
        self._arrived_s: dict[int, float] = {}  # arrival of each worker's last push
        self._free_s = 0.0  # end of the last scheduled update
        self._num_applied = 0
        self._outstanding: set[int] = set()  # workers with a push not yet applied
        self._pulling: dict[int, tuple[float, Instruction]] = {}  # waiting pulls, with the start of the wait, by worker
        self.plays = {Op.PUSH: self._push, Op.PULL: self._pull}

    def _push(self, worker: int, push: Instruction, now_s: float) -> float | None:
        """Send a gradient to the server. The push's event is emitted when the server has applied it."""
        self._outstanding.add(worker)
        if worker == 0:
            self._network.agenda.push(now_s, partial(self._arrived, worker, push))
            return LATER
        self._send(worker, 0, f"push {push.number}", now_s, partial(self._arrived, worker, push))
        if self._own_s == 0:
            return LATER
        self._simulation.wake(now_s + self._own_s, worker, None)
        return None

    def _pull(self, worker: int, pull: Instruction, now_s: float) -> float | None:
        """Make a worker wait for weights. The first worker, beside the server, gets them at once if they are ready."""
        if self._is_ready(worker, pull):
            if worker == 0:
                return 0.0
            self._answer(worker, pull, now_s, now_s)
        else:
            self._pulling[worker] = (now_s, pull)
            self._apply(now_s)  # in a given order, the next push may be one that a shortened segment lacks
        return None

    def waiting(self) -> Iterator[tuple[int, float, Instruction]]:
        """Yield (worker, start of the wait, instruction) of every waiting pull."""
        yield from ((worker, *waiting) for worker, waiting in self._pulling.items())

    def _is_ready(self, worker: int, pull: Instruction) -> bool:
        """Return whether a pull can be answered: the worker's own push and `pull.version` pushes are applied."""
        return worker not in self._outstanding and self._num_applied >= pull.version

    def _arrived(self, worker: int, push: Instruction, now_s: float) -> None:
        self._there[push.number] = (worker, push)
        self._arrived_s[worker] = now_s
        self._apply(now_s)

    def _apply(self, now_s: float) -> None:
        """Schedule the updates of the pushes whose turn it is, one after the other."""
        while (minibatch := self._turns.next_of(self._there)) is not None:
            worker, push = self._there.pop(minibatch)
            self._free_s = max(self._free_s, now_s) + self._update_s
            self._network.agenda.push(self._free_s, partial(self._applied, worker, push))

    def _applied(self, worker: int, push: Instruction, now_s: float) -> None:
        """Complete an update, and answer the pulls that waited for it."""
        self._num_applied += 1
        self._outstanding.discard(worker)
        self._simulation.emit(TimelineEvent(now_s, now_s, worker, push))
        for puller, (since_s, pull) in list(self._pulling.items()):
            if self._is_ready(puller, pull):
                del self._pulling[puller]
                self._answer(puller, pull, since_s, now_s)

    def _answer(self, worker: int, pull: Instruction, since_s: float, now_s: float) -> None:
        """Send the newest weights to a worker, which resumes after their arrival and its own part of the message.

        Its wait began at `since_s`. Of this time, the message of its push took the part before its arrival, and the
        message of the weights takes the part from now on; only the rest was spent waiting for other pushes.
        """
        pushing_s = max(0.0, self._arrived_s.get(worker, since_s) - since_s)
        wait, wake = (since_s, pull, now_s - pushing_s), self._simulation.wake
        if worker == 0:
            wake(now_s, worker, wait)
        else:
            label = f"pull {pull.number}"
            self._send(0, worker, label, now_s, lambda then_s: wake(then_s + self._own_s, worker, wait))

    def _send(self, sender: int, receiver: int, label: str, now_s: float, then: Callable[[float], None]) -> None:
        """Send a gradient or weights; call `then` on arrival."""
        message = self._network.send(
            self._network.connection(self._kind, sender, receiver), self._num_bytes, now_s, label
        )

        def arrived(then_s: float) -> None:
            self._network.arrived(message)
            then(then_s)

        self._network.sharing.notify(message, arrived, now_s)
