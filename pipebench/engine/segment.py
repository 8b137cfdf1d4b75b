"""A segment of training on the virtual clock: its lists of instructions, and what they cost."""

from collections.abc import Callable, Mapping

from pipebench.engine.admission import StoppableAdmission, StopRequest, admitted_program
from pipebench.engine.protocols import SegmentCosts, SegmentExtension
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
        by_extension: extensions' parts in the segment, by name.
        first: first minibatch, numbered since the run's start.
        num_minibatches: of the segment, if it isn't cut short.
        stop: a request to end the run early.
        on_cut: called with the new length if the segment is cut short.
    """

    def __init__(
        self,
        setup: Setup,
        by_extension: Mapping[str, SegmentExtension],
        first: int,
        num_minibatches: int,
        stop: StopRequest | None = None,
        on_cut: Callable[[int], None] = lambda num_minibatches: None,
    ) -> None:
        self._setup, self._first, self._num_minibatches = setup, first, num_minibatches
        streams = setup.sampler.streams or 1
        self._admission = StoppableAdmission(stop or StopRequest(), setup.pipeline, num_minibatches, streams, on_cut)
        self.part = RunPart(first, lambda: self.limit, by_extension, self.end_at)

    @property
    def limit(self) -> int:
        """Minibatches that will run, as far as is known."""
        return self._admission.limit

    def end_at(self, minibatch: int) -> None:
        """Shorten the segment to end before `minibatch`, which no worker may have started."""
        self._admission.end_at(minibatch)

    def simulation(self, network: Network, size_of: SizeOf, start_s: float, meter: Meter) -> Simulation:
        """Return the simulation, which yields timed instructions and ends early if the segment does.

        Args:
            network: the links.
            size_of: a unit's size.
            start_s: the clock at the segment's start.
            meter: is notified of the segment's start; the caller notifies it of events.
        """
        pipeline, by_extension = self._setup.pipeline, self.part.by_extension
        found = SegmentCosts(self._setup.costs, size_of, recomputing(self._setup.costs, size_of))
        for extension in by_extension.values():
            found = extension.costs(found)
        lists = [
            admitted_program(pipeline, worker, self._num_minibatches, self._admission, by_extension)
            for worker in range(pipeline.num_workers)
        ]
        meter.begin(size_of, found.recomputing_s)
        costs, sizes, _ = found
        copies = bool(by_extension)  # layers that move may begin to swap
        return Simulation(pipeline, lists, costs, network, sizes, start_s, self.part, copies)
