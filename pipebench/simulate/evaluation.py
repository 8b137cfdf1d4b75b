"""The pipeline of an evaluation: forwards only, and the bytes that cross its cuts."""

from dataclasses import dataclass, replace

from pipebench.model.evaluation import plan_evaluation
from pipebench.model.graph import LayerGraph
from pipebench.model.plan import Plan
from pipebench.model.sampling import Size
from pipebench.profile.model import Profile
from pipebench.profile.shapes import output_bytes
from pipebench.schedule.pipeline import Edge, Pipeline
from pipebench.simulate.costs import Costs, Crossing, reading
from pipebench.zoo.registry import Dataset


@dataclass(frozen=True)
class Evaluation:
    """The pipeline of an evaluation."""

    pipeline: Pipeline  # that of training, with the edges and loading stages of evaluation
    activation_bytes: Crossing

    def costs(self, training: Costs) -> Costs:
        """Return the costs of evaluation, whose forwards take as long as those of training."""
        return replace(training, activation_bytes=self.activation_bytes, gradient_bytes={})


def evaluation_of(graph: LayerGraph, plan: Plan, pipeline: Pipeline, profile: Profile, dataset: Dataset) -> Evaluation:
    """Return the pipeline of an evaluation with the plan and pipeline of training.

    Sizes of values are the profile's; of values that only evaluation computes, they follow from the data set's shapes.

    Raises:
        PlanError: evaluation can't be cut there, or a value's size is unknown.
    """
    evaluation = graph.evaluated
    planned = plan_evaluation(graph, plan)
    crossing = {value for values in planned.crossings.values() for value in values}
    num_bytes: dict[tuple[int, int], dict[Size, int]] = {edge: {0: 0} for edge in planned.crossings}
    for n, rows in profile.layers.items():
        sizes = {
            value: rows[same].output_bytes
            for value in crossing
            if (same := evaluation.evaluation_map[value]) is not None
        }
        if sizes.keys() < crossing:  # some values are computed by evaluation only
            sizes = output_bytes(evaluation, dataset, n) | sizes
        for edge, values in planned.crossings.items():
            num_bytes[edge][n] = sum(sizes[value] for value in values)
    reads = [{name for i in layers for name in evaluation.layers[i].inputs} for layers in planned.layers]
    (output,) = evaluation.graph.find_nodes(op="output")
    reads[-1] |= {node.name for node in output.all_input_nodes if node.op == "placeholder"}
    edges = tuple(Edge(source, target, has_gradient=False) for source, target in planned.crossings)
    inputs = [stage for stage, names in enumerate(reads) if names]
    loads = reading(plan, inputs, with_targets=not dataset.targets_apart)
    return Evaluation(replace(pipeline, edges=edges, loads=loads), num_bytes)
