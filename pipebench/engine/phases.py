"""What a run is under each of the cuts that it goes through while layers move, minibatch by minibatch."""

from pipebench.engine.setup import Setup
from pipebench.errors import PlanError
from pipebench.model.plan import make_plan, recut
from pipebench.model.stage import Stage, cut_stage
from pipebench.schedule.moves import HandOver, Move, Starts, shape_problems
from pipebench.schedule.routes import Routes

_Values = dict[int, tuple[int, ...]]  # the other stage, and the layers whose values go there or come from there


def phases_of(setup: Setup) -> "Phases | None":
    """Return the cuts of a segment in which layers may move; None where they can't, or only at drains."""
    return Phases(setup) if setup.repartitions and not [*shape_problems(setup.pipeline)] else None


class Phases:
    """A segment of training in which layers may move.

    Args:
        setup: what is run, with the cuts at the drain.

    Attributes:
        setup: that setup.
        routes: which stages exchange values of a unit, and the moves.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._starts: Starts = tuple(stage.start for stage in setup.plan.stages[1:])
        self._known = {self._starts: setup}
        self._sends: dict[tuple[int, Starts], _Values] = {}
        self._receives: dict[tuple[int, Starts], _Values] = {}
        self.routes = Routes(setup.pipeline, self._starts, len(setup.graph.layers), lambda s: self.at(s).pipeline)

    def announce(self, move: Move) -> None:
        """Add a move.

        Raises:
            PlanError: it can't be made, or not from that minibatch on.
        """
        if self.setup.plan.relay:
            raise PlanError(
                "layers move while training goes on only where values go straight to who reads them; set relay: false"
            )
        if self.setup.loss_scale is not None:
            raise PlanError(
                "layers move while training goes on only where no stage scales its loss; set train.precision: bf16"
            )
        self.routes.announce(move)

    @property
    def last(self) -> Setup:
        """What the run is after the last move."""
        return self.at(self.routes.moves.last_starts)

    def at(self, starts: Starts) -> Setup:
        """Return what the run is under cuts."""
        if starts not in self._known:
            self._known[starts] = self.setup.under(recut(self.setup.graph, self.setup.plan, starts))
        return self._known[starts]

    def sends(self, stage: int, minibatch: int) -> _Values:
        """Return the layers whose values a stage sends to others, forward, by stage that reads them, ascending."""
        starts = self.routes.moves.forward_starts(minibatch)
        if (stage, starts) not in self._sends:
            crossings = self.at(starts).plan.crossings
            self._sends[stage, starts] = {b: values for (a, b), values in crossings.items() if a == stage}
        return self._sends[stage, starts]

    def returns(self, stage: int, minibatch: int) -> _Values:
        """Return the layers whose gradients a stage sends back, by stage that computed the layers."""
        starts = self.routes.moves.backward_starts(minibatch)
        if (stage, starts) not in self._receives:
            crossings = self.at(starts).plan.crossings
            self._receives[stage, starts] = {a: values for (a, b), values in crossings.items() if b == stage}
        return self._receives[stage, starts]

    def handed(self, source: int, target: int, minibatch: int) -> HandOver:
        """Return the block on its way from a stage to another, at a minibatch from its B to its K."""
        return self.routes.moves.handed(source, target, minibatch)

    def cut(self, start: int, stop: int) -> Stage:
        """Return consecutive layers as a stage of their own."""
        graph = self.setup.graph
        bounds = [each for each in (start, stop) if 0 < each < len(graph.layers)]
        memory = [policy for stage in self.setup.plan.stages for policy in stage.memory]
        return cut_stage(graph, make_plan(graph, bounds, [1] * (len(bounds) + 1), memory=memory), int(start > 0))
