"""Finds accesses to memory that no wait orders, among a host and the streams of a GPU, by vector clocks.

A launch comes after what its host has done before, and after what its stream has launched before. Every other order
needs an event, a wait or a synchronisation. An access that isn't ordered after an earlier write, or a write that isn't
ordered after an earlier access, is a race, whatever order a test happens to see. So is an allocation that may get the
memory of a freed tensor while another stream still uses it (`record_stream`).
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

Clock = dict[Hashable, int]  # of the host and every stream, how many of its operations have ended


class RaceError(AssertionError):
    """Two operations that no wait orders use the same memory."""


@dataclass
class _Use:
    by: Hashable
    number: int  # of the operation, on that stream or host
    name: str


@dataclass
class _Memory:
    """The last uses of a storage, which may be freed."""

    reference: StorageWeakRef
    home: Hashable  # the stream that allocated it, or the host
    written: _Use | None = None
    read: dict[Hashable, _Use] = field(default_factory=dict)
    recorded: set[Hashable] = field(default_factory=set)  # streams that freed memory waits for, by `record_stream`

    @property
    def uses(self) -> list[_Use]:
        return [*self.read.values(), *([self.written] if self.written else [])]

    @property
    def is_freed(self) -> bool:
        return bool(self.reference.expired())  # type: ignore[no-untyped-call] # torch lists no types


class Races:
    """The clocks of a host and its streams, and the uses of the memory that both may use."""

    HOST = "the host"

    def __init__(self) -> None:
        self._clocks: dict[Hashable, Clock] = {}
        self._memory: dict[int, _Memory] = {}
        self._shared: dict[int, _Memory] = {}  # used by other streams than its own
        self._most = 1 << 8  # entries after which those of freed memory are removed

    def clock(self, of: Hashable) -> Clock:
        """Return what a stream, or the host, waits for or has done so far."""
        return {**self._clocks.setdefault(of, {})}

    def order(self, then: Hashable, first: Clock) -> None:
        """Let what a stream, or the host, does next wait for what a clock counts."""
        later = self._clocks.setdefault(then, {})
        for each, number in first.items():
            later[each] = max(later.get(each, 0), number)

    def finish(self) -> None:
        """Let the host wait for all streams."""
        for clock in [*self._clocks.values()]:
            self.order(self.HOST, clock)

    def use(self, by: Hashable, name: str, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]) -> None:
        """Launch an operation on a stream, or let the host do it; raises RaceError."""
        if by != self.HOST:
            self.order(by, self._clocks.setdefault(self.HOST, {}))
        clock = self._clocks.setdefault(by, {})
        clock[by] = clock.get(by, 0) + 1
        use = _Use(by, clock[by], name)
        for tensor in reads:
            memory = self._of(tensor, by)
            self._check(use, [memory.written] if memory.written else [])
            memory.read[by] = use
        for tensor in writes:
            memory = self._of(tensor, by)
            self._check(use, memory.uses)
            memory.written, memory.read = use, {}

    def allocate(self, tensor: torch.Tensor, by: Hashable) -> None:
        """Note that a tensor was allocated for a stream; raises RaceError if it may have memory that is still used."""
        for address, memory in list(self._shared.items()):
            if memory.is_freed and memory.home == self.HOST:  # torch reuses pinned memory when streams have read it
                del self._shared[address]
            elif memory.is_freed and memory.home == by:
                self._check(_Use(by, 0, "an allocation in freed memory"), memory.uses, memory.recorded)
                del self._shared[address]
        # It may have the memory of a freed tensor that earlier work of this stream uses; other streams have to wait.
        self.use(by, "an allocation", [], [tensor])

    def record(self, tensor: torch.Tensor, stream: Hashable) -> None:
        """Let an allocation in a tensor's memory wait for a stream."""
        self._of(tensor, stream).recorded.add(stream)

    def _check(self, use: _Use, earlier: Iterable[_Use], waited_for: Iterable[Hashable] = ()) -> None:
        """Check that a use comes after earlier ones, as it does after all that streams `waited_for` wait for."""
        clocks = [self._clocks.setdefault(each, {}) for each in (use.by, *waited_for)]
        for each in earlier:
            if all(clock.get(each.by, 0) < each.number for clock in clocks):
                raise RaceError(f"{use.name} on {use.by} doesn't wait for {each.name} on {each.by}")

    def _of(self, tensor: torch.Tensor, by: Hashable) -> _Memory:
        reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        memory = self._memory.setdefault(reference.cdata, _Memory(reference, by))
        if by != memory.home:
            self._shared[reference.cdata] = memory
        if len(self._memory) > self._most:
            self._memory = {address: each for address, each in self._memory.items() if not each.is_freed}
            self._most = max(self._most, 2 * len(self._memory))
        return memory
