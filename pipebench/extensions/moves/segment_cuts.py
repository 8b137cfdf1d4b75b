"""The setup under each of the cuts of a segment in which layers move."""

from pipebench.engine.setup import Setup
from pipebench.errors import PlanError
from pipebench.extensions.moves.repartition_plan import BlockTransfer, CutLayout, Policies, Repartition, layout_of
from pipebench.extensions.moves.routes import Routes
from pipebench.model.plan import make_plan, recut
from pipebench.model.stage import Stage, cut_stage

_Values = dict[int, tuple[int, ...]]  # layers whose values are exchanged, by the other stage


class SegmentCuts:
    """A segment of training in which layers may move; `setup` has the cuts at the drain."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        layout = layout_of(setup.plan)
        self._known = {layout: setup}
        self._sends: dict[tuple[int, CutLayout], _Values] = {}
        self._receives: dict[tuple[int, CutLayout], _Values] = {}
        # Which stages exchange a unit's values, and the moves
        self.routes = Routes(setup.pipeline, layout, lambda under: self.at(under).pipeline)

    def announce(self, move: Repartition) -> None:
        """Add a move.

        Raises:
            PlanError: the layers can't move so, or not from that minibatch on.
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
        """The setup after the last move."""
        return self.at(self.routes.moves.last_layout)

    def at(self, layout: CutLayout) -> Setup:
        """Return the setup under cuts and policies."""
        if layout not in self._known:
            self._known[layout] = self.setup.under(recut(self.setup.graph, self.setup.plan, *layout))
        return self._known[layout]

    def sends(self, stage: int, minibatch: int) -> _Values:
        """Return the layers whose values a stage sends forward, by reading stage, ascending."""
        layout = self.routes.moves.forward_layout(minibatch)
        if (stage, layout) not in self._sends:
            crossings = self.at(layout).plan.crossings
            self._sends[stage, layout] = {b: values for (a, b), values in crossings.items() if a == stage}
        return self._sends[stage, layout]

    def returns(self, stage: int, minibatch: int) -> _Values:
        """Return the layers whose gradients a stage sends back, by stage of the layers."""
        layout = self.routes.moves.backward_layout(minibatch)
        if (stage, layout) not in self._receives:
            crossings = self.at(layout).plan.crossings
            self._receives[stage, layout] = {a: values for (a, b), values in crossings.items() if b == stage}
        return self._receives[stage, layout]

    def handed(self, source: int, target: int, minibatch: int) -> BlockTransfer:
        """Return the block in transfer from a stage to another, at a minibatch from its B to its K."""
        return self.routes.moves.handed(source, target, minibatch)

    def policies(self, minibatch: int) -> Policies:
        """Return the memory policies of all layers for a minibatch."""
        return self.routes.moves.forward_layout(minibatch).memory

    def cut(self, start: int, stop: int, memory: Policies) -> Stage:
        """Return layers [start, stop) as a stage of their own; `memory` has the policies of all layers of the model."""
        graph = self.setup.graph
        bounds = [each for each in (start, stop) if 0 < each < len(graph.layers)]
        return cut_stage(graph, make_plan(graph, bounds, [1] * (len(bounds) + 1), memory=memory), int(start > 0))
