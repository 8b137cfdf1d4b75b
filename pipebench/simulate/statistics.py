"""Running statistics (of BatchNorm) at a drain, which the replicas of a stage average."""

from collections.abc import Iterator

from pipebench.schedule.pipeline import Pipeline
from pipebench.simulate.agenda import Action
from pipebench.simulate.costs import Costs
from pipebench.simulate.network import Network
from pipebench.simulate.timeline import BUFFERS


def stages_that_average(pipeline: Pipeline, costs: Costs) -> Iterator[int]:
    """Yield the stages with running statistics and several replicas."""
    for index, (replicas, stage) in enumerate(zip(pipeline.replicas, costs.stages, strict=True)):
        if replicas > 1 and stage.buffer_bytes > 0:
            yield index


def average_statistics(pipeline: Pipeline, costs: Costs, network: Network, clock_s: float, done: Action) -> None:
    """Begin the sums of all these stages over an idle network; `done` runs at the end of each."""
    for stage in stages_that_average(pipeline, costs):
        num_bytes, workers = costs.stages[stage].buffer_bytes, pipeline.places[stage]
        network.sum_up(network.group(pipeline.buffer_algorithm, BUFFERS, workers), "buffers", num_bytes, clock_s, done)
