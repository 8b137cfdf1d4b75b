"""What a run is under each of the cuts that it goes through while layers move, minibatch by minibatch."""

from pipebench.engine.setup import Setup
from pipebench.errors import PlanError
from pipebench.model.plan import layout_of, make_plan, recut
from pipebench.model.stage import Stage, cut_stage
from pipebench.schedule.moves import BlockTransfer, CutLayout, Policies, Repartition, shape_problems
from pipebench.schedule.routes import Routes

_Values = dict[int, tuple[int, ...]]  # the other stage, and the layers whose values go there or come from there


def phases_of(setup: Setup) -> "SegmentCuts | None":
    """Return the cuts of a segment in which layers may move; None where they can't, or only at drains."""
    return SegmentCuts(setup) if setup.repartitions and not [*shape_problems(setup.pipeline)] else None


class SegmentCuts:
    """A segment of training in which layers may move.

    Args:
        setup: what is run, with the cuts at the drain.

    Attributes:
        setup: that setup.
        routes: which stages exchange values of a unit, and the moves.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        layout = layout_of(setup.plan)
        self._known = {layout: setup}
        self._sends: dict[tuple[int, CutLayout], _Values] = {}
        self._receives: dict[tuple[int, CutLayout], _Values] = {}
        self.routes = Routes(setup.pipeline, layout, lambda under: self.at(under).pipeline)

    def announce(self, move: Repartition) -> None:
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
        return self.at(self.routes.moves.last_layout)

    def at(self, layout: CutLayout) -> Setup:
        """Return what the run is under cuts and policies."""
        if layout not in self._known:
            self._known[layout] = self.setup.under(recut(self.setup.graph, self.setup.plan, *layout))
        return self._known[layout]

    def sends(self, stage: int, minibatch: int) -> _Values:
        """Return the layers whose values a stage sends to others, forward, by stage that reads them, ascending."""
        layout = self.routes.moves.forward_layout(minibatch)
        if (stage, layout) not in self._sends:
            crossings = self.at(layout).plan.crossings
            self._sends[stage, layout] = {b: values for (a, b), values in crossings.items() if a == stage}
        return self._sends[stage, layout]

    def returns(self, stage: int, minibatch: int) -> _Values:
        """Return the layers whose gradients a stage sends back, by stage that computed the layers."""
        layout = self.routes.moves.backward_layout(minibatch)
        if (stage, layout) not in self._receives:
            crossings = self.at(layout).plan.crossings
            self._receives[stage, layout] = {a: values for (a, b), values in crossings.items() if b == stage}
        return self._receives[stage, layout]

    def handed(self, source: int, target: int, minibatch: int) -> BlockTransfer:
        """Return the block on its way from a stage to another, at a minibatch from its B to its K."""
        return self.routes.moves.handed(source, target, minibatch)

    def policies(self, minibatch: int) -> Policies:
        """Return what every layer does with its activations of a minibatch."""
        return self.routes.moves.forward_layout(minibatch).memory

    def cut(self, start: int, stop: int, memory: Policies) -> Stage:
        """Return consecutive layers as a stage of their own.

        Args:
            start: the first of them.
            stop: the layer after the last.
            memory: what every layer of the model does with its activations.
        """
        graph = self.setup.graph
        bounds = [each for each in (start, stop) if 0 < each < len(graph.layers)]
        return cut_stage(graph, make_plan(graph, bounds, [1] * (len(bounds) + 1), memory=memory), int(start > 0))
