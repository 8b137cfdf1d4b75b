"""Simulates a segment in which layers move."""

from collections.abc import Sequence

from pipebench.engine.setup import Setup
from pipebench.extensions.moves.repartition_plan import Repartition
from pipebench.extensions.moves.segment import MovingSegment
from pipebench.extensions.moves.simulated_segment import SimulatedSegment
from pipebench.simulate.meter import Meter
from pipebench.simulate.steady import SegmentTotals


def simulate_moves(
    setup: Setup, moves: Sequence[Repartition], first: int, num_minibatches: int, meter: Meter | None = None
) -> SegmentTotals:
    """Simulate a whole segment in which layers move; return its totals.

    `moves` are numbered from the segment's start, ascending; `first` is its first minibatch in the run.

    Raises:
        PlanError: a move can't be made.
    """
    phases = MovingSegment(setup)
    for move in moves:
        phases.announce(move)
    return SimulatedSegment(setup, phases, first, num_minibatches).played(meter)
