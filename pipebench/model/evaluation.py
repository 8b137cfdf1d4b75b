"""Places the layers of a model's evaluation into the stages of its training."""

from collections.abc import Mapping
from dataclasses import dataclass

from pipebench.errors import PlanError
from pipebench.model.graph import LayerGraph
from pipebench.model.plan import Plan, crossings, stage_of_layers


@dataclass(frozen=True)
class EvaluationPlan:
    """The layers of the evaluation's graph that each stage has."""

    layers: tuple[tuple[int, ...], ...]  # per stage, indices in that graph, ascending; maybe none
    # (source stage, target stage) to the layers whose output crosses, ascending
    crossings: Mapping[tuple[int, int], tuple[int, ...]]


def plan_evaluation(graph: LayerGraph, plan: Plan) -> EvaluationPlan:
    """Place every layer of the evaluation.

    A layer that training has stays in its stage; one that reads a parameter, or a buffer that training changes, goes
    to its stage. Any other goes to the stage that reads it first.

    Raises:
        PlanError: a layer belongs to several stages, or is read before its stage.
    """
    evaluation, last = graph.evaluated, len(plan.stages) - 1
    stage_of_layer = stage_of_layers(plan.stages)
    home = {name: stage_of_layer[layer.index] for layer in graph.layers for name in (*layer.parameters, *layer.buffers)}
    readers: dict[int, list[int]] = {}
    for layer in evaluation.layers:
        for read in layer.reads:
            readers.setdefault(read, []).append(layer.index)
    stages = [last] * len(evaluation.layers)
    for layer in reversed(evaluation.layers):
        trained_index = evaluation.evaluation_map[layer.index]
        read_here = [str(node.target) for node in layer.node.all_input_nodes if node.op == "get_attr"]
        trained = {home[name] for name in (*layer.parameters, *layer.buffers, *read_here) if name in home}
        if trained_index is not None:
            trained.add(stage_of_layer[trained_index])
        read_by = [stages[reader] for reader in readers.get(layer.index, ())]
        stages[layer.index] = max(trained) if trained else min(read_by, default=last)
        if len(trained) > 1 or stages[layer.index] > min(read_by, default=last):
            raise PlanError(
                f"layer {layer.name} of the evaluation belongs to stages {sorted(trained)} by what it reads, and is "
                f"read in stage {min(read_by, default=last)}; move parallelism.cuts or use fewer stages"
            )
    layers = tuple(tuple(i for i, own in enumerate(stages) if own == stage) for stage in range(last + 1))
    return EvaluationPlan(layers, crossings(evaluation, stages, last, relay=plan.relay))
