"""Edges without gradients: how far the sender runs ahead, by hand and in every order of work."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from pipebench.cluster import Cluster, Level
from pipebench.schedule.operations import Op
from pipebench.schedule.pipeline import SPLIT, Edge, Pipeline, chain
from pipebench.schedule.programs import most_in_flight, programs
from pipebench.simulate.costs import Costs, Crossing, HostCosts, StageCosts
from pipebench.simulate.network import Network
from pipebench.simulate.simulation import Simulation, TimelineEvent

FREE = HostCosts()


def play(
    pipeline: Pipeline, num_minibatches: int, forward_s: Sequence[float], backward_s: Sequence[float], host: HostCosts
) -> list[TimelineEvent]:
    """Simulate over links that take no time; of edges without gradients only activations have a size."""
    stages = tuple(
        StageCosts({1: f}, {1: b}, {1: b / 2}, {1: 0.0}, 0.0) for f, b in zip(forward_s, backward_s, strict=True)
    )
    activations: Crossing = {(edge.source, edge.target): {1: 10} for edge in pipeline.edges}
    gradients: Crossing = {(edge.source, edge.target): {1: 10} for edge in pipeline.edges if edge.has_gradient}
    cluster = Cluster("free", "unit", None, (Level("server", pipeline.num_workers, float("inf"), 0.0),))
    costs = Costs(stages, activations, gradients, host)
    return list(Simulation(pipeline, programs(pipeline, num_minibatches), costs, Network(cluster), lambda _: 1))


def starts(events: list[TimelineEvent], op: Op) -> list[float]:
    return [event.start_s for event in events if event.instruction.op is op]


def test_a_stage_without_gradients_waits_for_its_reader() -> None:
    """Depth 2, a reader that takes 3 s: minibatch k leaves when k - 2 is received, not after its own forward of 1 s."""
    pipeline = Pipeline((1, 1), (Edge(0, 1, has_gradient=False),), "1f1b", False, 2)
    events = play(pipeline, 6, (1.0, 1.0), (0.0, 2.0), FREE)
    assert starts(events, Op.SEND_ACTIVATION) == [1, 2, 3, 4, 7, 10]
    assert [event.end_s for event in events if event.instruction.op is Op.RECEIVE_ACTIVATION] == [1, 4, 7, 10, 13, 16]


def test_a_delayed_send_occupies_its_worker_from_its_start() -> None:
    """Depth 1, and both ends of a message take 0.5 s: the third, ready at 4.0 s, waits until 4.5 s for the second."""
    pipeline = Pipeline((1, 1), (Edge(0, 1, has_gradient=False),), "1f1b", False, 1)
    events = play(pipeline, 3, (1.0, 1.0), (0.0, 2.0), HostCosts(0.5, 0.0))
    sends = [(event.start_s, event.end_s) for event in events if event.instruction.op is Op.SEND_ACTIVATION]
    # The reader takes in the first until 1.5 s, computes until 4.5 s, and then begins to take in the second.
    assert sends == [(1.0, 1.5), (2.5, 3.0), (4.5, 5.0)]


SHAPES = [
    Pipeline((1, 1, 1), chain(3), "1f1b", False, 3),
    Pipeline((1, 1, 1), chain(3), "1f1b", False, 5),
    Pipeline((3, 1), chain(2), "1f1b", False, 2),
    Pipeline((1, 3, 2), chain(3), "1f1b", False, 6),
    Pipeline((2, 1, 1), chain(3), "1f1b", True, 2, microbatches=4),
    Pipeline((1, 1, 1), chain(3), "all-forwards", True, 3, microbatches=5),
    Pipeline((7, 1), chain(2), "all-forwards", True, 1),
    Pipeline((1, 1, 1), (*chain(3), Edge(0, 2)), "1f1b", False, 3),
    Pipeline((1, 1, 1), chain(3), "zero-bubble", True, 3, microbatches=5, backward=SPLIT),
    Pipeline((1,) * 6, chain(6), "interleaved", True, 3, microbatches=6, chunks=2),
    Pipeline((1,) * 6, chain(6), "zbv", True, 3, microbatches=8, chunks=2, backward=SPLIT),
    Pipeline((1,) * 6, chain(6), "dualpipev", True, 3, microbatches=8, chunks=2, backward=SPLIT),
    Pipeline((2,) * 4, chain(4), "dualpipe", True, 2, microbatches=8, chunks=2, backward=SPLIT),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda p: f"{p.order}-{'-'.join(map(str, p.replicas))}-{p.depth}")
@pytest.mark.parametrize("fast", [True, False], ids=["fast sender", "fast reader"])
def test_no_stage_gets_further_ahead_than_gradients_would_allow(shape: Pipeline, fast: bool) -> None:
    """Whichever edges lack gradients, all minibatches run, and at most a stage's units in flight are under way."""
    most, count = most_in_flight(shape), 4 * shape.period
    seconds = [1.0 + (stage if fast else shape.num_stages - stage) for stage in range(shape.num_stages)]
    for lacking in itertools.product((False, True), repeat=min(3, len(shape.edges))):
        edges = [Edge(e.source, e.target, not lacks) for e, lacks in zip(shape.edges, lacking, strict=False)]
        pipeline = replace(shape, edges=(*edges, *shape.edges[len(edges) :]))
        without = {(edge.source, edge.target) for edge in pipeline.edges if not edge.has_gradient}
        under_way, largest = Counter[tuple[int, int, int]](), Counter[tuple[int, int]]()
        events = play(pipeline, count, seconds, [2 * each for each in seconds], FREE)
        for event in events:
            op, stage, unit, other, *_ = event.instruction
            if op is Op.SEND_ACTIVATION and (stage, other) in without:
                under_way[stage, other, unit % pipeline.block] += 1
                pair = sum(
                    number
                    for (a, b, residue), number in under_way.items()
                    if (a, b) == (stage, other)
                    and pipeline.worker(a, residue) == pipeline.worker(a, unit)
                    and pipeline.worker(b, residue) == pipeline.worker(b, unit)
                )
                largest[stage, other] = max(largest[stage, other], pair)
            elif op is Op.RECEIVE_ACTIVATION and (other, stage) in without:
                under_way[other, stage, unit % pipeline.block] -= 1
        assert not +under_way
        assert largest.keys() == {(s, t) for s, t in without if not pipeline.is_local(s, t)}
        assert all(number <= most[source] for (source, _), number in largest.items())
