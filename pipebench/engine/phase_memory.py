"""What workers hold while layers move, foretold: the bytes of `migration`, from the profile and the events alone.

Every replica that a stage consists of meanwhile (its parts, those that have retired and serve their units in flight,
and the guest that computes given units again) is a `Holding` of its layers. What is on its way isn't counted.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pipebench.engine.phase_costs import PhaseCosts
from pipebench.engine.phases import Phases
from pipebench.model.plan import StagePlan
from pipebench.model.sampling import Size
from pipebench.schedule.instructions import COPIES, Instruction, Op
from pipebench.schedule.moves import HandOver
from pipebench.simulate.holding import Holding
from pipebench.simulate.memory import AGAIN, ON_HOST, StageMemory, layers_memory
from pipebench.simulate.simulation import Event

Inputs = Mapping[Size, Mapping[str, int]]  # by size of the unit, bytes of every model input


@dataclass
class _Part:
    """Layers that run as one.

    Attributes:
        holding: what they hold.
        start: the first of them.
        stop: the layer after the last.
        leaves_to: the stage that takes them, where they are about to leave.
    """

    holding: Holding
    start: int
    stop: int
    leaves_to: int | None = None


class PhaseMemory:
    """Follows what every worker of a segment holds.

    Args:
        phases: the cuts.
        costs: what is given away, in bytes.
        size_of: the size of a unit.
        inputs: of the model.
        trained: whether there has been an update before.

    Attributes:
        peaks: the most bytes that every worker has held at any moment.
        held: likewise, between two instructions, which is when engines count.
    """

    def __init__(
        self, phases: Phases, costs: PhaseCosts, size_of: Callable[[int], Size], inputs: Inputs, *, trained: bool
    ) -> None:
        self._stages = [
            _StageMemory(phases, costs, size_of, inputs, index, trained=trained)
            for index in range(phases.setup.pipeline.num_stages)
        ]
        self.held = [stage.num_bytes for stage in self._stages]
        self.peaks = [*self.held]

    def event(self, event: Event) -> None:
        """Take note of one event."""
        index, stage = event.instruction.stage, self._stages[event.instruction.stage]
        most = stage.execute(event.instruction)
        self.held[index] = max(self.held[index], stage.num_bytes)
        self.peaks[index] = max(self.peaks[index], most, stage.num_bytes)
        stage.gather()


class _StageMemory:
    """What one stage holds, as `Migrating` does."""

    def __init__(
        self,
        phases: Phases,
        costs: PhaseCosts,
        size_of: Callable[[int], Size],
        inputs: Inputs,
        index: int,
        *,
        trained: bool,
    ) -> None:
        self._phases, self._costs, self._size_of, self._inputs = phases, costs, size_of, inputs
        self._index = index
        stage = phases.setup.plan.stages[index]
        holding = Holding(self._memory(stage.start, stage.stop, 0))
        self._parts = [_Part(holding.trained() if trained else holding, stage.start, stage.stop)]
        self._units: dict[int, list[Holding]] = {}  # who runs them backward
        self._guests: dict[int, _Part] = {}  # by the stage that their layers come from
        self._set_aside: dict[tuple[int, int], int] = {}  # bytes, by unit that is to be given, and to whom
        self._gradients = 0  # of layers whose replica makes no update
        self._on_host = 0

    @property
    def num_bytes(self) -> int:
        """What it holds between two instructions."""
        ran = (holding for holdings in self._units.values() for holding in holdings)
        everybody = dict.fromkeys(
            [*(part.holding for part in self._parts), *ran, *(guest.holding for guest in self._guests.values())]
        )
        held = sum(holding.num_bytes for holding in everybody)
        return held + sum(self._set_aside.values()) + self._gradients - self._on_host

    def execute(self, it: Instruction) -> int:
        """Execute an instruction; return the most bytes that are held meanwhile."""
        op, most = it.op, 0
        if op is Op.FORWARD:
            self._forward(it)
        elif op is Op.BACKWARD:
            for holding in reversed(self._units.get(it.number, [])):
                most = max(most, self._backward(holding, it))
            self._units.pop(it.number, None)
        elif op is Op.UPDATE:
            most = max(self._change(part.holding, it) for part in self._parts)
            self._gradients = 0
        elif op in COPIES:
            for holding in self._units.get(it.number, []):
                self._copy(holding, it)
        elif op is Op.RECUT:
            if it.peer < 0:
                self._renew(it.number)
            else:
                self._part(self._phases.handed(it.stage, it.peer, it.number))
        elif op is Op.GIVE:
            self._parts = [part for part in self._parts if part.leaves_to != it.peer]
        elif op is Op.GIVE_UNIT:
            self._set_aside.pop((it.number, it.peer), None)
        elif op is Op.FORWARD_AGAIN:
            self._forward_again(it)
        elif op is Op.TAKE:
            self._take(self._phases.handed(it.peer, it.stage, it.number))
        return most

    def gather(self) -> None:
        """Forget those who aren't needed any more, if one replica runs the stage again."""
        (*others, last) = self._parts
        if others or last.leaves_to is not None:
            return
        runs = (holding is last.holding for holdings in self._units.values() for holding in holdings)
        # Gradients may be of layers that are still to come.
        come = (last.start <= guest.start and guest.stop <= last.stop for guest in self._guests.values())
        if all(runs) and all(come):
            self._guests.clear()

    def _forward(self, it: Instruction) -> None:
        size = self._size_of(it.number)
        if not size:
            return
        self._units[it.number] = []
        for part in self._parts:
            self._change(part.holding, it)
            if part.leaves_to is None:
                self._units[it.number].append(part.holding)
            else:
                part.holding.let_go(it.number)
                given = Instruction(Op.GIVE_UNIT, self._index, it.number, part.leaves_to)
                self._set_aside[it.number, part.leaves_to] = self._costs.num_bytes(given)

    def _backward(self, holding: Holding, it: Instruction) -> int:
        most = self._change(holding, it)
        if all(holding is not part.holding for part in self._parts):
            self._gradients += holding.give_gradients()
        return most

    def _copy(self, holding: Holding, it: Instruction) -> None:
        for change in holding.changes(it, self._size_of(it.number)):
            self._on_host += change.num_bytes if change.kind == ON_HOST else 0

    def _change(self, holding: Holding, it: Instruction) -> int:
        """Let a replica do what it is told; return the most bytes that are held meanwhile."""
        again = most = 0
        for change in holding.changes(it, self._size_of(it.number) if it.op is not Op.UPDATE else 0):
            again += change.num_bytes if change.kind == AGAIN else 0
            most = max(most, self.num_bytes + again)
        return most

    def _part(self, block: HandOver) -> None:
        """Cut a block apart that is about to leave."""
        (index,) = (i for i, p in enumerate(self._parts) if p.start <= block.start and block.stop <= p.stop)
        old = self._parts[index]
        made = []
        for start, stop in itertools.pairwise(sorted({old.start, block.start, block.stop, old.stop})):
            leaves_to = block.target if start == block.start else old.leaves_to
            made.append(_Part(old.holding.copied(self._memory(start, stop, block.at - 1)), start, stop, leaves_to))
        self._parts[index : index + 1] = made
        self._retire(old.holding)

    def _renew(self, at: int) -> None:
        """Cut what there is anew, for layers that do something else with the activations of forwards from `at` on."""
        (old,) = self._parts
        made = old.holding.copied(self._memory(old.start, old.stop, at))
        self._parts = [_Part(made, old.start, old.stop)]
        self._retire(old.holding)

    def _retire(self, holding: Holding) -> None:
        """Let a replica make no more updates."""
        self._gradients += holding.give_gradients()
        holding.retire()

    def _forward_again(self, it: Instruction) -> None:
        block = self._phases.handed(it.peer, it.stage, it.number)
        if not self._size_of(it.number):
            return
        if block.source not in self._guests:
            made = Holding(self._memory(block.start, block.stop, block.at - 1))
            self._guests[block.source] = _Part(made, block.start, block.stop)
        guest, ran = self._guests[block.source].holding, self._units[it.number]
        self._change(guest, Instruction(Op.FORWARD, it.stage, it.number))
        ran.insert(len(ran) if block.goes_left else 0, guest)

    def _take(self, block: HandOver) -> None:
        """Let a block that has come run with the layers beside it as one."""
        beside = [part for part in self._parts if part.leaves_to is None]
        (old,) = (part for part in beside if block.start == part.stop or block.stop == part.start)
        start, stop = min(block.start, old.start), max(block.stop, old.stop)
        joint = old.holding.copied(self._memory(start, stop, block.at))
        self._parts[self._parts.index(old)] = _Part(joint, start, stop)
        self._retire(old.holding)

    def _memory(self, start: int, stop: int, minibatch: int) -> StageMemory:
        """Return what consecutive layers keep, with the policies of a minibatch's forward."""
        setup = self._phases.setup
        cut = StagePlan(start, stop, 1, (0,), self._phases.policies(minibatch)[start:stop])
        return layers_memory(setup.profile, cut, setup.pipeline, self._index, self._inputs)
