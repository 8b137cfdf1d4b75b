"""Algorithm 1 of vPipe (TPDS'21, section 4.2): every stage measures itself, the last one plans, all hear of the plan.

What a stage takes goes along with its activations, so that the last stage knows what all take; what it decides goes
back along with gradients. So nobody waits for anybody because of it, and when the unit whose backward carried a
decision has ended at the first stage, all stages know it. New cuts hold from a minibatch on that no stage has come to.

A stage reports what it holds, too: the most bytes of live tensors, or on a GPU of its own those of the allocator.

Differs: reports travel with every `EVERY`-th unit, not with each; and stages are measured anew after a move, by units
that ran under the new cuts alone, before anything else is decided.
"""

from collections.abc import Callable, Sequence

import torch

from pipebench.engine.balancing import Known, RepartitionController, StageReport
from pipebench.engine.protocols import Transport
from pipebench.engine.setup import Setup
from pipebench.schedule.instructions import Instruction
from pipebench.schedule.modes import MEMORY_POLICIES
from pipebench.schedule.moves import Repartition
from pipebench.schedule.operations import Op
from pipebench.simulate.timeline import CONTROL

EVERY = 4  # units
_UNITS_KEPT = 64  # with which decisions may travel at once; a pipeline has fewer in flight

Decide = Callable[[int, Sequence[StageReport]], Repartition | None]


class AllocatorPeak:
    """The most bytes that torch's allocator has given out of a GPU since it was told to forget what was before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def forget(self) -> None:
        """Count from what is given out now."""
        torch.cuda.reset_peak_memory_stats(self._device)

    @property
    def num_bytes(self) -> int:
        """The most bytes since."""
        return torch.cuda.max_memory_allocated(self._device)


class StageMonitor:
    """One stage's part.

    Args:
        setup: what runs.
        stage: the stage.
        decide: of the last stage, what makes a decision of a minibatch and everybody's reports; None of the others.
        on_move: takes every decision, once, as soon as this stage hears of it.
        allocator: the peak of a device that is this stage's alone; None where there is none.
    """

    def __init__(
        self,
        setup: Setup,
        stage: int,
        decide: Decide | None,
        on_move: Callable[[Repartition], None],
        allocator: AllocatorPeak | None = None,
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
        self._heard: dict[int, Repartition | None] = {}  # with a unit's gradients, until they are sent on

    def begin(self) -> None:
        """Start a segment of training: minibatches are numbered anew."""
        self._since = 0
        self._heard.clear()

    def note(self, instruction: Instruction, seconds: float) -> None:
        """Take note of a pass, or of whatever else this stage did."""
        op = instruction.op
        if op in self._seconds and self._minibatch(instruction.number)[0] >= self._since:
            self._seconds[op] += seconds
            self._units[op] += 1
            if op is Op.BACKWARD and self._units[op] == 1 and self._allocator is not None:
                self._allocator.forget()

    def hold(self, held_bytes: int) -> None:
        """Take note of what this stage holds: from its first backward on that counts, what was before has gone."""
        if self._units[Op.BACKWARD] > 0:
            self._peak_bytes = max(self._peak_bytes, held_bytes)

    def sent(self, it: Instruction, transport: Transport) -> None:
        """Send after a unit's activation what is known here, and after its gradient what is decided."""
        if not _is_reported(it.number):
            return
        if it.op is Op.SEND_ACTIVATION:
            words = torch.tensor(self.reports, dtype=torch.float64, device=self._device)
        else:
            decided = self.decision(it.number)
            words = torch.tensor(_words_of(decided), device=self._device)
        transport.send(CONTROL, it.number, it.stage, it.peer, {0: words})

    def received(self, it: Instruction, transport: Transport) -> None:
        """Receive what was sent after a unit's activation or gradient."""
        if not _is_reported(it.number):
            return
        words = transport.receive(CONTROL, it.number, it.peer, it.stage)[0].tolist()
        if it.op is Op.RECEIVE_ACTIVATION:
            self.take(words)
        else:
            self.hear(it.number, _move_of(words, self._num_stages))

    @property
    def reports(self) -> list[StageReport]:
        """What is known here of this stage and of those before it."""
        units = self._units
        forward_s, backward_s = (self._seconds[op] / max(1, units[op]) for op in (Op.FORWARD, Op.BACKWARD))
        held_bytes = self._peak_bytes if self._allocator is None else self._allocator.num_bytes
        peak_bytes = held_bytes if units[Op.BACKWARD] else 0
        own = StageReport(self.stage, self._moves, units[Op.BACKWARD], forward_s, backward_s, peak_bytes)
        return [*self._reports.values(), own]

    def take(self, reports: Sequence[Sequence[float]]) -> None:
        """Take what a stage before knows."""
        for stage, moves, units, *measured in reports:
            self._reports[int(stage)] = StageReport(int(stage), int(moves), int(units), *measured)

    def decision(self, unit: int) -> Repartition | None:
        """Return what travels back with a unit's gradients: what this stage decides, or has heard with that unit."""
        if self._decide is not None and unit not in self._heard:
            minibatch = self._minibatch(unit)[0]
            self.hear(unit, self._decide(minibatch, self.reports) if minibatch >= self._since else None)
        return self._heard.get(unit)

    def hear(self, unit: int, move: Repartition | None) -> None:
        """Take a decision that has come with a unit's gradients, from one stage or several."""
        if move is not None and self._heard.get(unit) is None:
            self._moves += 1
            self._since = move.at
            self._seconds, self._units = dict.fromkeys(self._seconds, 0.0), dict.fromkeys(self._units, 0)
            self._peak_bytes = 0
            self._on_move(move)
        self._heard[unit] = move or self._heard.get(unit)
        while len(self._heard) > _UNITS_KEPT:
            del self._heard[next(iter(self._heard))]


def _words_of(move: Repartition | None) -> list[int]:
    """Return a decision as numbers, which travel."""
    if move is None:
        return [0]
    return [move.at, *move.starts, *(MEMORY_POLICIES.index(policy) for policy in move.memory or ())]


def _move_of(words: Sequence[int], num_stages: int) -> Repartition | None:
    """Return what `_words_of` was called on."""
    at, *rest = words
    if at == 0:
        return None
    starts, policies = tuple(rest[: num_stages - 1]), rest[num_stages - 1 :]
    return Repartition(at, starts, tuple(MEMORY_POLICIES[policy] for policy in policies) or None)


def _is_reported(unit: int) -> bool:
    """Return whether reports and decisions travel with a unit."""
    return unit % EVERY == EVERY - 1


def monitors(
    setup: Setup,
    on_move: Callable[[Repartition], None],
    allocator: AllocatorPeak | None = None,
    known: Known | None = None,
) -> list[StageMonitor]:
    """Return a monitor for every stage of a straight pipeline.

    Args:
        setup: what runs.
        on_move: see `StageMonitor`.
        allocator: likewise, where stages don't share a device.
        known: see `RepartitionController`.
    """
    last = setup.pipeline.num_stages - 1
    deciding = {last: RepartitionController(setup, known).decide}
    return [StageMonitor(setup, stage, deciding.get(stage), on_move, allocator) for stage in range(last + 1)]
