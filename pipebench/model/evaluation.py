"""Places the layers of a model's evaluation into the stages of its training."""

from collections.abc import Mapping
from dataclasses import dataclass

from pipebench.errors import PlanError
from pipebench.model.graph import LayerGraph
from pipebench.model.plan import Plan, crossings, stage_of_layers


@dataclass(frozen=True)
class EvaluationPlan:
    """The layers of the evaluation's graph that each stage has."""

    layers: tuple[tuple[int, ...], ...]  # per stage, indices in that graph, ascending; a stage may have none
    # (source stage, target stage) to the layers whose output goes from one to the other, ascending
    crossings: Mapping[tuple[int, int], tuple[int, ...]]


def plan_evaluation(graph: LayerGraph, plan: Plan) -> EvaluationPlan:
    """Place every layer of the evaluation.

    A layer that training also has stays in its stage. A layer that reads a parameter, or a buffer that training
    changes, goes to a stage that has it. Any other layer goes to the first stage that reads its output.

    Raises:
        PlanError: a layer would have to be in several stages, or an earlier stage reads its output.
    """
    evaluation, last = graph.evaluated, len(plan.stages) - 1
    stage_of_layer = stage_of_layers(plan.stages)
    homes: dict[str, set[int]] = {}  # parameter or buffer to the stages that have it: several if it is tied
    for layer in graph.layers:
        for name in (*layer.parameters, *layer.buffers):
            homes.setdefault(name, set()).add(stage_of_layer[layer.index])
    readers: dict[int, list[int]] = {}
    for layer in evaluation.layers:
        for read in layer.reads:
            readers.setdefault(read, []).append(layer.index)
    stages = [last] * len(evaluation.layers)
    for layer in reversed(evaluation.layers):
        trained_index = evaluation.evaluation_map[layer.index]
        read_here = [str(node.target) for node in layer.node.all_input_nodes if node.op == "get_attr"]
        places = [homes[name] for name in (*layer.parameters, *layer.buffers, *read_here) if name in homes]
        if trained_index is not None:
            places.append({stage_of_layer[trained_index]})
        read_first = min((stages[reader] for reader in readers.get(layer.index, ())), default=last)
        allowed = [stage for stage in set.intersection(*places) if stage <= read_first] if places else [read_first]
        if not allowed:
            raise PlanError(
                f"layer {layer.name} of the evaluation belongs to stages {sorted(set.union(*places))} by what it "
                f"reads, and is read in stage {read_first}; move parallelism.cuts or use fewer stages"
            )
        stages[layer.index] = max(allowed)
    layers = tuple(tuple(i for i, own in enumerate(stages) if own == stage) for stage in range(last + 1))
    return EvaluationPlan(layers, crossings(evaluation, stages, last, relay=plan.relay))
