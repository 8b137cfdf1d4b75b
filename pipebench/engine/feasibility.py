"""What a decision of Algorithm 1 would come to in memory, found by simulating it: afterwards, and while layers move.

The closed form of equation 1, by which cuts and policies are found, knows no messages that wait, nor what a stage holds
of layers that come or go while units are in flight.
"""

import math
from collections.abc import Sequence

from pipebench.engine.segment_cuts import SegmentCuts
from pipebench.engine.setup import Setup
from pipebench.engine.simulated_segment import SimulatedSegment
from pipebench.errors import PlanError
from pipebench.model.plan import layout_of, recut
from pipebench.planner.stage_problem import input_bytes_of
from pipebench.schedule.moves import CutLayout, Repartition, Starts
from pipebench.simulate.memory import stage_memories
from pipebench.simulate.memory_meter import MemoryMeter
from pipebench.simulate.meter import Meter
from pipebench.simulate.steady import simulate_segment


class FeasibilityCheck:
    """Looks ahead of a pipeline that trains.

    Args:
        setup: what runs, with the cuts at the drain before.

    Attributes:
        layout: what there is at that drain.
        limit_bytes: memory of a device; infinite where all fits.
        ahead: minibatches from one that the last stage runs backward to the first that no stage has come to.
    """

    def __init__(self, setup: Setup) -> None:
        pipeline, cluster = setup.pipeline, setup.cluster
        self._setup, self.layout = setup, layout_of(setup.plan)
        self._inputs = {size: input_bytes_of(rows) for size, rows in setup.profile.by_size.items()}
        self._multiple = math.lcm(pipeline.period, setup.sampler.streams or 1)
        self.limit_bytes = math.inf if cluster.memory_bytes is None else float(cluster.memory_bytes)
        self.ahead = 3 * pipeline.depth + 1  # of the last stage's backward; the first stage is a depth further

    def earliest(self, minibatch: int) -> int:
        """Return from which minibatch on layers can move by a decision made with the backward of one."""
        return math.ceil((minibatch + self.ahead) / self._multiple) * self._multiple

    def after(self, layout: CutLayout) -> Setup | None:
        """Return what runs under other cuts; None: some stage would hear of nothing, or a layer can't be there.

        All stages have to wait for gradients: who gets none runs ahead. Layers that share something stay together.
        """
        try:
            setup = self._setup.under(recut(self._setup.graph, self._setup.plan, *layout))
        except PlanError:
            return None
        heard = {edge.source for edge in setup.pipeline.edges if edge.has_gradient}
        return setup if heard == {*range(setup.pipeline.num_stages - 1)} else None

    def excess(self, layout: CutLayout) -> list[float] | None:
        """Return by how many bytes every stage has more than fits once a layout holds; None: it can't."""
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
        held = [max(peaks[worker].num_bytes for worker in pipeline.workers_of(k)) for k in range(pipeline.num_stages)]
        return [max(0.0, most - self.limit_bytes) for most in held]

    def excess_on_the_way(self, layouts: Sequence[CutLayout]) -> list[float]:
        """Return by how many bytes every stage has more than fits at any time from one layout to the last.

        Where layers move at drains nothing is in flight, and a stage never has more than before or afterwards.
        """
        now = self.after(layouts[0])
        if now is None or math.isinf(self.limit_bytes) or not self._setup.live:
            return [0.0] * self._setup.pipeline.num_stages
        phases, at = SegmentCuts(now), 0
        for layout in layouts[1:]:
            at = self.earliest(at)
            phases.announce(Repartition(at, *layout))
        segment = SimulatedSegment(now, phases, 0, self.earliest(at), inputs=self._inputs)
        segment.played()
        peaks = [] if segment.memory is None else segment.memory.peaks
        return [max(0.0, most - self.limit_bytes) for most in peaks]


def halfway(starts: Starts, wanted: Starts) -> Starts:
    """Return cuts half as far from some as others, or a layer less."""
    return tuple(start + int((other - start) / 2) for start, other in zip(starts, wanted, strict=True))
