"""The last stage's part of Algorithm 1 (vPipe, TPDS'21, section 4.2): from all stages' reports to a decision.

What it decides fits in the devices' memory: by the closed form of equation 1 first, then in the simulator, which sees
what messages keep while they wait, too. A stage that has more there is planned again with so much less memory, as plans
are before a run (`planner/virtualised.py`).
"""

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from pipebench.engine.setup import Setup
from pipebench.errors import PlanError
from pipebench.formats import num_bytes, seconds
from pipebench.model.plan import layout_of, recut
from pipebench.planner.rebalancing import WORTHWHILE, Measured, Rebalancing, problems_of
from pipebench.planner.stage_problem import Outcome, StageProblem, input_bytes_of
from pipebench.planner.states import prefixes
from pipebench.schedule.moves import Layout, Move
from pipebench.simulate.memory import stage_memories
from pipebench.simulate.memory_meter import MemoryMeter
from pipebench.simulate.meter import Meter
from pipebench.simulate.steady import simulate_segment

_LOG = logging.getLogger("pipebench.engine.balancing")

ENOUGH = 4  # backwards of a stage that its mean is of, at least
_MOST_TRIALS = 8  # of what doesn't fit in the simulator; one or two are enough where any are


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


class Balancing:
    """Decides what to go to next.

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
        self._before: Sequence[Measured] | None = None  # what was measured when nothing better was found
        self._limit_bytes = math.inf if cluster.memory_bytes is None else float(cluster.memory_bytes)
        self._problem_of = problems_of(
            setup.profile, pipeline, size, self._limit_bytes, cluster.pcie_bytes_per_s, setup.chooses
        )
        self._ahead = 3 * pipeline.depth + 1  # of the last stage's backward; the first stage is a depth further
        self._multiple = math.lcm(pipeline.period, setup.sampler.streams or 1)

    def decide(self, minibatch: int, reports: Sequence[Report]) -> Move | None:
        """Return what to go to next, and from which minibatch on; None: all is well, or not known yet."""
        if len(reports) < self._num_stages or min(report.units for report in reports) < ENOUGH:
            return None
        if len({report.moves for report in reports}) > 1 or self._after(self._layout) is None:
            return None
        measured = [report.measured for report in sorted(reports)]
        if self._is_as_before(measured):
            return None
        layout = self._next_layout(measured)
        if layout is None:
            self._before = measured
            return None
        at = math.ceil((minibatch + self._ahead) / self._multiple) * self._multiple
        predicted = Rebalancing(self._rows, self._layout, measured, self._problem_of).predicted_bytes
        for stage, (own, predicted_bytes) in enumerate(zip(measured, predicted, strict=True)):
            _LOG.info(
                "minibatch %d: stage %d takes %s and holds %s, predicted were %s",
                minibatch, stage, seconds(own.seconds), num_bytes(own.num_bytes), num_bytes(predicted_bytes),
            )  # fmt: skip
        self._layout, self._before = layout, None
        return Move(at, *layout)

    def _is_as_before(self, measured: Sequence[Measured]) -> bool:
        """Return whether stages take and hold what they did when nothing better was found: to look again takes long."""
        return self._before is not None and all(
            abs(now.seconds - before.seconds) <= WORTHWHILE * before.seconds and now.num_bytes <= before.num_bytes
            for now, before in zip(measured, self._before, strict=True)
        )

    def _next_layout(self, measured: Sequence[Measured]) -> Layout | None:
        """Return what to go to next; None: nothing, or nothing that fits as well as what there is.

        A stage that has more in the simulator than fits chooses again with so much less memory, under the same cuts:
        under others it is other stages' turn to have too much. Only if that makes stages slow are cuts sought again.
        """
        less_bytes, excess, found, late = [0.0] * self._num_stages, [0.0], None, Counter[int]()
        known: dict[tuple[int, int, int, float], Outcome] = {}

        def problem_of(stage: int, start: int, stop: int) -> StageProblem:
            problem = self._problem_of(stage, start, stop)
            less = less_bytes[stage]
            return replace(problem, limit_bytes=problem.limit_bytes - less) if less else problem

        for _ in range(_MOST_TRIALS):
            stages = Rebalancing(self._rows, self._layout, measured, problem_of, self._may_start, known)
            found = (None if found is None else stages.chosen_again(found.starts)) or stages.next_step()
            setup = None if found is None else self._after(found)
            if found is None or setup is None:
                return None
            excess = self._excess_bytes(setup)
            if not any(excess):
                return found
            late.update(stage for stage, more in enumerate(excess) if more)
            less_bytes = [
                less + late[stage] * more for stage, (less, more) in enumerate(zip(less_bytes, excess, strict=True))
            ]
        now = self._after(self._layout)
        unfit = sum(each > 0 for each in excess)
        return found if now is not None and unfit <= sum(each > 0 for each in self._excess_bytes(now)) else None

    def _excess_bytes(self, setup: Setup) -> list[float]:
        """Return by how much every stage has more than fits, in the simulator."""
        if math.isinf(self._limit_bytes):
            return [0.0] * self._num_stages
        inputs = {size: input_bytes_of(rows) for size, rows in setup.profile.by_size.items()}
        memories = stage_memories(setup.profile, setup.plan, setup.pipeline, inputs)
        meter = MemoryMeter(setup.pipeline, memories, setup.costs)
        simulate_segment(setup, setup.sampler.minibatches_per_epoch, Meter(setup.pipeline, meter))
        peaks = meter.timeline().peaks
        held = [
            max(peaks[worker].num_bytes for worker in setup.pipeline.workers_of(k)) for k in range(self._num_stages)
        ]
        return [max(0.0, most - self._limit_bytes) for most in held]

    def _after(self, layout: Layout) -> Setup | None:
        """Return what runs under other cuts; None: some stage would hear of nothing.

        All stages have to wait for gradients: who gets none runs ahead. Layers that share something stay together.
        """
        try:
            setup = self._setup.under(recut(self._setup.graph, self._setup.plan, *layout))
        except PlanError:
            return None
        heard = {edge.source for edge in setup.pipeline.edges if edge.has_gradient}
        return setup if heard == {*range(self._num_stages - 1)} else None
