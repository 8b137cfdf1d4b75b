"""Algorithm 1 of vPipe (TPDS'21, section 4.2): every stage measures itself, the last one plans, all hear of the plan.

What a stage takes goes along with its activations, so that the last stage knows what all take; what it decides goes
back along with gradients. So nobody waits for anybody because of it, and when the unit whose backward carried a
decision has ended at the first stage, all stages know it. New cuts hold from a minibatch on that no stage has come to.

A stage reports what it holds, too: the most bytes of live tensors, or on a GPU of its own those of the allocator.

Differs: reports travel with every `EVERY`-th unit, not with each; and stages are measured anew after a move, by units
that ran under the new cuts alone, before anything else is decided.
"""

import logging
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from pipebench.engine.protocols import Transport
from pipebench.engine.setup import Setup
from pipebench.errors import PlanError
from pipebench.formats import num_bytes, seconds
from pipebench.model.plan import layout_of, recut
from pipebench.planner.rebalancing import Measured, Rebalancing, problems_of
from pipebench.planner.states import prefixes
from pipebench.schedule.instructions import Instruction, Op
from pipebench.schedule.modes import MEMORY_POLICIES
from pipebench.schedule.moves import Layout, Move
from pipebench.simulate.timeline import CONTROL

_LOG = logging.getLogger("pipebench.engine.monitor")

EVERY = 4  # units
ENOUGH = 4  # backwards of a stage that its mean is of, at least
_UNITS_KEPT = 64  # with which decisions may travel at once; a pipeline has fewer in flight

Decide = Callable[[int, Sequence["Report"]], Move | None]


class Report(NamedTuple):
    """What a stage takes.

    Attributes:
        stage: which one.
        moves: how many moves it has heard of.
        units: that it has measured since the last of them.
        forward_s: mean seconds of a unit's forward.
        backward_s: likewise, backward.
        peak_bytes: the most that it has held meanwhile; 0: not known.
    """

    stage: int
    moves: int
    units: int
    forward_s: float
    backward_s: float
    peak_bytes: float = 0.0

    @property
    def measured(self) -> Measured:
        """What the planner makes of it."""
        return Measured(self.forward_s + self.backward_s, self.peak_bytes)


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


class Monitor:
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
        on_move: Callable[[Move], None],
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
        self._reports: dict[int, Report] = {}
        self._heard: dict[int, Move | None] = {}  # with a unit's gradients, until they are sent on

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
    def reports(self) -> list[Report]:
        """What is known here of this stage and of those before it."""
        units = self._units
        forward_s, backward_s = (self._seconds[op] / max(1, units[op]) for op in (Op.FORWARD, Op.BACKWARD))
        held_bytes = self._peak_bytes if self._allocator is None else self._allocator.num_bytes
        peak_bytes = held_bytes if units[Op.BACKWARD] else 0
        own = Report(self.stage, self._moves, units[Op.BACKWARD], forward_s, backward_s, peak_bytes)
        return [*self._reports.values(), own]

    def take(self, reports: Sequence[Sequence[float]]) -> None:
        """Take what a stage before knows."""
        for stage, moves, units, *measured in reports:
            self._reports[int(stage)] = Report(int(stage), int(moves), int(units), *measured)

    def decision(self, unit: int) -> Move | None:
        """Return what travels back with a unit's gradients: what this stage decides, or has heard with that unit."""
        if self._decide is not None and unit not in self._heard:
            minibatch = self._minibatch(unit)[0]
            self.hear(unit, self._decide(minibatch, self.reports) if minibatch >= self._since else None)
        return self._heard.get(unit)

    def hear(self, unit: int, move: Move | None) -> None:
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


def _words_of(move: Move | None) -> list[int]:
    """Return a decision as numbers, which travel."""
    if move is None:
        return [0]
    return [move.at, *move.starts, *(MEMORY_POLICIES.index(policy) for policy in move.memory or ())]


def _move_of(words: Sequence[int], num_stages: int) -> Move | None:
    """Return what `_words_of` was called on."""
    at, *rest = words
    if at == 0:
        return None
    starts, policies = tuple(rest[: num_stages - 1]), rest[num_stages - 1 :]
    return Move(at, starts, tuple(MEMORY_POLICIES[policy] for policy in policies) or None)


def _is_reported(unit: int) -> bool:
    """Return whether reports and decisions travel with a unit."""
    return unit % EVERY == EVERY - 1


class Balancing:
    """The last stage's planner.

    Args:
        setup: what runs, with the cuts at the drain before.
    """

    def __init__(self, setup: Setup) -> None:
        pipeline, cluster, size = setup.pipeline, setup.cluster, setup.costs.most_samples
        self._setup = setup
        self._rows = setup.profile.by_size[size]
        self._may_start = {members.bit_count() for members in prefixes(self._rows).members[1:-1]}
        self._num_stages = pipeline.num_stages
        self._layout = layout_of(setup.plan)
        limit_bytes = math.inf if cluster.memory_bytes is None else float(cluster.memory_bytes)
        self._problem_of = problems_of(
            setup.profile, pipeline, size, limit_bytes, cluster.pcie_bytes_per_s, setup.chooses
        )
        self._ahead = 3 * pipeline.depth + 1  # of the last stage's backward; the first stage is a depth further
        self._multiple = math.lcm(pipeline.period, setup.sampler.streams or 1)

    def decide(self, minibatch: int, reports: Sequence[Report]) -> Move | None:
        """Return what to go to next, and from which minibatch on; None: all is well, or not known yet."""
        if len(reports) < self._num_stages or min(report.units for report in reports) < ENOUGH:
            return None
        if len({report.moves for report in reports}) > 1 or not self._all_hear(self._layout):
            return None
        measured = [report.measured for report in sorted(reports)]
        stages = Rebalancing(self._rows, self._layout, measured, self._problem_of, self._may_start)
        layout = stages.next_step()
        if layout is None or not self._all_hear(layout):
            return None
        at = math.ceil((minibatch + self._ahead) / self._multiple) * self._multiple
        for stage, (own, predicted_bytes) in enumerate(zip(measured, stages.predicted_bytes, strict=True)):
            _LOG.info(
                "minibatch %d: stage %d takes %s and holds %s, predicted were %s",
                minibatch, stage, seconds(own.seconds), num_bytes(own.num_bytes), num_bytes(predicted_bytes),
            )  # fmt: skip
        self._layout = layout
        return Move(at, *layout)

    def _all_hear(self, layout: Layout) -> bool:
        """Return whether all stages wait for gradients under cuts: who gets none hears of nothing, and runs ahead."""
        try:
            edges = self._setup.under(recut(self._setup.graph, self._setup.plan, *layout)).pipeline.edges
        except PlanError:  # layers that share something would be torn apart
            return False
        return {edge.source for edge in edges if edge.has_gradient} == {*range(self._num_stages - 1)}


def monitors(setup: Setup, on_move: Callable[[Move], None], allocator: AllocatorPeak | None = None) -> list[Monitor]:
    """Return a monitor for every stage of a straight pipeline.

    Args:
        setup: what runs.
        on_move: see `Monitor`.
        allocator: likewise, where stages don't share a device.
    """
    last = setup.pipeline.num_stages - 1
    deciding = {last: Balancing(setup).decide}
    return [Monitor(setup, stage, deciding.get(stage), on_move, allocator) for stage in range(last + 1)]
