"""Algorithm 1 of vPipe (TPDS'21, section 4.2) on the last stage: from all stages' reports to a decision.

Differs: a layout must fit in the devices' memory not only by equation 1, but also in a simulation, which includes
waiting messages and what stages hold while layers move. If a stage exceeds its limit there, the search runs again with
a lower limit for that stage, as it does before a run (`planner/virtualised.py`).
"""

import itertools
import logging
import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

from pipebench.engine.setup import Setup
from pipebench.errors import PlanError
from pipebench.extensions.moves.migration_memory import held_at_once
from pipebench.extensions.moves.rebalancing import WORTHWHILE, RepartitionSearch, StageTimes, problems_of
from pipebench.extensions.moves.repartition_plan import CutLayout, Repartition, Starts, layout_of
from pipebench.extensions.moves.segment import MovingSegment
from pipebench.extensions.moves.settings import settings_of
from pipebench.extensions.moves.simulated_segment import SimulatedSegment
from pipebench.formats import num_bytes, seconds
from pipebench.model.plan import recut
from pipebench.planner.stage_problem import StageProblem, input_bytes_of
from pipebench.planner.state_graph import prefixes
from pipebench.simulate.memory import stage_memories
from pipebench.simulate.memory_meter import MemoryMeter
from pipebench.simulate.meter import Meter
from pipebench.simulate.steady import simulate_segment

MIN_UNITS = 4  # backwards per stage that a mean takes at least
_MOST_TRIALS = 8  # layouts to simulate until one fits; two or three usually suffice
_LOG = logging.getLogger(__name__)


class FeasibilityCheck:
    """Predicts the memory of a running pipeline by simulation; `setup` has the cuts at the previous drain.

    The closed form of equation 1, by which cuts and policies are found, ignores waiting messages, and layers that are
    transferred while units are in flight.
    """

    def __init__(self, setup: Setup) -> None:
        pipeline, cluster = setup.pipeline, setup.cluster
        self._setup = setup
        self.layout = layout_of(setup.plan)  # at the previous drain
        self._inputs = {size: input_bytes_of(rows) for size, rows in setup.profile.by_size.items()}
        self._multiple = math.lcm(pipeline.period, setup.sampler.streams or 1)
        self.limit_bytes = math.inf if cluster.memory_bytes is None else float(cluster.memory_bytes)
        # Minibatches from the one in whose backward the last stage decides to the first under the new layout: the first
        # stage has begun at most a depth more, and a move needs twice the depth (`RepartitionPlan.problems`).
        self.ahead = 3 * pipeline.depth + 1

    def earliest(self, minibatch: int) -> int:
        """Return the first minibatch that may run under a decision made in `minibatch`'s backward."""
        return math.ceil((minibatch + self.ahead) / self._multiple) * self._multiple

    def after(self, layout: CutLayout) -> Setup | None:
        """Return the setup under another layout, or None if it is impossible.

        Layers that share tensors stay on one stage. Every stage but the last must receive gradients: decisions travel
        with them, and a stage that waits for none would run ahead.
        """
        try:
            setup = self._setup.under(recut(self._setup.graph, self._setup.plan, *layout))
        except PlanError:
            return None
        receiving = {edge.source for edge in setup.pipeline.edges if edge.has_gradient}
        return setup if receiving == {*range(setup.pipeline.num_stages - 1)} else None

    def excess(self, layout: CutLayout) -> list[float] | None:
        """Return by how many bytes each stage exceeds its limit under a layout, or None if that is impossible."""
        setup = self.after(layout)
        if setup is None:
            return None
        pipeline = setup.pipeline
        if math.isinf(self.limit_bytes):
            return [0.0] * pipeline.num_stages
        memories = stage_memories(setup.profile, setup.plan, pipeline, self._inputs)
        meter = MemoryMeter(pipeline, memories, setup.costs)
        simulate_segment(setup, setup.sampler.minibatches_per_epoch, Meter(pipeline, meter))
        peaks = meter.timeline().peaks
        held = [max(peaks[worker].num_bytes for worker in workers) for workers in pipeline.places]
        return [max(0.0, most - self.limit_bytes) for most in held]

    def excess_while_moving(self, layouts: Sequence[CutLayout]) -> list[float]:
        """Return by how many bytes each stage exceeds its limit, at most, in moves from the first layout to the last.

        If layers move at drains, nothing is in flight then, but a device holds its stage under both layouts.
        """
        setups = [setup for setup in map(self.after, layouts) if setup is not None]
        if len(setups) < len(layouts) or math.isinf(self.limit_bytes):
            return [0.0] * self._setup.pipeline.num_stages
        if not settings_of(self._setup.pipeline).live:
            moves = [held_at_once(*pair, trained=True) for pair in itertools.pairwise(setups)]
            most = [max(each.total() for each in of_stage) for of_stage in zip(*moves, strict=True)]
            return [max(0.0, held - self.limit_bytes) for held in most]
        now = setups[0]
        phases, at = MovingSegment(now), 0
        for layout in layouts[1:]:
            at = self.earliest(at)
            phases.announce(Repartition(at, *layout))
        segment = SimulatedSegment(now, phases, 0, self.earliest(at), inputs=self._inputs)
        segment.played()
        peaks = [] if segment.memory is None else segment.memory.peaks
        return [max(0.0, most - self.limit_bytes) for most in peaks]


def halfway(starts: Starts, wanted: Starts) -> Starts:
    """Return the cuts halfway from `starts` to `wanted`, rounded towards `starts`."""
    return tuple(start + int((other - start) / 2) for start, other in zip(starts, wanted, strict=True))


class StageReport(NamedTuple):
    """Measurements of a stage."""

    stage: int
    moves: int  # decisions it knows of
    units: int  # measured since the last decision
    forward_s: float  # mean seconds of a unit's forward
    backward_s: float  # mean seconds of a unit's backward
    peak_bytes: float = 0.0  # since the last decision; 0: unknown

    @property
    def measured(self) -> StageTimes:
        """The measurements, as `RepartitionSearch` takes them."""
        return StageTimes(self.forward_s + self.backward_s, self.peak_bytes)


# A cache: the next layout and the one after it, by the current layout and the measurements.
Decisions = dict[Hashable, tuple[CutLayout | None, CutLayout | None]]


class RepartitionController:
    """Decides on moves of layers from all stages' reports.

    Args:
        setup: has the cuts at the previous drain.
        known: a cache of decisions for this setup, which several simulated runs may share.
    """

    def __init__(self, setup: Setup, known: Decisions | None = None) -> None:
        pipeline, size = setup.pipeline, setup.costs.most_samples
        self._rows = setup.profile.by_size[size]
        self._may_start = {members.bit_count() for members in prefixes(self._rows).members[1:-1]}
        self._num_stages = pipeline.num_stages
        self._check = FeasibilityCheck(setup)
        self._layout = self._check.layout
        self._known: Decisions = {} if known is None else known
        self._next: CutLayout | None = None  # decided together with the current layout, which makes room for it
        self._before: Sequence[StageTimes] | None = None  # measurements for which no better layout was found
        self._problem_of = problems_of(
            setup.profile,
            pipeline,
            size,
            self._check.limit_bytes,
            setup.cluster.pcie_bytes_per_s,
            settings_of(pipeline).chooses,
        )

    def decide(self, minibatch: int, reports: Sequence[StageReport]) -> Repartition | None:
        """Return the next layout and its first minibatch, or None: nothing better, or too few measurements.

        Args:
            minibatch: the one in whose backward the last stage decides.
            reports: one per stage; all must have measured the current layout.
        """
        if len(reports) < self._num_stages or min(report.units for report in reports) < MIN_UNITS:
            return None
        if len({report.moves for report in reports}) > 1:
            return None
        measured = [report.measured for report in sorted(reports)]
        if self._next is None and self._is_as_before(measured):
            return None
        if self._check.after(self._layout) is None:  # last: cutting a large model is slow
            return None
        layout, self._next = self._next, None
        if layout is None:
            key = self._layout, tuple((f"{each.seconds:.9g}", each.num_bytes) for each in measured)
            if key not in self._known:
                self._known[key] = self._next_layouts(measured)
            layout, self._next = self._known[key]
        self._before = measured if layout is None else None
        if layout is None:
            return None
        self._log(minibatch, measured)
        self._layout = layout
        return Repartition(self._check.earliest(minibatch), *layout)

    def _log(self, minibatch: int, measured: Sequence[StageTimes]) -> None:
        predicted = RepartitionSearch(self._rows, self._layout, measured, self._problem_of).predicted_bytes
        for stage, (own, predicted_bytes) in enumerate(zip(measured, predicted, strict=True)):
            _LOG.info(
                "minibatch %d: stage %d takes %s and holds %s, predicted were %s",
                minibatch, stage, seconds(own.seconds), num_bytes(own.num_bytes), num_bytes(predicted_bytes),
            )  # fmt: skip

    def _is_as_before(self, measured: Sequence[StageTimes]) -> bool:
        """Return whether measurements are those for which no better layout was found: a search is slow."""
        return self._before is not None and all(
            abs(now.seconds - before.seconds) <= WORTHWHILE * before.seconds and now.num_bytes <= before.num_bytes
            for now, before in zip(measured, self._before, strict=True)
        )

    def _next_layouts(self, measured: Sequence[StageTimes]) -> tuple[CutLayout | None, CutLayout | None]:
        """Return the next layout and the one right after it; each may be None.

        If the wanted layout does not fit while layers move, stages first change policies. Where that is not enough,
        layers move only halfway. No layout is returned that fits worse than the current one.
        """
        layout = self._layout
        stages = RepartitionSearch(self._rows, layout, measured, self._problem_of, self._may_start)
        tight = _LowerLimits(stages)
        wanted = self._fitting(tight)
        if wanted is None or self._num_unfit(layout):  # if the current layout doesn't fit, move at once
            return wanted, None
        while wanted is not None:
            found = self._fitting_while_moving(stages, tight, wanted)
            if found is not None:
                return found
            starts = halfway(layout.starts, wanted.starts)
            wanted = None if starts in {layout.starts, wanted.starts} else self._fitting(tight, starts)
        return None, None

    def _fitting(self, tight: "_LowerLimits", starts: Starts | None = None) -> CutLayout | None:
        """Return the next layout that fits in simulation, or None if none fits as well as the current one.

        A stage over its limit first chooses policies again under the same cuts, with a lower limit, since other cuts
        would overload other stages. Only if that makes stages slow are cuts searched again.

        Args:
            tight: the search, whose limits are lowered.
            starts: cuts that must not change; None: any.
        """
        searches, layout, unfit = starts is None, None, self._num_stages
        for _ in range(_MOST_TRIALS):
            layout = None if starts is None else tight.stages.chosen_again(starts)
            if layout is None and searches:
                layout = tight.stages.next_step()
            excess = None if layout is None else self._check.excess(layout)
            if layout is None or excess is None:
                return None
            unfit = sum(more > 0 for more in excess)
            if not unfit:
                return layout
            tight.tighten(excess)
            starts = layout.starts
        return layout if unfit <= self._num_unfit(self._layout) else None

    def _num_unfit(self, layout: CutLayout) -> int:
        """Return how many stages exceed their memory."""
        return sum(more > 0 for more in self._check.excess(layout) or ())

    def _fitting_while_moving(
        self, stages: RepartitionSearch, tight: "_LowerLimits", wanted: CutLayout
    ) -> tuple[CutLayout, CutLayout | None] | None:
        """Return the next layout and the one right after it such that all stages fit while layers move, or None.

        With layers in transfer a stage may exceed its memory either under the current layout's policies or under the
        wanted one's. The trials lower memory in turn for the first, by an intermediate layout with current cuts and
        other policies, and for the second.

        Args:
            stages: the search with the devices' limits.
            tight: the search whose lower limits have led to `wanted`.
            wanted: the layout to reach.
        """
        now = self._layout
        room, first, roomy = _LowerLimits(stages), now, set[int]()
        unused = [max(0.0, self._check.limit_bytes - held) for held in stages.predicted_bytes]
        for trial in range(_MOST_TRIALS):
            steps = [wanted] if first == now else [first, wanted]
            excess = self._check.excess_while_moving([now, *steps])
            if not any(excess):
                return steps[0], None if first == now else wanted
            if trial % 2:
                tight.tighten(excess)
                wanted = tight.stages.chosen_again(wanted.starts) or wanted
            else:
                room.tighten([more + left if more else 0.0 for more, left in zip(excess, unused, strict=True)])
                unused = [0.0 if more else left for more, left in zip(excess, unused, strict=True)]
                roomy |= {stage for stage, more in enumerate(excess) if more}
                made = room.stages.chosen(now.starts)
                first = first if made.num_unfit else now.with_policies(made.layout.memory, roomy)
        return None


class _LowerLimits:
    """A search in which stages have less memory than their devices."""

    def __init__(self, stages: RepartitionSearch) -> None:
        self.stages = stages  # with the lower limits
        self._problem_of = stages.problem_of  # with the devices' limits
        self._less_bytes = [0.0] * len(stages.measured)
        self._times_over = Counter[int]()

    def tighten(self, excess: Sequence[float]) -> None:
        """Lower the limits of stages by their excess, times the number of calls in which they had any."""
        self._times_over.update(stage for stage, more in enumerate(excess) if more)
        less = [
            before + self._times_over[stage] * more
            for stage, (before, more) in enumerate(zip(self._less_bytes, excess, strict=True))
        ]
        self._less_bytes = less

        def problem_of(stage: int, start: int, stop: int) -> StageProblem:
            problem = self._problem_of(stage, start, stop)
            return replace(problem, limit_bytes=problem.limit_bytes - less[stage]) if less[stage] else problem

        self.stages = replace(self.stages, problem_of=problem_of)
