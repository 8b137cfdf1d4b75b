"""The edges that each unit takes while layers move."""

from collections.abc import Callable

from pipebench.errors import PlanError
from pipebench.extensions.moves.repartition_plan import CutLayout, Repartition, RepartitionPlan
from pipebench.schedule.pipeline import Pipeline


class Routes:
    """The edges of every unit of a segment, forward and backward.

    Args:
        pipeline: the shape at the drain.
        layout: cuts and policies at the drain.
        under: returns the shape under another layout; called once for each.
    """

    def __init__(self, pipeline: Pipeline, layout: CutLayout, under: Callable[[CutLayout], Pipeline]) -> None:
        self.moves = RepartitionPlan(pipeline, layout)
        self._under = under
        self._known = {layout: pipeline}

    def announce(self, move: Repartition) -> None:
        """Add a move.

        Raises:
            PlanError: it is impossible or too early, or the cuts separate layers that share parameters.
        """
        for problem in self.moves.problems(move):
            raise PlanError(problem)
        before = self.moves.last_layout
        after = move.after(before)
        for turned in range(len(before.starts)):  # boundaries switch one by one
            for memory in (before.memory, after.memory):
                self.at(CutLayout((*after.starts[: turned + 1], *before.starts[turned + 1 :]), memory))
        self.moves.announce(move)

    def forward(self, minibatch: int) -> Pipeline:
        """Return the shape of a minibatch's forward."""
        return self.at(self.moves.forward_layout(minibatch))

    def backward(self, minibatch: int) -> Pipeline:
        """Return the shape of a minibatch's backward."""
        return self.at(self.moves.backward_layout(minibatch))

    def at(self, layout: CutLayout) -> Pipeline:
        """Return the shape under a layout."""
        if layout not in self._known:
            self._known[layout] = self._under(layout)
        return self._known[layout]
