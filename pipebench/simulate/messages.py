"""Messages between stages: those not yet received, and the workers that wait for one.

Stages send activations to the stages that read them, and gradients back. If layers move, extensions add messages. Each
end of a message may occupy its worker.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from pipebench.model.sampling import Size
from pipebench.schedule.instructions import Instruction
from pipebench.schedule.operations import ACTIVATION, GRADIENT, OPERATIONS, RECEIVE, SEND, Op, with_role
from pipebench.schedule.pipeline import Pipeline
from pipebench.schedule.programs import most_in_flight
from pipebench.simulate.costs import Costs
from pipebench.simulate.network import Message, Network
from pipebench.simulate.reductions import Wait, Wake

SENDS = tuple(op for op in with_role(SEND) if OPERATIONS[op].kind)  # a push goes to a server
RECEIVES = with_role(RECEIVE)

_Stages = tuple[int, int]  # the stages that send and receive a message
Resume = Callable[[int, Instruction, float], None]  # lets a worker that was held up play its instruction at a time


@dataclass
class _Edge:
    """Messages of one kind from one stage to another."""

    kind: str  # of bytes
    letter: str  # that labels begin with
    num_bytes: Mapping[Size, int]  # by size of the unit
    readers: tuple[int, ...]  # workers of the receiving stage, in order of its replicas
    replicas: int  # of the receiving stage
    values: float = 1.0  # number of equal values per message
    weigh: Callable[[Instruction], int] | None = None  # returns the bytes of a send, in place of `num_bytes`
    pace: "_Pace | None" = None  # None: the gradients that come back pace the sender
    # By unit, messages sent and not yet received, and when they were sent
    arrived: dict[int, tuple[Message, float]] = field(default_factory=dict)
    # By unit, the time since which its receiver waits, and the receive
    waiting: dict[int, tuple[float, Instruction]] = field(default_factory=dict)


@dataclass
class _Pace:
    """The limit on messages of an edge without gradients that are sent and not yet received."""

    most: int  # per pair of workers
    num_unreceived: Counter[tuple[int, int]] = field(default_factory=Counter)  # by pair, messages under way
    # By pair, the time since which a sender is held up, and the send
    held: dict[tuple[int, int], tuple[float, Instruction]] = field(default_factory=dict)


class Messages:
    """All messages between the stages of a simulation.

    Args:
        pipeline: the order of work.
        costs: sizes of messages, and what they cost their workers.
        network: carries the messages.
        size_of: returns a unit's size.
        wake: lets a worker continue at a time.
        copies: whether messages between hosts occupy the lanes that copies of activations use.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        costs: Costs,
        network: Network,
        size_of: Callable[[int], Size],
        wake: Wake,
        *,
        copies: bool,
    ) -> None:
        self._pipeline, self._host, self._network, self._size_of = pipeline, costs.host, network, size_of
        self._copies, self._wake = copies, wake
        self._resume: Resume | None = None
        places, replicas = pipeline.places, pipeline.replicas
        activations: dict[_Stages, _Edge] = {}
        gradients: dict[_Stages, _Edge] = {}
        for (source, target), sizes in costs.activation_bytes.items():
            values, _ = costs.values.get((source, target), (1.0, 1.0))
            activations[source, target] = _Edge(ACTIVATION, "F", sizes, places[target], replicas[target], values)
        for (source, target), sizes in costs.gradient_bytes.items():
            _, values = costs.values.get((source, target), (1.0, 1.0))
            gradients[target, source] = _Edge(GRADIENT, "B", sizes, places[source], replicas[source], values)
        self._edges = {
            Op.SEND_ACTIVATION: activations,
            Op.RECEIVE_ACTIVATION: activations,
            Op.SEND_GRADIENT: gradients,
            Op.RECEIVE_GRADIENT: gradients,
        }

    def pace(self, resume: Resume) -> None:
        """Limit how far senders run ahead on edges without gradients; no gradient that they wait for does.

        As in processes, a worker may have sent as many messages that another hasn't received as gradients would allow
        (`most_in_flight`). `resume` lets a worker that was held up send.
        """
        unanswered = [(edge.source, edge.target) for edge in self._pipeline.edges if not edge.has_gradient]
        most = most_in_flight(self._pipeline) if unanswered else ()
        for source, target in unanswered:
            self._edges[Op.SEND_ACTIVATION][source, target].pace = _Pace(most[source])
        self._resume = resume if unanswered else None

    def connect(
        self, kind: str, letter: str, edges: Iterable[_Stages], weigh: Callable[[Instruction], int], ops: Iterable[Op]
    ) -> None:
        """Let the instructions `ops` send and receive messages of another kind over `edges`, pairs of stages.

        Args:
            kind: of bytes.
            letter: that labels begin with.
            edges: pairs of sending and receiving stages.
            weigh: returns the bytes of a send.
            ops: the operations that send and receive these messages.
        """
        places, replicas = self._pipeline.places, self._pipeline.replicas
        made = {edge: _Edge(kind, letter, {}, places[edge[1]], replicas[edge[1]], weigh=weigh) for edge in edges}
        self._edges |= dict.fromkeys(ops, made)

    def send(self, worker: int, send: Instruction, now_s: float) -> float | None:
        """Send a message; return the seconds that this occupies the worker, None if it is held up and resumed later."""
        op, stage, unit, other, _, _, _ = send
        edge = self._edges[op][stage, other]
        peer = edge.readers[unit % edge.replicas]
        if edge.pace is not None:
            if edge.pace.num_unreceived[worker, peer] >= edge.pace.most:
                edge.pace.held[worker, peer] = now_s, send
                return None
            edge.pace.num_unreceived[worker, peer] += 1
        num_bytes = edge.num_bytes[self._size_of(unit)] if edge.weigh is None else edge.weigh(send)
        connection = self._network.connection(edge.kind, worker, peer)
        label = ""
        if self._network.observed:
            label = edge.letter + (str(unit) if op is Op.GIVE else self._pipeline.label(unit))
        message = self._network.send(connection, num_bytes, now_s, label, edge.values)
        waiting = edge.waiting.pop(unit, None)
        if waiting is None:
            edge.arrived[unit] = message, now_s
        else:
            self._wake_at_arrival(message, peer, (*waiting, now_s), now_s)
        return self._end_s(message)

    def receive(self, worker: int, receive: Instruction, now_s: float) -> float | None:
        """Receive a message; return 0 if that is over now, None if the worker waits and will be woken."""
        op, stage, unit, other, _, _, _ = receive
        edge = self._edges[op][other, stage]
        arrived = edge.arrived.pop(unit, None)
        if arrived is None:
            edge.waiting[unit] = now_s, receive
            return None
        message, sent_s = arrived
        wait = now_s, receive, sent_s
        if message.arrival_s > now_s:
            self._wake_at_arrival(message, worker, wait, now_s)
            return None
        return None if self._taken(message, worker, wait, now_s) is None else 0.0

    def num_bytes(self, instruction: Instruction) -> int:
        """Return the bytes of the activation or gradient that an instruction sends or receives."""
        op, stage, unit, other, *_ = instruction
        return self._edges[op][(stage, other) if op in SENDS else (other, stage)].num_bytes[self._size_of(unit)]

    def waiting(self) -> Iterator[tuple[int, float, Instruction]]:
        """Yield waiting workers, the time since which they wait, and their instructions."""
        for op in (Op.RECEIVE_ACTIVATION, Op.RECEIVE_GRADIENT, Op.TAKE):
            for (_, stage), edge in self._edges.get(op, {}).items():
                for unit, waiting in sorted(edge.waiting.items()):
                    yield self._pipeline.worker(stage, unit), *waiting
                for (worker, _), held in sorted(edge.pace.held.items() if edge.pace else ()):
                    yield worker, *held

    def _wake_at_arrival(self, message: Message, worker: int, wait: Wait, now_s: float) -> None:
        """Let a worker continue once a message has arrived and the worker's own end of it is done."""
        self._network.sharing.notify(message, partial(self._taken, message, worker, wait), now_s)

    def _taken(self, message: Message, worker: int, wait: Wait, now_s: float) -> tuple[int, Wait] | None:
        """Receive a message; return the worker if it continues now, None if its end of the message takes time."""
        self._network.arrived(message)
        if self._resume is not None:
            self._let_next(self._resume, worker, wait[1], now_s)
        if self._copies:
            self._network.copy_with_host(message, now_s, out=False)
        end_s = self._end_s(message)
        if end_s == 0:
            return worker, wait
        self._wake(now_s + end_s, worker, wait)
        return None

    def _let_next(self, resume: Resume, worker: int, receive: Instruction, now_s: float) -> None:
        """Count a message as received; resume its sender if that is held up."""
        op, stage, unit, other, *_ = receive
        pace = self._edges[op][other, stage].pace
        if pace is None:
            return
        pair = self._pipeline.worker(other, unit), worker
        pace.num_unreceived[pair] -= 1
        held = pace.held.pop(pair, None)
        if held is not None:
            self._network.agenda.push(now_s, partial(resume, pair[0], held[1]))  # after the reader has continued

    def _end_s(self, message: Message) -> float:
        """Return the seconds that one end of a message occupies its worker; 0 if nothing is sent."""
        num_bytes, connection = message.num_bytes, message.connection
        if not num_bytes:
            return 0.0
        host_s = self._host.message(num_bytes)
        return host_s + connection.level.copy_s(num_bytes) if connection.copies else host_s
