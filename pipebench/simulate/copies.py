"""Copies between devices and their hosts: what a stage saves of a unit goes out after its forward, and comes back.

A device has a lane to its host each way (PCIe is full duplex). Copies of one direction of one device go one after the
other; messages that enter or leave the device take what they need of the same lane first (`sharing`: copies give way).
A unit that is asked for before it is out goes out first. Paper: vPipe (TPDS'21) section 4.1.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from pipebench.model.sampling import Size
from pipebench.schedule.instructions import FIRST_PARTS, Instruction
from pipebench.schedule.operations import COPY, Op, with_kind
from pipebench.simulate.network import Network
from pipebench.simulate.timeline import PCIE, Transfer

_KINDS: Final = with_kind(COPY)


@dataclass
class Copy:
    """What a stage saved of a unit, on its way to the host or back.

    Attributes:
        worker: whose device it is.
        instruction: that asked for it.
        num_bytes: how much is copied.
        start_s: when it began; negative before.
        waiting: the instruction of the worker that can't begin before it has ended, and since when.
    """

    worker: int
    instruction: Instruction
    num_bytes: int
    start_s: float = -1.0
    waiting: tuple[Instruction, float] | None = None

    @property
    def unit(self) -> tuple[int, int]:
        """The stage, and its unit."""
        return self.instruction.stage, self.instruction.number


class Copies:
    """All copies of a simulation.

    Args:
        num_bytes: of a unit, per stage, by what its costs depend on.
        network: has the lanes.
        size_of: what a unit's costs depend on.
        label: a unit's short name.
        ended: is told of every copy that has ended, and when.
    """

    def __init__(
        self,
        num_bytes: Sequence[Mapping[Size, int]],
        network: Network,
        size_of: Callable[[int], Size],
        label: Callable[[int], str],
        ended: Callable[[Copy, float], None],
    ) -> None:
        self._num_bytes, self._network = num_bytes, network
        self._size_of, self._label, self._tell = size_of, label, ended
        self._queues: dict[tuple[int, Op], deque[Copy]] = {}
        self._under_way: dict[tuple[Op, int, int], Copy] = {}  # and asked for: by direction, stage and unit

    def begin(self, worker: int, instruction: Instruction, now_s: float) -> None:
        """Ask for a copy; it goes when those before it are through."""
        op, stage, unit, *_ = instruction
        copy = Copy(worker, instruction, self._num_bytes[stage].get(self._size_of(unit), 0))
        self._under_way[op, stage, unit] = copy
        queue = self._queues.setdefault((worker, op), deque())
        queue.append(copy)
        self._go_on(worker, op, now_s)

    def holds_up(self, instruction: Instruction, now_s: float) -> bool:
        """Return whether an instruction is a backward whose unit isn't back yet: it waits for that copy's end."""
        op, stage, unit, *_ = instruction
        copy = self._under_way.get((Op.SWAP_IN, stage, unit)) if op in FIRST_PARTS else None
        if copy is not None:
            copy.waiting = instruction, now_s
        return copy is not None

    def _go_on(self, worker: int, op: Op, now_s: float) -> None:
        """Let the first of a queue go, if it may."""
        queue = self._queues.get((worker, op))
        if not queue or queue[0].start_s >= 0:
            return
        copy = queue[0]
        if op is Op.SWAP_IN and (Op.SWAP_OUT, *copy.unit) in self._under_way:
            return
        copy.start_s = now_s
        if copy.num_bytes:
            self._network.copy(worker, copy.num_bytes, now_s, partial(self._ended, copy), out=op is Op.SWAP_OUT)
        else:
            self._ended(copy, now_s)

    def _ended(self, copy: Copy, now_s: float) -> None:
        op, worker = copy.instruction.op, copy.worker
        self._queues[worker, op].popleft()
        del self._under_way[op, *copy.unit]
        if copy.num_bytes:
            kind, label = _KINDS[op], self._label(copy.instruction.number)
            # In a trace, an arrow goes from a copy in to the backward it is for.
            label = f"B{label}" if op is Op.SWAP_IN else label
            self._network.copied(Transfer(kind, label, (worker,), (worker,), PCIE, copy.num_bytes, copy.start_s, now_s))
        self._tell(copy, now_s)
        self._go_on(worker, op, now_s)
        if op is Op.SWAP_OUT:
            self._go_on(worker, Op.SWAP_IN, now_s)
