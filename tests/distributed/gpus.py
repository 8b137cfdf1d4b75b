"""Emulated GPUs with a simulated clock: streams, events, and operations between GPUs like NCCL's.

The hosts of all workers are threads of the test. They compute on the CPU, in no simulated time; tests put work with a
duration on streams. A stream works in order; an operation between GPUs begins when the streams of all its members have
reached it. So every time is known exactly, and is recorded for the test.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from pipebench.distributed.launch_join import HostSlot
from pipebench.distributed.world import World
from tests.patience import PATIENCE_S

UNKNOWN = float("inf")


class Event:
    """Of torch's interface; a time of a stream."""

    timing = 0  # how many have been made with times

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.s = UNKNOWN
        Event.timing += enable_timing
        self._timing = enable_timing

    def record(self, stream: "Stream | None" = None) -> None:
        self.s = UNKNOWN
        gpus = Gpus.present
        gpus.put(stream or gpus.here.stream, self._happen)

    def _happen(self, start_s: float) -> float:
        self.s = start_s
        return start_s

    def query(self) -> bool:
        return self.s <= Gpus.present.here.host_s

    def synchronize(self) -> None:
        gpus = Gpus.present
        gpus.until(lambda: self.s < UNKNOWN)
        gpus.here.host_s = max(gpus.here.host_s, self.s)

    def elapsed_time(self, other: "Event") -> float:
        """In milliseconds of single precision; never back in time."""
        assert {self._timing, other._timing} == {True}
        assert self.s <= other.s < UNKNOWN
        return float(torch.tensor(1e3 * (other.s - self.s), dtype=torch.float32))


class Stream:
    """A queue of steps; each, given its start, returns its end, or None while it can't begin."""

    def __init__(self, device: Any = None) -> None:
        self.steps: deque[tuple[float, Callable[[float], float | None]]] = deque()
        self.free_s = 0.0
        Gpus.present.here.streams.append(self)

    def go_on(self) -> bool:
        began = len(self.steps)
        while self.steps:
            issued_s, step = self.steps[0]
            end_s = step(max(self.free_s, issued_s))
            if end_s is None:
                break
            self.free_s = end_s
            self.steps.popleft()
        return len(self.steps) < began


@dataclass
class Operation:
    """A message or a sum: by rank what it is given, when it could begin, and when its stream came to it."""

    kind: str
    members: int
    lasts_s: float
    given: dict[int, Any] = field(default_factory=dict)
    ready: dict[int, Event] = field(default_factory=dict)
    came_s: dict[int, float] = field(default_factory=dict)

    @property
    def end_s(self) -> float:
        return max(self.came_s.values()) + self.lasts_s if len(self.came_s) == self.members else UNKNOWN


@dataclass
class Wait:
    """Of a computing stream."""

    operation: Operation
    since_s: float
    end_s: float


class Work:
    """What torch returns of an operation; `take` copies its result into this rank's tensor."""

    def __init__(self, operation: Operation, rank: int, take: Callable[[], None]) -> None:
        self.operation, self.rank, self.take = operation, rank, take

    def is_completed(self) -> bool:
        return self.operation.end_s <= Gpus.present.here.host_s

    def wait(self) -> None:
        """Let the current stream wait, and the host for the values."""
        gpus = Gpus.present
        stream, waits = gpus.here.stream, gpus.here.waits

        def over(since_s: float) -> float | None:
            end_s = max(since_s, self.operation.end_s)
            if end_s == UNKNOWN:
                return None
            if stream is gpus.ranks[self.rank].computing:
                waits.append(Wait(self.operation, since_s, end_s))
            return end_s

        gpus.put(stream, over)
        self.take()

    def _get_duration(self) -> float:
        return 1e3 * (self.operation.end_s - self.operation.came_s[self.rank])


@dataclass
class Rank:
    """One host with its GPU."""

    host_s: float = 0.0
    streams: list[Stream] = field(default_factory=list)
    computing: Stream = None  # type: ignore[assignment] # made at once
    stream: Stream = None  # type: ignore[assignment] # the current one
    waits: list[Wait] = field(default_factory=list)
    computed_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))


class Gpus:
    """All ranks, and `torch.distributed` and `torch.cuda` to them.

    Args:
        size: number of ranks.
        message_s: what a message takes from both being there.
        sum_s: what a sum takes.
        wire_s: what a message between hosts takes.
        launch_s: what a host takes to put anything on a stream.
        skew_s: how much later than the rank before a rank's clock starts.
    """

    present: "Gpus"

    def __init__(
        self,
        size: int,
        *,
        message_s: float = 0.0,
        sum_s: float = 0.0,
        wire_s: float = 0.0,
        launch_s: float = 0.0,
        skew_s: float = 0.0,
    ) -> None:
        Gpus.present = self
        self.size, self.message_s, self.sum_s, self.wire_s = size, message_s, sum_s, wire_s
        self.launch_s, self.skew_s = launch_s, skew_s
        self._changed = threading.Condition(threading.RLock())
        self.takes_s: Mapping[Any, float] = {}  # for the test's own use
        self._failed = False
        self._local = threading.local()
        self._barrier = threading.Barrier(size)
        self._exchanged: dict[int, Any] = {}
        self._mail: dict[Any, deque[tuple[torch.Tensor, float]]] = defaultdict(deque)
        self._nccl: dict[tuple[Any, int], Stream] = {}
        self.operations: dict[tuple[Any, int], Operation] = {}
        self._counts: dict[tuple[Any, int], int] = defaultdict(int)
        self.ranks = [Rank() for _ in range(size)]
        for rank in range(size):
            self.enter(rank)
            self.here.computing = self.here.stream = Stream()

    def enter(self, rank: int) -> None:
        self._local.rank = rank

    @property
    def rank(self) -> int:
        return int(self._local.rank)

    @property
    def here(self) -> Rank:
        return self.ranks[self.rank]

    def put(self, stream: Stream, step: Callable[[float], float | None]) -> None:
        """Put a step on a stream; then everything goes on as far as it can."""
        with self._changed:
            self.here.host_s += self.launch_s
            stream.steps.append((self.here.host_s, step))
            while sum(each.go_on() for rank in self.ranks for each in rank.streams):
                pass
            self._changed.notify_all()

    def begin(self) -> None:
        """Begin training: forget this rank's earlier operations and waits."""
        self.here.waits.clear()
        with self._changed:
            before = [key for key, operation in self.operations.items() if self.rank in operation.ready]
            for key in before:
                del self.operations[key]

    def operations_of(self, rank: int) -> list[Operation]:
        with self._changed:
            return [operation for operation in self.operations.values() if rank in operation.ready]

    def give_up(self) -> None:
        self._barrier.abort()
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    def compute(self, name: str, seconds: float) -> None:
        self.here.computed_s[name] += seconds
        self.put(self.here.computing, lambda start_s: start_s + seconds)

    def until(self, condition: Callable[[], Any]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._failed or condition(), PATIENCE_S)
            assert not self._failed

    def synchronize(self, device: Any = None) -> None:
        here = self.here
        self.until(lambda: not any(stream.steps for stream in here.streams))
        here.host_s = max(here.host_s, *(stream.free_s for stream in here.streams))

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.here.stream = self.here.stream, stream
        yield
        self.here.stream = before

    def exchange(self, value: Any) -> list[Any]:
        """Exchange values between all ranks; all hosts continue at the latest one's time."""
        self._exchanged[self.rank] = (value, self.here.host_s)
        self._barrier.wait(PATIENCE_S)
        exchanged = [self._exchanged[rank] for rank in range(self.size)]
        self._barrier.wait(PATIENCE_S)
        self.here.host_s = max(host_s for _, host_s in exchanged) + self.rank * self.skew_s
        return [value for value, _ in exchanged]

    # torch.distributed. Messages with a tag are Gloo's, between hosts.

    def isend(
        self, data: torch.Tensor, peer: int = -1, *, group: Any, tag: int | None = None, group_dst: int = -1
    ) -> Any:
        if group_dst >= 0:  # of a group that gathers
            return self._operation("sum", (*group, self.rank), 1, self.sum_s, data.detach().clone(), lambda _: None)
        if tag is None:
            return self._operation("message", group, 1, self.message_s, data.detach().clone(), lambda _: None)
        with self._changed:
            self._mail[group, tag, self.rank, peer].append((data.clone(), self.here.host_s))
            self._changed.notify_all()
        return _Done(lambda: None)

    def irecv(
        self, data: torch.Tensor, peer: int = -1, *, group: Any, tag: int | None = None, group_src: int = -1
    ) -> Any:
        if group_src >= 0:
            way = (*group, group[1][group_src])
            return self._operation("sum", way, 1, self.sum_s, None, lambda given: data.copy_(given[0]))
        if tag is None:
            take = lambda given: data.view(-1).copy_(given[0].reshape(-1))  # noqa: E731
            return self._operation("message", group, 1, self.message_s, None, take)
        key = (group, tag, peer, self.rank)

        def arrive() -> None:
            self.until(lambda: self._mail[key])
            given, sent_s = self._mail[key].popleft()
            data[: len(given)] = given
            self.here.host_s = max(self.here.host_s, sent_s + self.wire_s)

        return _Done(arrive)

    def P2POp(self, kind: Callable[..., Any], data: torch.Tensor, *, group: Any, group_peer: int) -> Any:  # noqa: N802
        return partial(kind, data, group=group, **{"group_dst" if kind == self.isend else "group_src": group_peer})

    def batch_isend_irecv(self, operations: Sequence[Callable[[], Any]]) -> list[Any]:
        return [operation() for operation in operations]

    def send(self, data: torch.Tensor, peer: int, group: Any) -> None:
        self.isend(data, peer, group=group).wait()

    def recv(self, data: torch.Tensor, peer: int, group: Any) -> None:
        self.irecv(data, peer, group=group).wait()

    def all_reduce(self, data: torch.Tensor, group: Any, async_op: bool = False) -> Any:
        size = len(group[1])
        work = self._operation("sum", group, size, self.sum_s, data.clone(), lambda given: data.copy_(sum(given)))
        return work if async_op else work.wait()

    def all_to_all_single(
        self, output: torch.Tensor, data: torch.Tensor, takes: list[int], gives: list[int], group: Any, async_op: bool
    ) -> Work:
        ranks = group[1]
        own = ranks.index(self.rank)

        def take(given: Sequence[Any]) -> None:
            output.copy_(torch.cat([each[own] for each in given]))

        cuts = [cut.clone() for cut in torch.split(data, gives)]
        assert async_op
        return self._operation("sum", group, len(ranks), self.sum_s, cuts, take)

    def get_world_size(self, group: Any) -> int:
        return len(group[1])

    def get_rank(self, group: Any) -> int:
        return int(group[1].index(self.rank))

    def _operation(
        self, kind: str, group: Any, givers: int, lasts_s: float, data: Any, take: Callable[[Sequence[Any]], Any]
    ) -> Work:
        """Put an operation on NCCL's stream of a group, behind what the current stream has been given."""
        rank, ready, done = self.rank, Event(), list[None]()
        ready.record()
        with self._changed:
            number = self._counts[group, rank]
            self._counts[group, rank] += 1
            operation = self.operations.setdefault((group, number), Operation(kind, max(2, givers), lasts_s))
            operation.ready[rank] = ready
            if data is not None:
                operation.given[rank] = data
            if (group, rank) not in self._nccl:
                self._nccl[group, rank] = Stream()

        def come(start_s: float) -> float | None:
            if ready.s == UNKNOWN:
                return None
            operation.came_s.setdefault(rank, max(start_s, ready.s))
            return None if operation.end_s == UNKNOWN else operation.end_s

        def taken() -> None:
            if not done:
                done.append(None)
                self.until(lambda: len(operation.given) == givers)
                take([operation.given[each] for each in sorted(operation.given)])

        self.put(self._nccl[group, rank], come)
        return Work(operation, rank, taken)


class _Done:
    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait


class MadeUpWorld(World):
    """Workers that are threads, with emulated GPUs."""

    def exchange(self, value: Any) -> list[Any]:
        return Gpus.present.exchange(value)

    def hand_over(self, parcels: Mapping[int, bytes]) -> dict[int, bytes]:
        offers = Gpus.present.exchange(parcels)
        return {rank: each[self.rank] for rank, each in enumerate(offers) if each.get(self.rank)}

    def new_group(
        self, backend: str, ranks: Sequence[int] | None = None, *, num_pairs: int = 0, limit_s: float | None = None
    ) -> Any:
        self._num_groups += 1
        return self._num_groups, tuple(range(self.size) if ranks is None else ranks)

    def mark_started(self) -> None:
        """There is no launcher."""


def world_of(rank: int, size: int, *, direct: bool) -> MadeUpWorld:
    slot = HostSlot(rank, size, rank, size, "", 0, agent_store=False, attempt=None)
    store: Any = None
    return MadeUpWorld(slot, torch.device("cpu"), direct=direct, store=store, operation_limit_s=1.0, connection=store,
                       shares_memory=False)  # fmt: skip
