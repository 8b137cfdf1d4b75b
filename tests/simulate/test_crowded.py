from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pipebench.cluster import Cluster, Level
from pipebench.errors import ScheduleError
from pipebench.schedule.operations import Op
from pipebench.schedule.pipeline import Edge, Pipeline, chain
from pipebench.schedule.programs import programs
from pipebench.simulate.costs import Costs, Crossing, HostCosts, SharedProcessors, SimulatedBucket, StageCosts
from pipebench.simulate.crowded import Crowded, simulation_of
from pipebench.simulate.network import Network
from pipebench.simulate.simulation import Simulation, TimelineEvent

FAST = Level("server", 4, 1e15, 0.0)
SLOW = Level("server", 4, 100.0, 0.5)
HOST = HostCosts(0.05, 0.01, 0.03, fetches=True)
SHAPES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "gpipe": ((1, 1, 1), {"order": "all-forwards", "microbatches": 4}),
    "1f1b": ((1, 1, 1), {"order": "1f1b", "microbatches": 4}),
    "pipedream": ((1, 1, 1), {"order": "1f1b", "depth": 3}),
    "replicated": ((2, 1), {"order": "1f1b", "depth": 2}),
    "dp": ((3,), {"order": "1f1b"}),
    "fsdp": ((3,), {"order": "sequential", "shard": "parameters", "sums": "ordered"}),
    "zero-bubble": ((1, 1, 1), {"order": "zero-bubble", "microbatches": 3, "backward": "split"}),
    "interleaved": ((1, 1, 1, 1), {"order": "interleaved", "chunks": 2, "microbatches": 2}),
}


def pipeline_of(name: str) -> Pipeline:
    replicas, columns = SHAPES[name]
    given = {"depth": 1, **columns}
    flushes = name not in ("pipedream", "replicated")
    weights = "one" if flushes else "stash"
    return Pipeline(replicas, chain(len(replicas)), flushes=flushes, weights=weights, **given)


def costs_of(pipeline: Pipeline, host: HostCosts, *, bucket: SimulatedBucket | None = None) -> Costs:
    """Stages of different length, each with a bucket that is ready at the end."""
    buckets = (bucket or SimulatedBucket(8, 1.0),)
    stages = tuple(
        StageCosts({1: 1.0 + s}, {1: 2.0 + s / 2}, {1: 1.0}, {1: 0.25}, 0.5, buckets)
        for s in range(len(pipeline.replicas))
    )
    sizes: Crossing = {(edge.source, edge.target): {1: 20} for edge in pipeline.edges}
    return Costs(stages, sizes, sizes, host)


def played(
    kind: type[Simulation], pipeline: Pipeline, costs: Costs, level: Level, count: int = 6
) -> list[TimelineEvent]:
    network = Network(Cluster("one", "unit", None, (level,)))
    return list(kind(pipeline, programs(pipeline, count), costs, network, lambda _: 1))


def times(events: Sequence[TimelineEvent]) -> dict[int, list[tuple[Any, float, float]]]:
    found: dict[int, list[tuple[Any, float, float]]] = {}
    for event in events:
        found.setdefault(event.worker, []).append((event.instruction, event.start_s, event.end_s))
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_with_a_core_per_worker_nothing_changes(shape: str) -> None:
    pipeline = pipeline_of(shape)
    expected = times(played(Simulation, pipeline, costs_of(pipeline, HOST), SLOW))
    crowded = times(played(Crowded, pipeline, costs_of(pipeline, replace(HOST, shared=SharedProcessors(4.0))), SLOW))
    for worker, own in expected.items():
        assert [instruction for instruction, *_ in own] == [instruction for instruction, *_ in crowded[worker]]
        assert [end for *_, end in own] == pytest.approx([end for *_, end in crowded[worker]])


def test_a_delayed_send_takes_its_time_with_a_core_per_worker() -> None:
    """Stage 0 gets no gradients, and is faster than stage 1."""
    edges = (Edge(0, 1, has_gradient=False),)
    pipeline = Pipeline((1, 1), edges, "1f1b", False, 2, weights="stash")
    costs = costs_of(pipeline, HOST)
    fast = replace(costs.stages[0], forward_s={1: 0.125}, backward_s={1: 0.125}, update_s=0.0)
    costs = replace(costs, stages=(fast, costs.stages[1]))
    expected = times(played(Simulation, pipeline, costs, SLOW))
    crowded = replace(costs, host=replace(HOST, shared=SharedProcessors(4.0)))
    found = times(played(Crowded, pipeline, crowded, SLOW))
    for worker, own in expected.items():
        assert [end_s for *_, end_s in found[worker]] == pytest.approx([end_s for *_, end_s in own])


@pytest.mark.parametrize(("num_cores", "times_as_long"), [(3, 1), (2, 1.5), (1.5, 2), (1, 3)])
def test_three_equal_workers_share_cores_evenly(num_cores: float, times_as_long: float) -> None:
    pipeline = pipeline_of("dp")
    costs = costs_of(pipeline, HostCosts(shared=SharedProcessors(num_cores)))
    alone_s = 2 * (1 + 2 + 0.5)  # two rounds
    (end_s,) = {round(own[-1][2], 9) for own in times(played(Crowded, pipeline, costs, FAST)).values()}
    assert end_s == pytest.approx(alone_s * times_as_long + 0.25)  # the first load is waited for, others aren't


@pytest.mark.parametrize("shape", SHAPES)
def test_one_core_does_all_work_in_sequence(shape: str) -> None:
    """Links take no time: somebody can always go on, so the core never idles."""
    pipeline = pipeline_of(shape)
    alone = played(Simulation, pipeline, costs_of(pipeline, HOST), FAST)
    costs = costs_of(pipeline, HOST)
    total_s = 0.0
    for event in alone:
        op, stage = event.instruction.op, event.instruction.stage
        if op in (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.UPDATE):
            total_s += event.end_s - event.start_s
        elif op is Op.LOAD_INPUT:
            total_s += 0.25
        elif op is Op.WAIT_ALL_REDUCE:
            total_s += HOST.all_reduce(8, pipeline.replicas[stage])
        elif op in (Op.WAIT_SCATTER, Op.WAIT_GATHER):
            total_s += 8 * 2 / 3 * 0.03 + 4 * 0.05
        elif "SEND" in op.name or "RECEIVE" in op.name:
            total_s += 0.05 + 20 * 0.01
    crowded = Crowded(
        pipeline,
        programs(pipeline, 6),
        replace(costs, host=replace(HOST, shared=SharedProcessors(1.0))),
        Network(Cluster("one", "unit", None, (FAST,))),
        lambda _: 1,
    )
    *_, last = crowded
    assert crowded.end_s == last.end_s == pytest.approx(total_s)


def test_a_waiting_worker_uses_no_core() -> None:
    """One minibatch at a time through three stages: never two of them compute, so one core is enough."""
    pipeline = Pipeline((1, 1, 1), chain(3), "1f1b", True, 1, weights="one")
    costs = costs_of(pipeline, HostCosts())
    crowded = costs_of(pipeline, HostCosts(shared=SharedProcessors(1.0)))
    costs, crowded = (
        replace(each, stages=tuple(replace(stage, update_s=0.0) for stage in each.stages)) for each in (costs, crowded)
    )
    ends = [played(Simulation, pipeline, costs, SLOW)[-1].end_s, played(Crowded, pipeline, crowded, SLOW)[-1].end_s]
    assert ends[0] == pytest.approx(ends[1])


def test_two_threads_per_worker_need_two_cores() -> None:
    pipeline = pipeline_of("dp")
    ends = [
        max(event.end_s for event in played(Crowded, pipeline, costs_of(pipeline, HostCosts(shared=shared)), FAST))
        for shared in (SharedProcessors(2.0), SharedProcessors(4.0, threads=2))
    ]
    assert ends[0] == pytest.approx(ends[1])


@pytest.mark.parametrize("processors", [(0, 1, 2, 3), (0, 1, 0, 1), (0, 0, 0, 1)])
def test_replicas_on_one_gpu_take_turns_and_those_on_another_wait_for_them(processors: tuple[int, ...]) -> None:
    """Who has company computes at a part of its speed; updates begin when all gradients are there."""
    pipeline = Pipeline((4,), chain(1), "1f1b", True, 1, weights="one")
    costs = costs_of(pipeline, HostCosts(shared=SharedProcessors(1.0, processors=processors)))
    costs = replace(costs, stages=tuple(replace(stage, buckets=()) for stage in costs.stages))
    own = times(played(Crowded, pipeline, costs, FAST, count=4))
    company = [processors.count(number) for number in processors]
    expected = [0.25 + (1 + 2) * max(company) + 0.5 * many for many in company]
    assert [own[worker][-1][2] for worker in range(4)] == pytest.approx(expected)


def test_a_deadlock_is_reported() -> None:
    pipeline = Pipeline((1, 1), chain(2), "1f1b", True, 1, weights="one")
    lists = [iter([each for each in own if "SEND" not in each.op.name]) for own in programs(pipeline, 1)]
    costs, network = (
        costs_of(pipeline, HostCosts(shared=SharedProcessors(1.0))),
        Network(Cluster("one", "unit", None, (FAST,))),
    )
    with pytest.raises(ScheduleError, match="deadlocks"):
        list(Crowded(pipeline, lists, costs, network, lambda _: 1))


def test_cores_are_simulated_where_they_are_shared() -> None:
    pipeline = pipeline_of("dp")
    network = Network(Cluster("one", "unit", None, (FAST,)))
    kinds = [
        type(simulation_of(pipeline, programs(pipeline, 1), costs_of(pipeline, host), network, lambda _: 1))
        for host in (HOST, replace(HOST, shared=SharedProcessors(2.0)))
    ]
    assert kinds == [Simulation, Crowded]
