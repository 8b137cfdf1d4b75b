"""A segment in which layers move, from durations alone: what the virtual engine's clock says, without training."""

from collections.abc import Sequence

from pipebench.engine.phase_costs import PhaseCosts
from pipebench.engine.phases import Phases
from pipebench.engine.setup import Setup
from pipebench.model.sampling import Size
from pipebench.schedule.moves import Move
from pipebench.schedule.programs import programs
from pipebench.simulate.meter import Meter
from pipebench.simulate.network import Network
from pipebench.simulate.simulation import Simulation
from pipebench.simulate.steady import Totals


def simulate_moves(
    setup: Setup, moves: Sequence[Move], first: int, num_minibatches: int, meter: Meter | None = None
) -> Totals:
    """Return the totals of a segment in which layers move. All of it is simulated: nothing repeats while they do.

    Args:
        setup: what is run, with the cuts at the drain.
        moves: counted from the segment's start, ascending.
        first: the minibatch of the run that the segment begins with.
        num_minibatches: its length.
        meter: takes note of every event and transfer.

    Raises:
        PlanError: a move can't be made.
    """
    pipeline, sampler, phases = setup.pipeline, setup.sampler, Phases(setup)
    meter = meter or Meter(pipeline, costs=setup.costs)
    for move in moves:
        phases.announce(move)

    def size_of(unit: int) -> Size:
        minibatch, microbatch = pipeline.minibatch(unit)
        return sampler.sizes(first + minibatch, pipeline.microbatches)[microbatch]

    moving = PhaseCosts(phases, size_of, lambda unit: pipeline.minibatch(unit)[0])
    network = Network(setup.cluster, setup.devices, meter.transfer, copies=bool(pipeline.swaps))
    lists = programs(pipeline, num_minibatches, phases.routes)
    simulation = Simulation(pipeline, lists, moving.costs, network, moving.size_of, moving=moving)
    meter.begin(size_of)
    for event in simulation:
        meter.event(event)
    return Totals(
        simulation.end_s, meter.busy_s, meter.stall_s, network.num_bytes,
        again_s=meter.again_s, swap_stall_s=meter.swap_stall_s,
    )  # fmt: skip
