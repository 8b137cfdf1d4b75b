"""Which stages exchange values of a unit, where layers move between them."""

from collections.abc import Callable, Sequence

from pipebench.errors import PlanError
from pipebench.schedule.moves import Move, Moves, Starts
from pipebench.schedule.pipeline import Pipeline


class Routes:
    """The edges of every unit of a segment, forward and backward.

    Args:
        pipeline: the shape at the drain.
        starts: its cuts: the first layer of every stage but the first.
        num_layers: of the model.
        under: returns the shape under other cuts; asked once for each.

    Attributes:
        moves: the moves.
    """

    def __init__(
        self, pipeline: Pipeline, starts: Sequence[int], num_layers: int, under: Callable[[Starts], Pipeline]
    ) -> None:
        self.moves = Moves(pipeline, starts, num_layers)
        self._under = under
        self._known = {tuple(starts): pipeline}

    def announce(self, move: Move) -> None:
        """Add a move.

        Raises:
            PlanError: it can't be made, or not from that minibatch on; or the cuts tear what layers share.
        """
        for problem in self.moves.problems(move):
            raise PlanError(problem)
        before = self.moves.last_starts
        for turned in range(len(before)):  # as boundaries turn over one by one
            self.at((*move.starts[: turned + 1], *before[turned + 1 :]))
        self.moves.announce(move)

    def forward(self, minibatch: int) -> Pipeline:
        """Return the shape whose edges a minibatch takes forward."""
        return self.at(self.moves.forward_starts(minibatch))

    def backward(self, minibatch: int) -> Pipeline:
        """Return the shape whose edges a minibatch takes back."""
        return self.at(self.moves.backward_starts(minibatch))

    def at(self, starts: Starts) -> Pipeline:
        """Return the shape under cuts."""
        if starts not in self._known:
            self._known[starts] = self._under(starts)
        return self._known[starts]
