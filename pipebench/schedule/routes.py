"""Which stages exchange values of a unit, where layers move between them."""

from collections.abc import Callable

from pipebench.errors import PlanError
from pipebench.schedule.moves import CutLayout, Repartition, RepartitionPlan
from pipebench.schedule.pipeline import Pipeline


class Routes:
    """The edges of every unit of a segment, forward and backward.

    Args:
        pipeline: the shape at the drain.
        layout: its cuts, and what layers do with their activations.
        under: returns the shape under others; asked once for each.

    Attributes:
        moves: the moves.
    """

    def __init__(self, pipeline: Pipeline, layout: CutLayout, under: Callable[[CutLayout], Pipeline]) -> None:
        self.moves = RepartitionPlan(pipeline, layout)
        self._under = under
        self._known = {layout: pipeline}

    def announce(self, move: Repartition) -> None:
        """Add a move.

        Raises:
            PlanError: it can't be made, or not from that minibatch on; or the cuts tear what layers share.
        """
        for problem in self.moves.problems(move):
            raise PlanError(problem)
        before = self.moves.last_layout
        after = move.after(before)
        for turned in range(len(before.starts)):  # as boundaries turn over one by one
            for memory in (before.memory, after.memory):
                self.at(CutLayout((*after.starts[: turned + 1], *before.starts[turned + 1 :]), memory))
        self.moves.announce(move)

    def forward(self, minibatch: int) -> Pipeline:
        """Return the shape whose edges a minibatch takes forward."""
        return self.at(self.moves.forward_layout(minibatch))

    def backward(self, minibatch: int) -> Pipeline:
        """Return the shape whose edges a minibatch takes back."""
        return self.at(self.moves.backward_layout(minibatch))

    def at(self, layout: CutLayout) -> Pipeline:
        """Return the shape under cuts and policies."""
        if layout not in self._known:
            self._known[layout] = self._under(layout)
        return self._known[layout]
