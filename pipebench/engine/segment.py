"""A segment of training on the virtual clock: the lists, costs and links of every engine that uses it."""

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
    """A segment between two drains, with its cuts if layers may move.

    `first` is its first minibatch in the run; `on_cut` is called with the new length if the segment is cut short.
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
        # Costs of moving layers, once simulated; None if they can't move
        self.moving: PhaseCosts | None = None
        streams = setup.sampler.streams or 1
        self._admission = StoppableAdmission(stop or StopRequest(), setup.pipeline, num_minibatches, streams, on_cut)

    @property
    def limit(self) -> int:
        """Minibatches that will run."""
        return self._admission.limit

    def end_at(self, minibatch: int) -> None:
        """Shorten the segment to end before `minibatch`, which no worker may have started."""
        self._admission.end_at(minibatch)

    def simulation(self, network: Network, size_of: SizeOf, start_s: float, meter: Meter) -> Simulation:
        """Return the simulation, which yields timed instructions and ends early if the segment does.

        `start_s` is the clock at the segment's start; `meter` is notified of the start, not of events.
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
