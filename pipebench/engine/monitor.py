"""Algorithm 1 of vPipe (TPDS'21, section 4.2): every stage measures itself, the last one plans, all hear of the plan.

What a stage takes goes along with its activations, so that the last stage knows what all take; what it decides goes
back along with gradients. So nobody waits for anybody because of it, and when the unit whose backward carried a
decision has ended at the first stage, all stages know it. New cuts hold from a minibatch on that no stage has come to.

Differs: reports travel with every `EVERY`-th unit, not with each; and stages are measured anew after a move, by units
that ran under the new cuts alone, before anything else is decided.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pipebench.engine.setup import Setup
from pipebench.planner.rebalancing import better_cuts, one_step
from pipebench.planner.states import prefixes
from pipebench.schedule.instructions import Op
from pipebench.schedule.moves import Move

EVERY = 4  # units
ENOUGH = 4  # backwards of a stage that its mean is of, at least
_FIELDS = 5

Decide = Callable[[int, Sequence["Report"]], Move | None]


class Report(NamedTuple):
    """What a stage takes.

    Attributes:
        stage: which one.
        moves: how many moves it has heard of.
        units: that it has measured since the last of them.
        forward_s: mean seconds of a unit's forward.
        backward_s: likewise, backward.
    """

    stage: int
    moves: int
    units: int
    forward_s: float
    backward_s: float


class Monitor:
    """One stage's part.

    Args:
        stage: the stage.
        decide: of the last stage, what makes a decision of a minibatch and everybody's reports; None of the others.
        on_move: takes every decision, once, as soon as this stage hears of it.
    """

    def __init__(self, stage: int, decide: Decide | None, on_move: Callable[[Move], None]) -> None:
        self.stage = stage
        self._decide, self._on_move = decide, on_move
        self._moves = 0
        self._since = 0  # the first minibatch that counts
        self._seconds = {Op.FORWARD: 0.0, Op.BACKWARD: 0.0}
        self._units = dict.fromkeys(self._seconds, 0)
        self._reports: dict[int, Report] = {}
        self._heard: dict[int, Move | None] = {}  # with a unit's gradients, until they are sent on

    def reports_with(self, unit: int) -> bool:
        """Return whether reports and decisions travel with a unit."""
        return unit % EVERY == EVERY - 1

    def begin(self) -> None:
        """Start a segment of training: minibatches are numbered anew."""
        self._since = 0
        self._heard.clear()

    def note(self, op: Op, minibatch: int, seconds: float) -> None:
        """Take note of a pass."""
        if op in self._seconds and minibatch >= self._since:
            self._seconds[op] += seconds
            self._units[op] += 1

    @property
    def reports(self) -> list[Report]:
        """What is known here of this stage and of those before it."""
        units = self._units
        means = [self._seconds[op] / max(1, units[op]) for op in (Op.FORWARD, Op.BACKWARD)]
        return [*self._reports.values(), Report(self.stage, self._moves, units[Op.BACKWARD], *means)]

    def take(self, reports: Sequence[Sequence[float]]) -> None:
        """Take what a stage before knows."""
        for stage, moves, units, *seconds in reports:
            self._reports[int(stage)] = Report(int(stage), int(moves), int(units), *seconds)

    def decision(self, unit: int, minibatch: int) -> Move | None:
        """Return what travels back with a unit's gradients: what this stage decides, or has heard with that unit."""
        if self._decide is not None and unit not in self._heard:
            self.hear(unit, self._decide(minibatch, self.reports) if minibatch >= self._since else None)
        return self._heard.get(unit)

    def hear(self, unit: int, move: Move | None) -> None:
        """Take a decision that has come with a unit's gradients, from one stage or several."""
        if move is not None and self._heard.get(unit) is None:
            self._moves += 1
            self._since = move.at
            self._seconds, self._units = dict.fromkeys(self._seconds, 0.0), dict.fromkeys(self._units, 0)
            self._on_move(move)
        self._heard[unit] = move or self._heard.get(unit)

    def done_with(self, unit: int) -> None:
        """A unit's gradients have been sent on."""
        self._heard.pop(unit, None)


class Balancing:
    """The last stage's planner.

    Args:
        setup: what runs, with the cuts at the drain before.
        starts: tells the first layers of all stages but the first after all that was decided.
    """

    def __init__(self, setup: Setup, starts: Callable[[], Sequence[int]]) -> None:
        pipeline = setup.pipeline
        self._rows = max(setup.profile.layers.items())[1]
        self._may_start = {members.bit_count() for members in prefixes(self._rows).members[1:-1]}
        self._num_stages, self._num_layers = pipeline.num_stages, len(setup.graph.layers)
        self._starts = starts
        self._ahead = 3 * pipeline.depth + 1  # of the last stage's backward; the first stage is a depth further
        self._multiple = math.lcm(pipeline.period, setup.sampler.streams or 1)

    def decide(self, minibatch: int, reports: Sequence[Report]) -> Move | None:
        """Return the cuts to go to next, and from which minibatch on; None: all is well, or not known yet."""
        if len(reports) < self._num_stages or min(report.units for report in reports) < ENOUGH:
            return None
        if len({report.moves for report in reports}) > 1:
            return None
        starts = tuple(self._starts())
        stage_s = [report.forward_s + report.backward_s for report in sorted(reports)]
        wanted = better_cuts(self._rows, starts, stage_s, self._may_start)
        if wanted is None:
            return None
        at = math.ceil((minibatch + self._ahead) / self._multiple) * self._multiple
        return Move(at, one_step(starts, wanted, self._num_layers))
