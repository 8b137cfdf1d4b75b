"""Simulation of moving layers: transfers, forwards repeated at new owners, and updates of the layers there are."""

from typing import Any, Final

from pipebench.extensions.moves.migration_costs import PhaseCosts
from pipebench.extensions.moves.settings import MOVES
from pipebench.schedule.operations import MIGRATION, Op
from pipebench.simulate.simulation import Play, Simulation, SimulationExtension

_TRANSFERS: Final = (Op.GIVE, Op.GIVE_UNIT, Op.TAKE, Op.TAKE_UNIT)


class MovingPlay(SimulationExtension):
    """Moves in a simulation, if it is of a segment in which layers may move."""

    def __init__(self, simulation: Simulation) -> None:
        self.plays: dict[Op, Play] = {}
        segment: Any = simulation.part and simulation.part.by_extension.get(MOVES)
        if segment is None:
            return
        costs: PhaseCosts = segment.moving
        neighbours = ((left, left + 1) for left in range(simulation.pipeline.num_stages - 1))
        edges = [edge for left, right in neighbours for edge in ((left, right), (right, left))]
        simulation.messages.connect(MIGRATION, "M", edges, costs.num_bytes, _TRANSFERS)
        self.plays = {
            Op.UPDATE: lambda worker, it, now_s: costs.update_s(it.stage, it.number),
            Op.RECUT: lambda worker, it, now_s: 0.0,
            Op.FORWARD_AGAIN: lambda worker, it, now_s: costs.again_s(it),
        }
