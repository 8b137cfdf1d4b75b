"""The setup under each of the cuts of a segment in which layers move."""

from pipebench.engine.setup import Setup
from pipebench.errors import PlanError
from pipebench.extensions.moves.repartition_plan import CutLayout, Policies, Repartition, RepartitionPlan, layout_of
from pipebench.model.plan import make_plan, recut
from pipebench.model.stage import Stage, cut_stage

_Values = dict[int, tuple[int, ...]]  # layers whose values are exchanged, by the other stage


class SegmentCuts(RepartitionPlan):
    """A segment of training in which layers may move; `setup` has the cuts at the drain."""

    def __init__(self, setup: Setup) -> None:
        layout = layout_of(setup.plan)
        super().__init__(setup.pipeline, layout)
        self.setup = setup
        self._known = {layout: setup}
        self._crossings: dict[tuple[int, CutLayout], tuple[_Values, _Values]] = {}

    def announce(self, move: Repartition) -> None:
        """Add a move.

        Raises:
            PlanError: it is impossible or too early, or the cuts separate layers that share parameters.
        """
        if self.setup.plan.relay:
            raise PlanError(
                "layers move while training goes on only where values go straight to who reads them; set relay: false"
            )
        if self.setup.loss_scale is not None:
            raise PlanError(
                "layers move while training goes on only where no stage scales its loss; set train.precision: bf16"
            )
        for problem in self.problems(move):
            raise PlanError(problem)
        before = self.last_layout
        after = move.after(before)
        for turned in range(len(before.starts)):  # boundaries switch one by one
            for memory in (before.memory, after.memory):
                self.at(CutLayout((*after.starts[: turned + 1], *before.starts[turned + 1 :]), memory))
        super().announce(move)

    @property
    def last(self) -> Setup:
        """The setup after the last move."""
        return self.at(self.last_layout)

    def at(self, layout: CutLayout) -> Setup:
        """Return the setup under cuts and policies."""
        if layout not in self._known:
            self._known[layout] = self.setup.under(recut(self.setup.graph, self.setup.plan, *layout))
        return self._known[layout]

    def sends(self, stage: int, minibatch: int) -> _Values:
        """Return the layers whose values a stage sends forward, by reading stage, ascending."""
        return self._crossing(stage, self.forward_layout(minibatch))[0]

    def returns(self, stage: int, minibatch: int) -> _Values:
        """Return the layers whose gradients a stage sends back, by stage of the layers."""
        return self._crossing(stage, self.backward_layout(minibatch))[1]

    def policies(self, minibatch: int) -> Policies:
        """Return the memory policies of all layers for a minibatch."""
        return self.forward_layout(minibatch).memory

    def cut(self, start: int, stop: int, memory: Policies) -> Stage:
        """Return layers [start, stop) as a stage of their own; `memory` has the policies of all layers of the model."""
        graph = self.setup.graph
        bounds = [each for each in (start, stop) if 0 < each < len(graph.layers)]
        return cut_stage(graph, make_plan(graph, bounds, [1] * (len(bounds) + 1), memory=memory), int(start > 0))

    def _crossing(self, stage: int, layout: CutLayout) -> tuple[_Values, _Values]:
        """Return the layers whose values leave a stage, and those whose values reach it, by the other stage."""
        if (stage, layout) not in self._crossings:
            crossings = self.at(layout).plan.crossings.items()
            leave = {b: values for (a, b), values in crossings if a == stage}
            self._crossings[stage, layout] = leave, {a: values for (a, b), values in crossings if b == stage}
        return self._crossings[stage, layout]
