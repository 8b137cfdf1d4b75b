"""Measurements for Algorithm 1 of vPipe (TPDS'21, section 4.2): every stage measures itself, the last one decides.

Reports are sent along with activations, so the last stage gets those of all stages. Its decisions are sent back along
with gradients. No stage waits for either, and when the unit whose backward carries a decision has reached the first
stage, all stages know the decision. New cuts apply from a minibatch that no stage has reached by then.

A report also has the stage's peak memory: bytes of live tensors, or the allocator's on a GPU of its own.

Differs: reports are sent with one unit in `REPORT_INTERVAL`, not with each. After a move, decisions wait for
measurements of units that ran entirely under the new cuts.
"""

from collections.abc import Callable, Sequence
from typing import Final

import torch

from pipebench.engine.protocols import Transport
from pipebench.engine.setup import Setup
from pipebench.extensions.moves.balancing import Decisions, RepartitionController, StageReport
from pipebench.extensions.moves.repartition_plan import Repartition
from pipebench.model.allocator import Allocator
from pipebench.schedule.instructions import Instruction
from pipebench.schedule.modes import MEMORY_POLICIES
from pipebench.schedule.operations import ACTIVATION, GRADIENT, RECEIVE, SEND, Op, with_kind
from pipebench.simulate.timeline import CONTROL

REPORT_INTERVAL = 4  # units, of which one has reports and decisions sent along
_UNITS_REMEMBERED = 64  # whose decisions are stored; more than are in flight

_SENDS: Final = with_kind(SEND, ACTIVATION, GRADIENT)
REPORTING: Final = (*_SENDS, *with_kind(RECEIVE, ACTIVATION, GRADIENT))  # operations after which stages report

Decide = Callable[[int, Sequence[StageReport]], Repartition | None]


class StageMonitor:
    """Measures one stage.

    Args:
        setup: the setup.
        stage: the stage's index.
        decide: makes a decision from a minibatch and all reports; None on all stages but the last.
        on_move: called once with every decision, as soon as the stage knows it.
        allocator: the device's, whose peak is reported, if no other stage shares the device.
    """

    def __init__(
        self,
        setup: Setup,
        stage: int,
        decide: Decide | None,
        on_move: Callable[[Repartition], None],
        allocator: Allocator | None = None,
    ) -> None:
        self.stage = stage
        self._num_stages, self._device = setup.pipeline.num_stages, setup.device
        self._minibatch = setup.pipeline.minibatch
        self._allocator = allocator
        self._decide, self._on_move = decide, on_move
        self._moves = 0  # decisions so far
        # Sums since the last decision, over units of minibatch `_since` and later ones.
        self._since = 0
        self._seconds = {Op.FORWARD: 0.0, Op.BACKWARD: 0.0}
        self._units = dict.fromkeys(self._seconds, 0)
        self._peak_bytes = 0
        self._reports: dict[int, StageReport] = {}  # of earlier stages, the newest of each
        self._decisions: dict[int, Repartition | None] = {}  # by unit; sent on with the unit's gradients

    def begin(self) -> None:
        """Start a segment of training, in which minibatches are numbered from 0."""
        self._since = 0
        self._decisions.clear()

    def note(self, instruction: Instruction, seconds: float) -> None:
        """Record an instruction's duration."""
        op = instruction.op
        if op in self._seconds and self._minibatch(instruction.number)[0] >= self._since:
            self._seconds[op] += seconds
            self._units[op] += 1
            if op is Op.BACKWARD and self._units[op] == 1 and self._allocator is not None:
                self._allocator.forget()

    def note_memory(self, held_bytes: int) -> None:
        """Record the bytes that the stage holds.

        They count from the first measured backward on, when activations of older units are freed.
        """
        if self._units[Op.BACKWARD] > 0:
            self._peak_bytes = max(self._peak_bytes, held_bytes)

    def exchange(self, it: Instruction, transport: Transport) -> None:
        """Send or receive reports after a unit's activation, or a decision after its gradient.

        `it` is the instruction that has sent or received the activation or gradient, one of `REPORTING`.
        """
        if it.number % REPORT_INTERVAL == REPORT_INTERVAL - 1:
            (self._send if it.op in _SENDS else self._receive)(it, transport)

    def _send(self, it: Instruction, transport: Transport) -> None:
        if it.op is Op.SEND_ACTIVATION:
            words = torch.tensor(self.reports, dtype=torch.float64, device=self._device)
        else:
            decided = self.decision(it.number)
            words = torch.tensor(_words_of(decided), device=self._device)
        transport.send(CONTROL, it.number, it.stage, it.peer, {0: words})

    def _receive(self, it: Instruction, transport: Transport) -> None:
        words = transport.receive(CONTROL, it.number, it.peer, it.stage)[0].tolist()
        if it.op is Op.RECEIVE_ACTIVATION:
            for stage, moves, units, *measured in words:
                self._reports[int(stage)] = StageReport(int(stage), int(moves), int(units), *measured)
        else:
            self.accept(it.number, _move_of(words, self._num_stages))

    @property
    def reports(self) -> list[StageReport]:
        """The known reports, of this stage and those before it."""
        units = self._units
        forward_s, backward_s = (self._seconds[op] / max(1, units[op]) for op in (Op.FORWARD, Op.BACKWARD))
        held_bytes = self._peak_bytes if self._allocator is None else self._allocator.peak_bytes
        peak_bytes = held_bytes if units[Op.BACKWARD] else 0
        own = StageReport(self.stage, self._moves, units[Op.BACKWARD], forward_s, backward_s, peak_bytes)
        return [*self._reports.values(), own]

    def decision(self, unit: int) -> Repartition | None:
        """Return the decision to send with a unit's gradients: made here, or received with the same unit."""
        if self._decide is not None and unit not in self._decisions:
            minibatch = self._minibatch(unit)[0]
            self.accept(unit, self._decide(minibatch, self.reports) if minibatch >= self._since else None)
        return self._decisions.get(unit)

    def accept(self, unit: int, move: Repartition | None) -> None:
        """Handle the decision that came with a unit's gradients; several stages may send the same one."""
        if move is not None and self._decisions.get(unit) is None:
            self._moves += 1
            self._since = move.at
            self._seconds, self._units = dict.fromkeys(self._seconds, 0.0), dict.fromkeys(self._units, 0)
            self._peak_bytes = 0
            self._on_move(move)
        self._decisions[unit] = move or self._decisions.get(unit)
        while len(self._decisions) > _UNITS_REMEMBERED:
            del self._decisions[next(iter(self._decisions))]


def _words_of(move: Repartition | None) -> list[int]:
    """Return a decision as numbers, for sending: K, cuts, and an index per policy; [0] for None."""
    if move is None:
        return [0]
    return [move.at, *move.starts, *(MEMORY_POLICIES.index(policy) for policy in move.memory or ())]


def _move_of(words: Sequence[int], num_stages: int) -> Repartition | None:
    """Inverse of `_words_of`."""
    at, *rest = words
    if at == 0:
        return None
    starts, policies = tuple(rest[: num_stages - 1]), rest[num_stages - 1 :]
    return Repartition(at, starts, tuple(MEMORY_POLICIES[policy] for policy in policies) or None)


def monitors(
    setup: Setup,
    on_move: Callable[[Repartition], None],
    allocator: Allocator | None = None,
    known: Decisions | None = None,
) -> list[StageMonitor]:
    """Return a monitor for every stage of a straight pipeline.

    Args:
        setup: the setup.
        on_move: see `StageMonitor`.
        allocator: see `StageMonitor`; only if stages don't share a device.
        known: see `RepartitionController`.
    """
    last = setup.pipeline.num_stages - 1
    deciding = {last: RepartitionController(setup, known).decide}
    return [StageMonitor(setup, stage, deciding.get(stage), on_move, allocator) for stage in range(last + 1)]
