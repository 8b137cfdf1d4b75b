"""A segment of training on the virtual clock, as it is simulated: the lists, costs and links of every engine on it."""

from collections.abc import Callable

from pipebench.engine.admission import StoppableAdmission, StopRequest, admitted_program
from pipebench.engine.migration_costs import PhaseCosts
from pipebench.engine.segment_cuts import SegmentCuts
from pipebench.engine.setup import Setup
from pipebench.model.sampling import Size
from pipebench.simulate.meter import Meter, recomputing
from pipebench.simulate.network import Network
from pipebench.simulate.simulation import RunPart, Simulation

SizeOf = Callable[[int], Size]


class Segment:
    """A segment between two drains.

    Args:
        setup: what is run.
        phases: the cuts, where layers may move meanwhile.
        first: the minibatch of the run that it begins with.
        num_minibatches: its length.
        stop: may ask for an early end.
        on_cut: told of the new length where the segment is cut short.

    Attributes:
        moving: what it costs that layers move, once it is simulated; None where they can't.
    """

    def __init__(
        self,
        setup: Setup,
        phases: SegmentCuts | None,
        first: int,
        num_minibatches: int,
        stop: StopRequest | None = None,
        on_cut: Callable[[int], None] = lambda num_minibatches: None,
    ) -> None:
        self._setup, self._phases, self._first, self._num_minibatches = setup, phases, first, num_minibatches
        self.moving: PhaseCosts | None = None
        streams = setup.sampler.streams or 1
        self._admission = StoppableAdmission(stop or StopRequest(), setup.pipeline, num_minibatches, streams, on_cut)

    @property
    def limit(self) -> int:
        """Minibatches that will run."""
        return self._admission.limit

    def end_at(self, minibatch: int) -> None:
        """End before a minibatch that nobody has begun, to move there."""
        self._admission.end_at(minibatch)

    def simulation(self, network: Network, size_of: SizeOf, start_s: float, meter: Meter) -> Simulation:
        """Return what gives every instruction a start and an end; it ends early where the segment does.

        Args:
            network: the links.
            size_of: the size of a unit.
            start_s: the clock when the segment begins.
            meter: told that it begins, not of its events.
        """
        setup, pipeline, phases, routes = self._setup, self._setup.pipeline, self._phases, None
        costs, sizes, recomputing_s = setup.costs, size_of, recomputing(setup.costs, size_of)
        if phases is not None:
            moving = self.moving = PhaseCosts(phases, size_of, lambda unit: pipeline.minibatch(unit)[0])
            routes = phases.routes
            costs, sizes, recomputing_s = moving.costs, moving.size_of, moving.recomputing_s
        lists = [
            admitted_program(pipeline, worker, self._num_minibatches, self._admission, routes)
            for worker in range(pipeline.num_workers)
        ]
        part = RunPart(self._first, lambda: self.limit)
        meter.begin(size_of, recomputing_s)
        return Simulation(pipeline, lists, costs, network, sizes, start_s, part, self.moving)
