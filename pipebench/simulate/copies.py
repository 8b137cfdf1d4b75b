"""Copies between devices and hosts: a stage's saved activations leave after the forward and return for the backward.

A device has one lane per direction (PCIe is full duplex), on which copies run one after another; messages that enter or
leave the device take precedence on the same lane (`sharing`). A unit requested before its copy out has ended is copied
out first. Paper: vPipe (TPDS'21) section 4.1.
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
    """A unit's saved activations on their way to the host or back."""

    worker: int
    instruction: Instruction  # what requested it
    num_bytes: int
    start_s: float = -1.0  # negative before it begins
    waiting: tuple[Instruction, float] | None = None  # the worker's instruction that needs it, and since when

    @property
    def unit(self) -> tuple[int, int]:
        """The stage, and its unit."""
        return self.instruction.stage, self.instruction.number


class Copies:
    """All copies of a simulation; `num_bytes` are per stage and unit size, `ended` is called at each copy's end."""

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
        self._under_way: dict[tuple[Op, int, int], Copy] = {}  # or requested: by direction, stage and unit

    def begin(self, worker: int, instruction: Instruction, now_s: float) -> None:
        """Request a copy; it starts after those before it."""
        op, stage, unit, *_ = instruction
        copy = Copy(worker, instruction, self._num_bytes[stage].get(self._size_of(unit), 0))
        self._under_way[op, stage, unit] = copy
        queue = self._queues.setdefault((worker, op), deque())
        queue.append(copy)
        self._go_on(worker, op, now_s)

    def holds_up(self, instruction: Instruction, now_s: float) -> bool:
        """Return whether an instruction is a backward whose unit isn't back yet; it then waits for that copy."""
        op, stage, unit, *_ = instruction
        copy = self._under_way.get((Op.SWAP_IN, stage, unit)) if op in FIRST_PARTS else None
        if copy is not None:
            copy.waiting = instruction, now_s
        return copy is not None

    def _go_on(self, worker: int, op: Op, now_s: float) -> None:
        """Start the first copy of a queue if it may start."""
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
