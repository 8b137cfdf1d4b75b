"""The values and gradients that cross the borders of one worker's stages.

Between two stages of the worker they are available at once. Those for other workers are stored until they are sent.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol

from pipebench.engine.gradients import Gradients, add
from pipebench.engine.loss_scale import LossScale
from pipebench.engine.replica import Values
from pipebench.engine.structure import CrossingError, flatten
from pipebench.model.graph import LayerGraph
from pipebench.model.stage import Stage
from pipebench.schedule.pipeline import Pipeline

_SCALE = -1  # key, among layers, of the loss scale that gradients are multiplied by
_Key = tuple[int, int]  # stage, unit


class UnitEdges(Protocol):
    """Which layers' values stages exchange, where that depends on the minibatch, since layers move."""

    def sends(self, stage: int, minibatch: int) -> Mapping[int, tuple[int, ...]]:
        """Return the layers whose values a stage sends forward, by receiving stage."""

    def returns(self, stage: int, minibatch: int) -> Mapping[int, tuple[int, ...]]:
        """Return the layers whose gradients a stage sends back, by receiving stage."""


class BoundaryValues:
    """Values and gradients in transit in one segment of training, or in one evaluation.

    Args:
        graph: the model's layers, for their names.
        pipeline: says which stages share a worker.
        stages: the worker's, as they are cut when the segment begins.
        scales: the loss scale of every stage whose gradients are scaled.
    """

    def __init__(
        self, graph: LayerGraph, pipeline: Pipeline, stages: Mapping[int, Stage], scales: Mapping[int, LossScale]
    ) -> None:
        self._graph = graph
        self._pipeline = pipeline
        self._stages = stages
        self._scales = scales
        self.edges: UnitEdges | None = None  # in place of the stages' own
        self._received: dict[_Key, Values] = {}  # values for a forward
        self._outgoing: dict[_Key, Values] = {}  # a forward's values, for others
        self._can_cross: set[tuple[int, int]] = set()  # sending and receiving stages whose values have been checked
        self._arriving: dict[_Key, dict[int, Gradients]] = {}  # gradients for a backward, by the stage they come from
        self._returning: dict[_Key, Gradients] = {}  # a backward's gradients, for others

    # Forward.

    def take_values(self, stage: int, unit: int, values: Values) -> None:
        """Store a unit's values that another stage has sent."""
        self._received.setdefault((stage, unit), {}).update(values)

    def received(self, stage: int, unit: int) -> Values:
        """Return all values of a unit from other stages; called once."""
        return self._received.pop((stage, unit), {})

    def leave(self, stage: int, unit: int, values: Values) -> None:
        """Store the values that leave a stage after a forward; other stages of this worker receive theirs at once."""
        if self._sends(stage, unit):  # otherwise no stage reads them
            self._outgoing[stage, unit] = values
        for target in self._within_worker(self._stages[stage].sends, stage):
            self.take_values(target, unit, self.values_for(stage, unit, target))

    def values_for(self, stage: int, unit: int, target: int) -> Values:
        """Return the values of a unit for stage `target`; called once per target, in the order of the sends.

        Raises:
            CrossingError: a value can't be sent to another stage; names its layer.
        """
        outgoing, sends = self._outgoing.get((stage, unit), {}), self._sends(stage, unit)
        values = {layer: outgoing[layer] for layer in sends[target] if layer in outgoing}
        if values and (stage, target) not in self._can_cross:  # checked for the first unit only
            self._check(values)
            self._can_cross.add((stage, target))
        if target == self._last_target(stage, sends):
            self._outgoing.pop((stage, unit), None)
        return values

    # Back.

    def take_gradients(self, stage: int, unit: int, source: int, gradients: Gradients) -> None:
        """Store the gradients from stage `source` of a unit's values that this worker's `stage` has sent."""
        self._arriving.setdefault((stage, unit), {})[source] = gradients

    def arrived(self, stage: int, unit: int) -> Gradients:
        """Return the gradients of a unit's values, summed over the stages that read them; called once.

        Gradients of one value are added in the same order under every plan: those of the last reader first. They are
        converted into this stage's loss scale.
        """
        arriving = self._arriving.pop((stage, unit), {})
        total: Gradients = {}
        for reader in sorted(arriving, reverse=True):
            gradients = arriving[reader]
            add(total, gradients, self._factor(stage, gradients))
        return total

    def leave_back(self, stage: int, unit: int, returning: Gradients) -> None:
        """Store a backward's gradients of received values; other stages of this worker receive theirs at once."""
        if gradients := {layer: found for layer, found in returning.items() if found}:
            self._returning[stage, unit] = gradients
        for source in self._within_worker(self._stages[stage].receives, stage):
            if own := self.gradients_for(stage, unit, source):
                self.take_gradients(source, unit, stage, own)

    def gradients_for(self, stage: int, unit: int, source: int) -> Gradients:
        """Return the gradients of a unit's values that stage `source` has sent; called once per source."""
        returning = self._returning.get((stage, unit), {})
        layers = self._returns(stage, unit)[source]
        gradients = {layer: returning.pop(layer) for layer in layers if layer in returning}
        if gradients and stage in self._scales:
            gradients[_SCALE] = [self._scales[stage].value]
        if not returning:
            self._returning.pop((stage, unit), None)
        return gradients

    def _within_worker(self, others: Iterable[int], stage: int) -> list[int]:
        """Return the stages among `others` that run the same units on this worker."""
        return [other for other in others if other != stage and self._pipeline.is_local(stage, other)]

    def _sends(self, stage: int, unit: int) -> Mapping[int, tuple[int, ...]]:
        """Return the layers whose values of a unit go to other stages, by receiving stage."""
        if self.edges is None:
            return self._stages[stage].sends
        return self.edges.sends(stage, self._pipeline.minibatch(unit)[0])

    def _returns(self, stage: int, unit: int) -> Mapping[int, tuple[int, ...]]:
        """Return the layers whose gradients of a unit go back to other stages, by receiving stage."""
        if self.edges is None:
            return self._stages[stage].receives
        return self.edges.returns(stage, self._pipeline.minibatch(unit)[0])

    def _last_target(self, stage: int, sends: Iterable[int]) -> int:
        """Return the last stage that receives a unit's values: those of this worker receive theirs first."""
        away = [target for target in sends if not self._pipeline.is_local(stage, target)]
        return max(away or sends)

    def _check(self, values: Values) -> None:
        for layer, value in values.items():
            try:
                flatten(value)
            except CrossingError as error:
                raise CrossingError(f"layer {self._graph.layers[layer].name}: {error}") from None

    def _factor(self, stage: int, gradients: Gradients) -> float:
        """Remove the loss scale from gradients that have arrived; return the factor into this stage's scale."""
        (given,) = gradients.pop(_SCALE, [None])
        scale = self._scales.get(stage)
        return 1.0 if scale is None or given is None else float(scale.value / given)
