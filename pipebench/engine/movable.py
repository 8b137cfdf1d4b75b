"""What all engines do about moves: they are announced from outside, or decided on inside, where stages balance."""

from pipebench.engine.segment_cuts import SegmentCuts
from pipebench.engine.setup import Setup
from pipebench.schedule.moves import Repartition


class Movable:
    """An engine whose layers may move.

    Attributes:
        setup: what is run, under the cuts there are now.
    """

    setup: Setup

    def __init__(self) -> None:
        self._phases: SegmentCuts | None = (
            None  # of the segment that runs, or of the next one where it has moves already
        )
        self._decisions: list[Repartition] = []

    def announce(self, move: Repartition) -> None:
        """Let layers move in the next segment, or in the one that runs now, while it goes on.

        In processes all workers announce the same, before any has come to that place.

        Raises:
            PlanError: layers can't move so, or not from that minibatch on.
        """
        self._phases = self._phases or SegmentCuts(self.setup)
        self._phases.announce(move)

    def take_decisions(self) -> list[Repartition]:
        """Return what was decided to balance the stages since this was last asked, numbered since the drain before."""
        taken, self._decisions = self._decisions, []
        return taken

    def _decided(self, move: Repartition) -> None:
        """A stage hears of a decision, those of one process one after the other: the first of them tells all."""
        if move in self._decisions:
            return
        self._decisions.append(move)
        if self.setup.live:
            self.announce(move)
        else:
            self._end_at(move.at)

    def _end_at(self, minibatch: int) -> None:
        """Let the segment that runs end before a minibatch that nobody has begun."""
        raise NotImplementedError
