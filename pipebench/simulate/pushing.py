"""Parameter servers that apply gradients as they come: pushes in transit, applied one by one, pulls answered."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from pipebench.schedule.instructions import Instruction
from pipebench.schedule.pipeline import Pipeline
from pipebench.schedule.pushes import Turns
from pipebench.schedule.syncs import SYNCS
from pipebench.simulate.costs import Costs
from pipebench.simulate.network import Message, Network
from pipebench.simulate.reductions import Wake


@dataclass
class Pushing:
    """A stage's server, next to its first replica."""

    pipeline: Pipeline
    costs: Costs
    network: Network
    turns: Turns  # the order of pushes
    wake: Wake  # lets a worker continue at a time
    # Called for every update: time, the worker that pushed, its instruction
    applied: Callable[[float, int, Instruction], None]
    _there: dict[int, tuple[int, Instruction]] = field(default_factory=dict)  # pushes that have arrived, by minibatch
    _free_s: float = 0.0  # end of the pushes being applied
    _num_applied: int = 0
    _outstanding: set[int] = field(default_factory=set)  # workers whose push isn't applied yet
    _pulling: dict[int, tuple[float, Instruction]] = field(default_factory=dict)  # since when, by worker

    def push(self, worker: int, push: Instruction, now_s: float) -> float:
        """Send gradients to the server; return the seconds that sending occupies the worker."""
        host, num_bytes = self.pipeline.workers_of(push.stage)[0], self._weight_bytes(push.stage)
        self._outstanding.add(worker)
        if worker == host:
            self.network.agenda.push(now_s, partial(self._arrived, worker, push, None))
            return 0.0
        connection = self.network.connection(SYNCS[self.pipeline.sync].kind, worker, host)
        message = self.network.send(connection, num_bytes, now_s, f"push {push.number}")
        self.network.sharing.tell(message, partial(self._arrived, worker, push, message), now_s)
        return self.costs.host.message(num_bytes)

    def pull(self, worker: int, pull: Instruction, now_s: float) -> float | None:
        """Return when the pulled weights are there; None if the worker waits and will be woken."""
        if self._answers(worker, pull) and worker == self.pipeline.workers_of(pull.stage)[0]:
            return now_s
        if self._answers(worker, pull):
            self._hand_out(worker, pull, now_s, now_s)
        else:
            self._pulling[worker] = (now_s, pull)
            self._apply(now_s)  # a given order may have waited for a push that a shorter segment lacks
        return None

    def waiting(self) -> Iterator[tuple[int, float, Instruction]]:
        """Yield waiting workers, since when, and their instructions."""
        yield from ((worker, *waiting) for worker, waiting in self._pulling.items())

    def _answers(self, worker: int, pull: Instruction) -> bool:
        """Return whether a pull can be answered: the worker's own push is applied, and enough others."""
        return worker not in self._outstanding and self._num_applied >= pull.version

    def _arrived(self, worker: int, push: Instruction, message: Message | None, now_s: float) -> None:
        if message is not None:
            self.network.arrived(message)
        self._there[push.number] = (worker, push)
        self._apply(now_s)

    def _apply(self, now_s: float) -> None:
        """Apply the pushes whose turn it is, one after another."""
        while (minibatch := self.turns.next_of(self._there)) is not None:
            worker, push = self._there.pop(minibatch)
            self._free_s = max(self._free_s, now_s) + self.costs.stages[push.stage].update_s
            self.network.agenda.push(self._free_s, partial(self._made, worker, push))

    def _made(self, worker: int, push: Instruction, now_s: float) -> None:
        """Answer the pulls that waited for an update."""
        self._num_applied += 1
        self._outstanding.discard(worker)
        self.applied(now_s, worker, push)
        for puller, (since_s, pull) in list(self._pulling.items()):
            if self._answers(puller, pull):
                del self._pulling[puller]
                self._hand_out(puller, pull, since_s, now_s)

    def _hand_out(self, worker: int, pull: Instruction, since_s: float, now_s: float) -> None:
        """Send the newest weights to a worker; it continues when they have arrived and its own part is done."""
        host, num_bytes = self.pipeline.workers_of(pull.stage)[0], self._weight_bytes(pull.stage)
        wait = (since_s, pull, now_s)
        if worker == host:
            self.wake(now_s, worker, wait)
            return
        connection = self.network.connection(SYNCS[self.pipeline.sync].kind, host, worker)
        message = self.network.send(connection, num_bytes, now_s, f"pull {pull.number}")

        def arrived(then_s: float) -> None:
            self.network.arrived(message)
            self.wake(then_s + self.costs.host.message(num_bytes), worker, wait)

        self.network.sharing.tell(message, arrived, now_s)

    def _weight_bytes(self, stage: int) -> int:
        return sum(bucket.num_bytes for bucket in self.costs.stages[stage].buckets)
