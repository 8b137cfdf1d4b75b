"""Algorithm 1 of vPipe (TPDS'21, section 4.2): every stage measures itself, the last one decides for all.

Measurements are sent with activations, so the last stage has everyone's; its decisions return with gradients. So no
stage waits because of them, and when the unit whose backward carried a decision ends at the first stage, all stages
know it. New cuts apply from a minibatch that no stage has reached.

A stage also reports its peak memory: bytes of live tensors, or the allocator's on a GPU of its own.

Differs: reports travel with every `EVERY`-th unit, not with each; and after a move, decisions wait for measurements of
units that ran under the new cuts alone.
"""

from collections.abc import Callable, Sequence

import torch

from pipebench.engine.protocols import Transport
from pipebench.engine.setup import Setup
from pipebench.extensions.moves.balancing import Known, RepartitionController, StageReport
from pipebench.extensions.moves.repartition_plan import Repartition
from pipebench.model.allocator import Allocator
from pipebench.schedule.instructions import Instruction
from pipebench.schedule.modes import MEMORY_POLICIES
from pipebench.schedule.operations import Op
from pipebench.simulate.timeline import CONTROL

EVERY = 4  # units
_UNITS_REMEMBERED = 64  # more than units in flight with a decision

Decide = Callable[[int, Sequence[StageReport]], Repartition | None]


class StageMonitor:
    """Measures one stage.

    For the last stage, `decide` makes a decision from a minibatch and all reports; None for the others. `on_move` is
    called once with every decision, as soon as it arrives. The allocator's peak counts if no other stage shares the
    device.
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
        self._num_stages, self._allocator, self._peak_bytes = setup.pipeline.num_stages, allocator, 0
        self._minibatch, self._device = setup.pipeline.minibatch, setup.device
        self._decide, self._on_move = decide, on_move
        self._moves = 0
        self._since = 0  # the first minibatch that counts
        self._seconds = {Op.FORWARD: 0.0, Op.BACKWARD: 0.0}
        self._units = dict.fromkeys(self._seconds, 0)
        self._reports: dict[int, StageReport] = {}
        self._heard: dict[int, Repartition | None] = {}  # decisions by unit, to be sent on

    def begin(self) -> None:
        """Start a segment of training, in which minibatches are numbered from 0."""
        self._since = 0
        self._heard.clear()

    def note(self, instruction: Instruction, seconds: float) -> None:
        """Record an instruction's time."""
        op = instruction.op
        if op in self._seconds and self._minibatch(instruction.number)[0] >= self._since:
            self._seconds[op] += seconds
            self._units[op] += 1
            if op is Op.BACKWARD and self._units[op] == 1 and self._allocator is not None:
                self._allocator.forget()

    def hold(self, held_bytes: int) -> None:
        """Record the stage's memory, from its first counted backward on, when earlier activations are gone."""
        if self._units[Op.BACKWARD] > 0:
            self._peak_bytes = max(self._peak_bytes, held_bytes)

    def sent(self, it: Instruction, transport: Transport) -> None:
        """Send reports after a unit's activation, or the decision after its gradient."""
        if not _is_reported(it.number):
            return
        if it.op is Op.SEND_ACTIVATION:
            words = torch.tensor(self.reports, dtype=torch.float64, device=self._device)
        else:
            decided = self.decision(it.number)
            words = torch.tensor(_words_of(decided), device=self._device)
        transport.send(CONTROL, it.number, it.stage, it.peer, {0: words})

    def received(self, it: Instruction, transport: Transport) -> None:
        """Receive reports after a unit's activation, or the decision after its gradient."""
        if not _is_reported(it.number):
            return
        words = transport.receive(CONTROL, it.number, it.peer, it.stage)[0].tolist()
        if it.op is Op.RECEIVE_ACTIVATION:
            self.take(words)
        else:
            self.hear(it.number, _move_of(words, self._num_stages))

    @property
    def reports(self) -> list[StageReport]:
        """The known reports, of this stage and those before it."""
        units = self._units
        forward_s, backward_s = (self._seconds[op] / max(1, units[op]) for op in (Op.FORWARD, Op.BACKWARD))
        held_bytes = self._peak_bytes if self._allocator is None else self._allocator.peak_bytes
        peak_bytes = held_bytes if units[Op.BACKWARD] else 0
        own = StageReport(self.stage, self._moves, units[Op.BACKWARD], forward_s, backward_s, peak_bytes)
        return [*self._reports.values(), own]

    def take(self, reports: Sequence[Sequence[float]]) -> None:
        """Store the reports of an earlier stage."""
        for stage, moves, units, *measured in reports:
            self._reports[int(stage)] = StageReport(int(stage), int(moves), int(units), *measured)

    def decision(self, unit: int) -> Repartition | None:
        """Return the decision to send with a unit's gradients: this stage's own, or the one received with that unit."""
        if self._decide is not None and unit not in self._heard:
            minibatch = self._minibatch(unit)[0]
            self.hear(unit, self._decide(minibatch, self.reports) if minibatch >= self._since else None)
        return self._heard.get(unit)

    def hear(self, unit: int, move: Repartition | None) -> None:
        """Process a decision received with a unit's gradients, from one stage or several."""
        if move is not None and self._heard.get(unit) is None:
            self._moves += 1
            self._since = move.at
            self._seconds, self._units = dict.fromkeys(self._seconds, 0.0), dict.fromkeys(self._units, 0)
            self._peak_bytes = 0
            self._on_move(move)
        self._heard[unit] = move or self._heard.get(unit)
        while len(self._heard) > _UNITS_REMEMBERED:
            del self._heard[next(iter(self._heard))]


def _words_of(move: Repartition | None) -> list[int]:
    """Return a decision as numbers, for sending."""
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


def _is_reported(unit: int) -> bool:
    """Return whether reports and decisions travel with a unit."""
    return unit % EVERY == EVERY - 1


def monitors(
    setup: Setup, on_move: Callable[[Repartition], None], allocator: Allocator | None = None, known: Known | None = None
) -> list[StageMonitor]:
    """Return a monitor for every stage of a straight pipeline.

    `known` is for the `RepartitionController`; the others are for `StageMonitor`, `allocator` only if stages don't
    share a device.
    """
    last = setup.pipeline.num_stages - 1
    deciding = {last: RepartitionController(setup, known).decide}
    return [StageMonitor(setup, stage, deciding.get(stage), on_move, allocator) for stage in range(last + 1)]
