"""What an evaluation runs on: a pipeline of forwards, and the bytes that cross its cuts."""

from dataclasses import dataclass, replace

from pipebench.model.evaluation import plan_evaluation
from pipebench.model.graph import LayerGraph
from pipebench.model.plan import Plan
from pipebench.model.sampling import Size
from pipebench.profile.model import Profile
from pipebench.profile.shapes import output_bytes
from pipebench.schedule.pipeline import Edge, Pipeline
from pipebench.simulate.costs import Costs, Crossing
from zoo.registry import Dataset


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation runs on.

    Attributes:
        pipeline: the training's, with the edges and inputs that evaluation needs.
        activation_bytes: bytes that cross.
    """

    pipeline: Pipeline
    activation_bytes: Crossing

    def costs(self, training: Costs) -> Costs:
        """Return the costs of evaluations, from those of training: forwards take as long as there."""
        return replace(training, activation_bytes=self.activation_bytes, gradient_bytes={})


def evaluation_of(graph: LayerGraph, plan: Plan, pipeline: Pipeline, profile: Profile, dataset: Dataset) -> Evaluation:
    """Return what an evaluation runs on.

    Args:
        graph: the layer graph, in both modes.
        plan: where training is cut.
        pipeline: the training's.
        profile: knows how large the outputs of the training's layers are.
        dataset: gives the shapes that others follow from.

    Raises:
        PlanError: it can't be cut there, or a value's size is unknown.
    """
    evaluation = graph.evaluated
    planned = plan_evaluation(graph, plan)
    crossing = {value for values in planned.crossings.values() for value in values}
    num_bytes: dict[tuple[int, int], dict[Size, int]] = {edge: {0: 0} for edge in planned.crossings}
    for n, rows in profile.layers.items():
        sizes = {
            value: rows[twin].output_bytes
            for value in crossing
            if (twin := evaluation.evaluation_map[value]) is not None
        }
        if sizes.keys() < crossing:  # something that only evaluation computes
            sizes = output_bytes(evaluation, dataset, n) | sizes
        for edge, values in planned.crossings.items():
            num_bytes[edge][n] = sum(sizes[value] for value in values)
    reads = [{name for i in layers for name in evaluation.layers[i].inputs} for layers in planned.layers]
    (output,) = evaluation.graph.find_nodes(op="output")
    reads[-1] |= {node.name for node in output.all_input_nodes if node.op == "placeholder"}
    edges = tuple(Edge(source, target, has_gradient=False) for source, target in planned.crossings)
    loads = tuple(stage for stage, names in enumerate(reads) if names)
    return Evaluation(replace(pipeline, edges=edges, loads=loads), num_bytes)
