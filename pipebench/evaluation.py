"""How a model is cut for evaluation: at the places where a plan cuts its training."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pipebench.costs import Costs
from pipebench.errors import PlanError
from pipebench.graph import LayerGraph
from pipebench.plan import Plan
from pipebench.profile.model import Profile
from pipebench.schedule.pipeline import Edge, Pipeline


@dataclass(frozen=True)
class EvaluationPlan:
    """Which layers of the evaluation's graph each stage has.

    Attributes:
        layers: per stage, indices in that graph, ascending; maybe none.
        crossings: (source stage, target stage) to the layers whose output the target reads, ascending.
    """

    layers: tuple[tuple[int, ...], ...]
    crossings: Mapping[tuple[int, int], tuple[int, ...]]


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation runs on.

    Attributes:
        pipeline: the training's, with the edges and inputs that evaluation needs.
        activation_bytes: per edge, number of samples to bytes that cross.
    """

    pipeline: Pipeline
    activation_bytes: Mapping[tuple[int, int], Mapping[int, int]]

    def costs(self, training: Costs) -> Costs:
        """Return the costs of evaluations, from those of training: forwards take as long as there."""
        return replace(training, activation_bytes=self.activation_bytes, gradient_bytes={})


def plan_evaluation(graph: LayerGraph, plan: Plan) -> EvaluationPlan:
    """Place every layer of the evaluation.

    One that training has too stays in its stage, and so does one that reads a parameter: where it is trained. Any other
    goes where it is read first.

    Raises:
        PlanError: that can't be done in order, as the plan cuts the model.
    """
    evaluation, last = graph.evaluation, len(plan.stages) - 1
    assert evaluation is not None
    stage_of_layer = [index for index, stage in enumerate(plan.stages) for _ in range(stage.start, stage.stop)]
    stage_of_parameter = {name: stage_of_layer[layer.index] for layer in graph.layers for name in layer.parameters}
    readers: dict[int, list[int]] = {}
    for layer in evaluation.layers:
        for read in layer.reads:
            readers.setdefault(read, []).append(layer.index)
    stages = [last] * len(evaluation.layers)
    for layer in reversed(evaluation.layers):
        twin = evaluation.twins[layer.index]
        trained = {stage_of_parameter[name] for name in layer.parameters if name in stage_of_parameter}
        if twin is not None:
            trained.add(stage_of_layer[twin])
        read_by = [stages[reader] for reader in readers.get(layer.index, ())]
        stages[layer.index] = max(trained) if trained else min(read_by, default=last)
        if len(trained) > 1 or stages[layer.index] > min(read_by, default=last):
            raise PlanError(
                f"layer {layer.name} of the evaluation belongs to stages {sorted(trained)} by what it reads, and is "
                f"read in stage {min(read_by, default=last)}; move parallelism.cuts or use fewer stages"
            )
    crossings = _crossings(evaluation, stages, last)
    layers = tuple(tuple(i for i, own in enumerate(stages) if own == stage) for stage in range(last + 1))
    return EvaluationPlan(layers, crossings)


def evaluation_of(graph: LayerGraph, plan: Plan, pipeline: Pipeline, profile: Profile) -> Evaluation:
    """Return what an evaluation runs on.

    Args:
        graph: the layer graph, in both modes.
        plan: where training is cut.
        pipeline: the training's.
        profile: bytes of what crosses; it knows the layers of the training.

    Raises:
        PlanError: it can't be cut there.
    """
    evaluation = graph.evaluation
    assert evaluation is not None
    planned = plan_evaluation(graph, plan)
    num_bytes: dict[tuple[int, int], dict[int, int]] = {}
    for edge, values in planned.crossings.items():
        rows = [_twin(graph, value) for value in values]
        num_bytes[edge] = {0: 0} | {n: sum(at[row].output_bytes for row in rows) for n, at in profile.layers.items()}
    reads = [{name for i in layers for name in evaluation.layers[i].inputs} for layers in planned.layers]
    (output,) = evaluation.graph.find_nodes(op="output")
    reads[-1] |= {node.name for node in output.all_input_nodes if node.op == "placeholder"}
    return Evaluation(
        replace(
            pipeline,
            edges=tuple(Edge(source, target, has_gradient=False) for source, target in planned.crossings),
            loads=tuple(stage for stage, names in enumerate(reads) if names),
        ),
        num_bytes,
    )


def _crossings(evaluation: LayerGraph, stages: Sequence[int], last: int) -> dict[tuple[int, int], tuple[int, ...]]:
    crossing: dict[tuple[int, int], set[int]] = {}

    def note(read: Iterable[int], target: int) -> None:
        for value in read:
            if stages[value] != target:
                crossing.setdefault((stages[value], target), set()).add(value)

    for layer in evaluation.layers:
        note(layer.reads, stages[layer.index])
    note(evaluation.outputs, last)
    return {edge: tuple(sorted(values)) for edge, values in sorted(crossing.items())}


def _twin(graph: LayerGraph, value: int) -> int:
    """Return the layer of the training whose output is as large as that of a layer of the evaluation."""
    assert graph.evaluation is not None
    twin = graph.evaluation.twins[value]
    if twin is None:
        raise PlanError(
            f"the value of {graph.evaluation.layers[value].name}, which the model only computes in evaluation, is "
            "read in several stages; move parallelism.cuts or use fewer stages"
        )
    return twin
