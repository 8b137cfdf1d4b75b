"""The instruction list of a worker that pushes every gradient to a server and pulls its weights; both, simulated."""

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
    """Return pull, forward, backward, push per minibatch, and a final pull after all pushes.

    A drain leaves the newest weights everywhere, so the first pull is left out: there are as many pulls as pushes.
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
    """The server beside the first replica, in a simulation of one stage whose replicas are the workers."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation, self._network, part = simulation, simulation.network, simulation.part
        (stage,) = simulation.costs.stages
        self._num_bytes, self._update_s = sum(bucket.num_bytes for bucket in stage.buckets), stage.update_s
        self._own_s = simulation.costs.host.message(self._num_bytes)  # of the worker, per message
        self._kind = SYNCS[simulation.pipeline.sync].way
        order = simulation.pipeline.extensions.get(ASYNCHRONOUS, {})
        self._turns = Turns() if part is None else Turns(order.get(part.first), part.limit)
        self._there: dict[int, tuple[int, Instruction]] = {}  # pushes that have arrived, by minibatch
        self._arrived_s: dict[int, float] = {}  # when a worker's last push has, by worker
        self._free_s = 0.0  # end of the server's scheduled updates
        self._num_applied = 0
        self._outstanding: set[int] = set()  # workers with a push not yet applied
        self._pulling: dict[int, tuple[float, Instruction]] = {}  # start of the wait, by worker
        self.plays = {Op.PUSH: self._push, Op.PULL: self._pull}

    def _push(self, worker: int, push: Instruction, now_s: float) -> float | None:
        """Send gradients to the server; the event is their update."""
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
        """Make a worker wait for the weights it pulls; the first one, beside the server, may have them at once."""
        if self._answers(worker, pull):
            if worker == 0:
                return 0.0
            self._hand_out(worker, pull, now_s, now_s)
        else:
            self._pulling[worker] = (now_s, pull)
            self._apply(now_s)  # a given order may wait for a push that a shorter segment lacks
        return None

    def waiting(self) -> Iterator[tuple[int, float, Instruction]]:
        """Yield waiting workers, with the start of the wait and the instruction."""
        yield from ((worker, *waiting) for worker, waiting in self._pulling.items())

    def _answers(self, worker: int, pull: Instruction) -> bool:
        """Return whether a pull can be answered: the worker's pushes, and as many as it requires, are applied."""
        return worker not in self._outstanding and self._num_applied >= pull.version

    def _arrived(self, worker: int, push: Instruction, now_s: float) -> None:
        self._there[push.number] = (worker, push)
        self._arrived_s[worker] = now_s
        self._apply(now_s)

    def _apply(self, now_s: float) -> None:
        """Schedule the pushes whose turn it is, one after the other."""
        while (minibatch := self._turns.next_of(self._there)) is not None:
            worker, push = self._there.pop(minibatch)
            self._free_s = max(self._free_s, now_s) + self._update_s
            self._network.agenda.push(self._free_s, partial(self._made, worker, push))

    def _made(self, worker: int, push: Instruction, now_s: float) -> None:
        """Complete an update and answer the pulls that waited for it."""
        self._num_applied += 1
        self._outstanding.discard(worker)
        self._simulation.emit(TimelineEvent(now_s, now_s, worker, push))
        for puller, (since_s, pull) in list(self._pulling.items()):
            if self._answers(puller, pull):
                del self._pulling[puller]
                self._hand_out(puller, pull, since_s, now_s)

    def _hand_out(self, worker: int, pull: Instruction, since_s: float, now_s: float) -> None:
        """Send the newest weights to a worker, which resumes after their arrival and its own part of the message.

        Of its wait its push was on the way until that arrived, and the weights are from now on.
        """
        pushing_s = max(0.0, self._arrived_s.get(worker, since_s) - since_s)
        wait, wake = (since_s, pull, now_s - pushing_s), self._simulation.wake
        if worker == 0:
            wake(now_s, worker, wait)
        else:
            label = f"pull {pull.number}"
            self._send(0, worker, label, now_s, lambda then_s: wake(then_s + self._own_s, worker, wait))

    def _send(self, sender: int, receiver: int, label: str, now_s: float, then: Callable[[float], None]) -> None:
        """Send a gradient or weights; call `then` at the arrival."""
        message = self._network.send(
            self._network.connection(self._kind, sender, receiver), self._num_bytes, now_s, label
        )

        def arrived(then_s: float) -> None:
            self._network.arrived(message)
            then(then_s)

        self._network.sharing.notify(message, arrived, now_s)
