"""A segment of training in which layers may move, as engines ask for it."""

from pipebench.engine.protocols import SegmentCosts, SegmentExtension
from pipebench.engine.setup import Setup
from pipebench.extensions.moves.migration_costs import PhaseCosts
from pipebench.extensions.moves.repartition_plan import shape_problems
from pipebench.extensions.moves.segment_cuts import SegmentCuts


class MovingSegment(SegmentCuts, SegmentExtension):
    """The cuts of a segment, with the costs of moving layers once it is simulated."""

    moving: PhaseCosts

    def costs(self, costs: SegmentCosts) -> SegmentCosts:
        """Return what instructions cost under the cuts of their units."""
        pipeline = self.setup.pipeline
        moving = self.moving = PhaseCosts(self, costs.size_of, lambda unit: pipeline.minibatch(unit)[0])
        return SegmentCosts(moving.costs, moving.size_of, moving.recomputing_s)

    def foreseen(self) -> "MovingSegment":
        """Return a segment with the moves known so far."""
        made = MovingSegment(self.setup)
        for move in self.announced:
            made.announce(move)
        return made


def segment_of(setup: Setup) -> MovingSegment | None:
    """Return a segment in which layers may move; None if they can't, or only at drains."""
    return MovingSegment(setup) if setup.repartitions and not [*shape_problems(setup.pipeline)] else None
