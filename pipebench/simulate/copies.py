"""Copies between devices and hosts: a stage's saved activations leave after the forward and return for the backward.

A device has one lane per direction, since PCIe is full duplex. Copies on a lane run one after another, and messages
that enter or leave the device take precedence (`sharing`). A unit whose copy in is requested before its copy out has
ended is copied out first. Paper: vPipe (TPDS'21) section 4.1.
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
    """A copy of a unit's saved activations to the host, or back."""

    worker: int
    instruction: Instruction  # that requested it
    num_bytes: int
    start_s: float = -1.0  # negative before it begins
    waiting: tuple[Instruction, float] | None = None  # the instruction that waits for it, and since when

    @property
    def unit(self) -> tuple[int, int]:
        """The stage, and the unit's number."""
        return self.instruction.stage, self.instruction.number


class Copies:
    """All copies of a simulation.

    Args:
        num_bytes: of a unit, by stage and size of the unit.
        network: whose lanes the copies use.
        size_of: returns a unit's size.
        label: returns a unit's label.
        on_end: called with each copy, and the time, at its end.
    """

    def __init__(
        self,
        num_bytes: Sequence[Mapping[Size, int]],
        network: Network,
        size_of: Callable[[int], Size],
        label: Callable[[int], str],
        on_end: Callable[[Copy, float], None],
    ) -> None:
        self._num_bytes, self._network = num_bytes, network
        self._size_of, self._label, self._on_end = size_of, label, on_end
        self._queues: dict[tuple[int, Op], deque[Copy]] = {}  # by worker and direction, the running copy first
        self._pending: dict[tuple[Op, int, int], Copy] = {}  # queued or running, by direction, stage and unit

    def begin(self, worker: int, instruction: Instruction, now_s: float) -> None:
        """Request a copy, which starts after those requested before it."""
        op, stage, unit, *_ = instruction
        copy = Copy(worker, instruction, self._num_bytes[stage].get(self._size_of(unit), 0))
        self._pending[op, stage, unit] = copy
        queue = self._queues.setdefault((worker, op), deque())
        queue.append(copy)
        self._go_on(worker, op, now_s)

    def holds_up(self, instruction: Instruction, now_s: float) -> bool:
        """Return whether an instruction is a backward whose unit isn't back yet; the copy then remembers it."""
        op, stage, unit, *_ = instruction
        copy = self._pending.get((Op.SWAP_IN, stage, unit)) if op in FIRST_PARTS else None
        if copy is not None:
            copy.waiting = instruction, now_s
        return copy is not None

    def _go_on(self, worker: int, op: Op, now_s: float) -> None:
        """Start the first copy of a queue if it may start."""
        queue = self._queues.get((worker, op))
        if not queue or queue[0].start_s >= 0:
            return
        copy = queue[0]
        if op is Op.SWAP_IN and (Op.SWAP_OUT, *copy.unit) in self._pending:
            return
        copy.start_s = now_s
        if copy.num_bytes:
            self._network.copy(worker, copy.num_bytes, now_s, partial(self._ended, copy), out=op is Op.SWAP_OUT)
        else:
            self._ended(copy, now_s)

    def _ended(self, copy: Copy, now_s: float) -> None:
        op, worker = copy.instruction.op, copy.worker
        self._queues[worker, op].popleft()
        del self._pending[op, *copy.unit]
        if copy.num_bytes:
            kind, label = _KINDS[op], self._label(copy.instruction.number)
            # A copy in is labelled as its backward: a trace draws an arrow between equal labels.
            label = f"B{label}" if op is Op.SWAP_IN else label
            self._network.copied(Transfer(kind, label, (worker,), (worker,), PCIE, copy.num_bytes, copy.start_s, now_s))
        self._on_end(copy, now_s)
        self._go_on(worker, op, now_s)
        if op is Op.SWAP_OUT:
            self._go_on(worker, Op.SWAP_IN, now_s)
