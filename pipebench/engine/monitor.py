"""Algorithm 1 of vPipe (TPDS'21, section 4.2): every stage measures itself, the last one plans, all hear of the plan.

What a stage takes goes along with its activations, so that the last stage knows what all take; what it decides goes
back along with gradients. So nobody waits for anybody because of it, and when the unit whose backward carried a
decision has ended at the first stage, all stages know it. New cuts hold from a minibatch on that no stage has come to.

Differs: reports travel with every `EVERY`-th unit, not with each; and stages are measured anew after a move, by units
that ran under the new cuts alone, before anything else is decided.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from pipebench.engine.protocols import Transport
from pipebench.engine.setup import Setup
from pipebench.errors import PlanError
from pipebench.model.plan import recut
from pipebench.planner.rebalancing import better_cuts, fits_within, one_step
from pipebench.planner.states import prefixes
from pipebench.schedule.instructions import Instruction, Op
from pipebench.schedule.moves import Move
from pipebench.simulate.timeline import CONTROL

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
    """

    stage: int
    moves: int
    units: int
    forward_s: float
    backward_s: float


class Monitor:
    """One stage's part.

    Args:
        setup: what runs.
        stage: the stage.
        decide: of the last stage, what makes a decision of a minibatch and everybody's reports; None of the others.
        on_move: takes every decision, once, as soon as this stage hears of it.
    """

    def __init__(self, setup: Setup, stage: int, decide: Decide | None, on_move: Callable[[Move], None]) -> None:
        self.stage = stage
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

    def sent(self, it: Instruction, transport: Transport) -> None:
        """Send after a unit's activation what is known here, and after its gradient what is decided."""
        if not _is_reported(it.number):
            return
        if it.op is Op.SEND_ACTIVATION:
            words = torch.tensor(self.reports, dtype=torch.float64, device=self._device)
        else:
            decided = self.decision(it.number)
            words = torch.tensor([0] if decided is None else [decided.at, *decided.starts], device=self._device)
        transport.send(CONTROL, it.number, it.stage, it.peer, {0: words})

    def received(self, it: Instruction, transport: Transport) -> None:
        """Receive what was sent after a unit's activation or gradient."""
        if not _is_reported(it.number):
            return
        words = transport.receive(CONTROL, it.number, it.peer, it.stage)[0].tolist()
        if it.op is Op.RECEIVE_ACTIVATION:
            self.take(words)
        else:
            self.hear(it.number, Move(words[0], tuple(words[1:])) if words[0] else None)

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
            self._on_move(move)
        self._heard[unit] = move or self._heard.get(unit)
        while len(self._heard) > _UNITS_KEPT:
            del self._heard[next(iter(self._heard))]


def _is_reported(unit: int) -> bool:
    """Return whether reports and decisions travel with a unit."""
    return unit % EVERY == EVERY - 1


class Balancing:
    """The last stage's planner.

    Args:
        setup: what runs, with the cuts at the drain before.
    """

    def __init__(self, setup: Setup) -> None:
        pipeline = setup.pipeline
        self._setup = setup
        self._rows = setup.profile.by_size[setup.costs.most_samples]
        self._may_start = {members.bit_count() for members in prefixes(self._rows).members[1:-1]}
        self._num_stages, self._num_layers = pipeline.num_stages, len(setup.graph.layers)
        self._starts = tuple(stage.start for stage in setup.plan.stages[1:])
        size = setup.costs.most_samples
        self._fits = fits_within(setup.cluster.memory_bytes, setup.profile, setup.plan, pipeline, size)
        self._ahead = 3 * pipeline.depth + 1  # of the last stage's backward; the first stage is a depth further
        self._multiple = math.lcm(pipeline.period, setup.sampler.streams or 1)

    def decide(self, minibatch: int, reports: Sequence[Report]) -> Move | None:
        """Return the cuts to go to next, and from which minibatch on; None: all is well, or not known yet."""
        if len(reports) < self._num_stages or min(report.units for report in reports) < ENOUGH:
            return None
        if len({report.moves for report in reports}) > 1 or not self._all_hear(self._starts):
            return None
        stage_s = [report.forward_s + report.backward_s for report in sorted(reports)]
        wanted = better_cuts(self._rows, self._starts, stage_s, self._may_start, self._fits)
        if wanted is None:
            return None
        at = math.ceil((minibatch + self._ahead) / self._multiple) * self._multiple
        starts = one_step(self._starts, wanted, self._num_layers)
        if not self._all_hear(starts) or self._num_unfit(starts) > self._num_unfit(self._starts):
            return None
        self._starts = starts
        return Move(at, starts)

    def _num_unfit(self, starts: Sequence[int]) -> int:
        """Return how many stages don't fit in memory: on the way to cuts where all do, no more than now."""
        ends = [0, *starts, self._num_layers]
        return sum(not self._fits(stage, *layers) for stage, layers in enumerate(itertools.pairwise(ends)))

    def _all_hear(self, starts: Sequence[int]) -> bool:
        """Return whether all stages wait for gradients under cuts: who gets none hears of nothing, and runs ahead."""
        try:
            edges = self._setup.under(recut(self._setup.graph, self._setup.plan, starts)).pipeline.edges
        except PlanError:  # layers that share something would be torn apart
            return False
        return {edge.source for edge in edges if edge.has_gradient} == {*range(self._num_stages - 1)}


def monitors(setup: Setup, on_move: Callable[[Move], None]) -> list[Monitor]:
    """Return a monitor for every stage of a straight pipeline."""
    last = setup.pipeline.num_stages - 1
    balancing = Balancing(setup)
    return [Monitor(setup, stage, balancing.decide if stage == last else None, on_move) for stage in range(last + 1)]
