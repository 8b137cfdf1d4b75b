"""Servers that apply gradients as they come: pushes on their way, one after the other applied, pulls answered."""

from collections.abc import Iterator
from functools import partial

from pipebench.extensions.asynchronous.pushes import Turns
from pipebench.schedule.instructions import Instruction
from pipebench.schedule.operations import Op
from pipebench.schedule.syncs import ASYNCHRONOUS, SYNCS
from pipebench.simulate.network import Message
from pipebench.simulate.simulation import LATER, Simulation, SimulationExtension, TimelineEvent


class Pushing(SimulationExtension):
    """The server of a stage, beside its first replica; messages to and from it, and who waits for it.

    Args:
        simulation: of one stage, and its replicas.

    Attributes:
        plays: how pushes and pulls are begun.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation, self._pipeline = simulation, simulation.pipeline
        self._costs, self._network, part = simulation.costs, simulation.network, simulation.part
        order = self._pipeline.extensions.get(ASYNCHRONOUS, {})
        self._turns = Turns() if part is None else Turns(order.get(part.first), part.limit)
        self._there: dict[int, tuple[int, Instruction]] = {}  # pushes that have arrived, by minibatch
        self._free_s = 0.0  # when the server is done with those it has begun to apply
        self._num_applied = 0
        self._outstanding: set[int] = set()  # workers whose push isn't applied yet
        self._pulling: dict[int, tuple[float, Instruction]] = {}  # since when, by worker
        self.plays = {Op.PUSH: self._push, Op.PULL: self._pull}

    def _push(self, worker: int, push: Instruction, now_s: float) -> float | None:
        """Let gradients set out for the server; the event is that it has applied them."""
        host, num_bytes = self._pipeline.workers_of(push.stage)[0], self._weight_bytes(push.stage)
        self._outstanding.add(worker)
        if worker == host:
            self._network.agenda.push(now_s, partial(self._arrived, worker, push, None))
            return LATER
        connection = self._network.connection(SYNCS[self._pipeline.sync].kind, worker, host)
        message = self._network.send(connection, num_bytes, now_s, f"push {push.number}")
        self._network.sharing.tell(message, partial(self._arrived, worker, push, message), now_s)
        lasts_s = self._costs.host.message(num_bytes)
        if lasts_s == 0:
            return LATER
        self._simulation.wake(now_s + lasts_s, worker, None)
        return None

    def _pull(self, worker: int, pull: Instruction, now_s: float) -> float | None:
        """Let a worker wait for the weights that it pulls, unless it has them: the server is beside it."""
        if self._answers(worker, pull) and worker == self._pipeline.workers_of(pull.stage)[0]:
            return 0.0
        if self._answers(worker, pull):
            self._hand_out(worker, pull, now_s, now_s)
        else:
            self._pulling[worker] = (now_s, pull)
            self._apply(now_s)  # a given order may have waited for what a shorter segment doesn't have
        return None

    def waiting(self) -> Iterator[tuple[int, float, Instruction]]:
        """Yield workers that wait, since when and in which instruction."""
        yield from ((worker, *waiting) for worker, waiting in self._pulling.items())

    def _answers(self, worker: int, pull: Instruction) -> bool:
        """Return whether a pull can be answered: what the worker has pushed is in, or all that it waits for."""
        return worker not in self._outstanding and self._num_applied >= pull.version

    def _arrived(self, worker: int, push: Instruction, message: Message | None, now_s: float) -> None:
        if message is not None:
            self._network.arrived(message)
        self._there[push.number] = (worker, push)
        self._apply(now_s)

    def _apply(self, now_s: float) -> None:
        """Begin with the pushes whose turn it is, one after the other."""
        while (minibatch := self._turns.next_of(self._there)) is not None:
            worker, push = self._there.pop(minibatch)
            self._free_s = max(self._free_s, now_s) + self._costs.stages[push.stage].update_s
            self._network.agenda.push(self._free_s, partial(self._made, worker, push))

    def _made(self, worker: int, push: Instruction, now_s: float) -> None:
        """An update is made: whoever waits for it gets the weights."""
        self._num_applied += 1
        self._outstanding.discard(worker)
        self._simulation.tell(TimelineEvent(now_s, now_s, worker, push))
        for puller, (since_s, pull) in list(self._pulling.items()):
            if self._answers(puller, pull):
                del self._pulling[puller]
                self._hand_out(puller, pull, since_s, now_s)

    def _hand_out(self, worker: int, pull: Instruction, since_s: float, now_s: float) -> None:
        """Let the newest weights set out for a worker; it goes on when they are there, and its own part is done."""
        host, num_bytes = self._pipeline.workers_of(pull.stage)[0], self._weight_bytes(pull.stage)
        wait = (since_s, pull, now_s)
        if worker == host:
            self._simulation.wake(now_s, worker, wait)
            return
        connection = self._network.connection(SYNCS[self._pipeline.sync].kind, host, worker)
        message = self._network.send(connection, num_bytes, now_s, f"pull {pull.number}")

        def arrived(then_s: float) -> None:
            self._network.arrived(message)
            self._simulation.wake(then_s + self._costs.host.message(num_bytes), worker, wait)

        self._network.sharing.tell(message, arrived, now_s)

    def _weight_bytes(self, stage: int) -> int:
        return sum(bucket.num_bytes for bucket in self._costs.stages[stage].buckets)
