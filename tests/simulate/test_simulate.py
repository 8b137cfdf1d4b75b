"""Times of the simulator against hand calculation: links, shared ports, overlapping all-reduce, loading."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from pipebench.cluster import Cluster, Level
from pipebench.schedule.operations import Op
from pipebench.schedule.pipeline import Pipeline, chain
from pipebench.schedule.programs import forward_programs, programs
from pipebench.simulate.costs import Costs, Crossing, HostCosts, SimulatedBucket, StageCosts
from pipebench.simulate.network import Network
from pipebench.simulate.simulation import Simulation, TimelineEvent
from pipebench.simulate.sums import ring_bytes

TWO_LEVELS = Cluster("two", "unit", None, (Level("server", 2, 100.0, 0.5), Level("cluster", 2, 10.0, 1.0)))


def simulate(
    pipeline: Pipeline, num_minibatches: int, stages: list[StageCosts], num_bytes: int, cluster: Cluster
) -> tuple[list[TimelineEvent], Network]:
    sizes: Crossing = {(e.source, e.target): {1: num_bytes} for e in pipeline.edges}
    network = Network(cluster)
    simulation = Simulation(
        pipeline, programs(pipeline, num_minibatches), Costs(tuple(stages), sizes, sizes), network, lambda _: 1
    )
    return list(simulation), network


def stage(
    forward: float = 1.0, backward: float = 2.0, update: float = 0.0, load: float = 0.0, *buckets: SimulatedBucket
) -> StageCosts:
    return StageCosts({1: forward}, {1: backward}, {1: backward / 2}, {1: load}, update, buckets)


def compute(events: list[TimelineEvent], worker: int) -> Iterator[tuple[str, Any, Any]]:
    for event in events:
        if event.worker == worker and event.instruction.op in (Op.FORWARD, Op.BACKWARD, Op.UPDATE):
            what = event.instruction._replace(version=-1)
            yield str(what).removeprefix(str(what.stage)), event.start_s, event.end_s


def test_one_minibatch_through_two_servers() -> None:
    """Worker 1 to 2 crosses servers: 20 bytes at 10 bytes/s and 1 s of latency, each way."""
    pipeline = Pipeline((1, 1, 1, 1), chain(4), "1f1b", True, 1)
    events, network = simulate(pipeline, 1, [stage(update=0.25)] * 4, 20, TWO_LEVELS)
    inside, across = 20 / 100 + 0.5, 20 / 10 + 1.0
    forward_3 = 3 + 2 * inside + across
    assert next(compute(events, 3)) == ("F0", pytest.approx(forward_3), pytest.approx(forward_3 + 1))
    backward_0 = forward_3 + 1 + 6 + 2 * inside + across
    assert list(compute(events, 0))[1:] == [
        ("B0", pytest.approx(backward_0), pytest.approx(backward_0 + 2)),
        ("U0", pytest.approx(backward_0 + 2), pytest.approx(backward_0 + 2.25)),
    ]
    assert network.num_bytes == {
        ("activation", "server"): 40, ("activation", "cluster"): 20,
        ("gradient", "server"): 40, ("gradient", "cluster"): 20,
    }  # fmt: skip


def test_workers_of_a_server_share_its_uplink() -> None:
    """Both replicas of stage 0 send at the same time to the other server: each has half of the uplink."""
    pipeline = Pipeline((2, 2), chain(2), "1f1b", True, 1)
    events, _ = simulate(pipeline, 2, [stage(), stage()], 20, TWO_LEVELS)
    starts = sorted(start for w in (2, 3) for name, start, _ in compute(events, w) if name.startswith("F"))
    assert starts == [pytest.approx(1 + 2 + 2 + 1)] * 2


def test_messages_of_two_pairs_of_stages_of_the_same_workers_stay_in_order() -> None:
    """Stages 0 and 2, 1 and 3 share a worker; from 2 to 3 go three values of two sizes, from 0 to 1 one.

    F0 of stage 0 is on its way from 1 to 6, F1 from 6 to 11; stage 2's, from 8 on, waits for that, and is there at 16.
    """
    pipeline = Pipeline((1, 1, 1, 1), chain(4), "interleaved", True, 1, accumulate=2, chunks=2)
    sizes: Crossing = {(0, 1): {1: 50}, (1, 2): {1: 0}, (2, 3): {1: 50}}
    cluster = Cluster("flat", "unit", None, (Level("server", 2, 10.0, 0.0),))
    costs = Costs((stage(),) * 4, sizes, sizes, values={(2, 3): (1.5, 1.5)})
    events = [*Simulation(pipeline, programs(pipeline, 2), costs, Network(cluster), lambda _: 1)]
    starts = {str(e.instruction): e.start_s for e in events if e.instruction.op is Op.FORWARD}
    assert (starts["1F1@0"], starts["2F0@0"], starts["3F0@0"]) == (11, 7, 16)


def test_sums_of_two_stages_of_the_same_workers_go_side_by_side() -> None:
    """Stage 1's gradients are there at 4, stage 0's at 6; 40 bytes take 4 s alone, and 2 s of latency.

    From 6 on both have half of the links: stage 1's last byte is sent at 10, stage 0's at 12.
    """
    pipeline = Pipeline((2, 2), chain(2), "interleaved", True, 1, chunks=2)
    cluster = Cluster("flat", "unit", None, (Level("server", 2, 10.0, 1.0),))
    events, _ = simulate(pipeline, 2, [stage(1.0, 2.0, 0.0, 0.0, SimulatedBucket(40, 1.0))] * 2, 0, cluster)
    waits = {(e.instruction.stage, e.worker): e.end_s for e in events if e.instruction.op is Op.WAIT_ALL_REDUCE}
    assert waits == {(0, 0): 14.0, (0, 1): 14.0, (1, 0): 14.0, (1, 1): 14.0}


def test_all_reduce_overlaps_the_backward() -> None:
    """Two replicas, a bucket ready half-way (40 bytes) and one at the end (20 bytes); ring of two: 2 steps of half."""
    cluster = Cluster("flat", "unit", None, (Level("server", 2, 10.0, 0.0),))
    pipeline = Pipeline((2,), (), "1f1b", True, 1)
    buckets = SimulatedBucket(40, 0.5), SimulatedBucket(20, 1.0)
    events, network = simulate(pipeline, 2, [stage(1.0, 4.0, 0.0, 0.0, *buckets)], 0, cluster)
    waits = [e for e in events if e.instruction.op is Op.WAIT_ALL_REDUCE]
    # backward 1..5; the first bucket takes 3..7, the second waits for the links: 7..9
    assert [(e.start_s, e.end_s, e.stall_s) for e in waits] == [(5.0, 9.0, 4.0)] * 2
    assert network.num_bytes == {("all-reduce", "server"): 2 * (2 - 1) * 60}


@pytest.mark.parametrize(
    ("sync", "ends_s", "kind"),
    [
        ("all-reduce", 9.0, "all-reduce"),
        ("all-reduce-after", 11.0, "all-reduce"),
        ("parameter-server", 9.0, "parameter-server"),
        ("parameter-server-after", 11.0, "parameter-server"),
    ],
)
def test_sums_after_the_backward_are_not_overlapped(sync: str, ends_s: float, kind: str) -> None:
    """As above; late, the first bucket takes 5..9 and the second 9..11. Servers of two take what a ring of two does."""
    cluster = Cluster("flat", "unit", None, (Level("server", 2, 10.0, 0.0),))
    pipeline = Pipeline((2,), (), "1f1b", True, 1, sync=sync)
    events, network = simulate(
        pipeline, 2, [stage(1.0, 4.0, 0.0, 0.0, SimulatedBucket(40, 0.5), SimulatedBucket(20, 1.0))], 0, cluster
    )
    assert [e.end_s for e in events if e.instruction.op is Op.WAIT_ALL_REDUCE] == [ends_s] * 2
    assert network.num_bytes == {(kind, "server"): 2 * (2 - 1) * 60}


def test_waiting_for_a_slow_replica_is_a_bubble_and_no_stall() -> None:
    pipeline = Pipeline((1, 1), chain(2), "1f1b", True, 1)
    events, _ = simulate(
        pipeline, 1, [stage(), stage(3.0, 5.0)], 0, Cluster("f", "u", None, (Level("s", 2, 1.0, 0.5),))
    )
    (wait,) = [e for e in events if e.instruction.op is Op.RECEIVE_GRADIENT]
    assert (wait.start_s, wait.end_s) == (1.0, 1 + 0.5 + 8 + 0.5)
    assert wait.stall_s == pytest.approx(0.5), "only the transfer counts as communication"


def test_loading_is_hidden_behind_compute_until_it_is_the_bottleneck() -> None:
    pipeline, flat = Pipeline((1,), (), "1f1b", True, 1), Cluster("f", "u", None, (Level("s", 1, 1.0, 0.0),))
    fast, _ = simulate(pipeline, 10, [stage(load=2.5)], 0, flat)
    slow, _ = simulate(pipeline, 10, [stage(load=5.0)], 0, flat)
    assert fast[-1].end_s == pytest.approx(2.5 + 10 * 3), "the first load shows, the others don't"
    assert slow[-1].end_s == pytest.approx(10 * 5 + 3), "one load after the other, then the last step"


def test_events_come_after_what_they_depend_on() -> None:
    pipeline = Pipeline((2, 1, 2), chain(3), "1f1b", False, 3)
    buckets = (SimulatedBucket(30, 1.0),)
    events, _ = simulate(
        pipeline, 12, [stage(1, 2, 0.1, 0.0, *buckets)] * 3, 7, Cluster("f", "u", None, (Level("s", 5, 50.0, 0.1),))
    )
    sent: set[tuple[int, int, int]] = set()
    for event in events:
        op, own, number, peer, *_ = event.instruction
        if op in (Op.SEND_ACTIVATION, Op.SEND_GRADIENT):
            sent.add((number, own, peer))
        elif op in (Op.RECEIVE_ACTIVATION, Op.RECEIVE_GRADIENT):
            assert (number, peer, own) in sent
    for worker in range(5):
        spans = [(e.start_s, e.end_s) for e in events if e.worker == worker]
        assert all(a[1] <= b[0] + 1e-12 for a, b in itertools.pairwise(spans)), "a worker does one thing at a time"


def test_evaluation_runs_forward_only() -> None:
    pipeline = Pipeline((2, 1), chain(2), "1f1b", False, 2)
    ops = {i.op for program in forward_programs(pipeline, 5) for i in program}
    assert ops == {Op.LOAD_INPUT, Op.RECEIVE_ACTIVATION, Op.FORWARD, Op.SEND_ACTIVATION}


@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize("elements", [1, 2, 5, 100, 1001])
def test_ring_bytes_add_up(size: int, elements: int) -> None:
    assert sum(ring_bytes(4 * elements, size)) == 2 * (size - 1) * 4 * elements


def test_messages_take_processor_time_of_their_ends_if_given() -> None:
    """An end of a message of 20 bytes takes 0.1 + 20 x 0.01 s, on top of the link: sender and receiver each."""
    pipeline = Pipeline((1, 1), chain(2), "1f1b", True, 1)
    sizes: Crossing = {(0, 1): {1: 20}}
    cluster = Cluster("one", "unit", None, (Level("server", 2, 100.0, 0.5),))
    costs = Costs((stage(), stage()), sizes, sizes, HostCosts(0.1, 0.01))
    events = list(Simulation(pipeline, programs(pipeline, 1), costs, Network(cluster), lambda _: 1))
    arrives, end_s = 1 + 20 / 100 + 0.5, 0.3
    assert list(compute(events, 1)) == [
        ("F0", pytest.approx(arrives + end_s), pytest.approx(arrives + end_s + 1)),
        ("B0", pytest.approx(arrives + end_s + 1), pytest.approx(arrives + end_s + 3)),
        ("U0", pytest.approx(arrives + end_s + 3 + end_s), pytest.approx(arrives + end_s + 3 + end_s)),
    ]
    sends: list[Any] = [
        (event.worker, event.end_s - event.start_s) for event in events if "SEND" in event.instruction.op.name
    ]
    assert sends == [(0, pytest.approx(end_s)), (1, pytest.approx(end_s))]
    last = next(event for event in events if event.instruction.op is Op.RECEIVE_GRADIENT)
    assert last.end_s == pytest.approx(arrives + end_s + 3 + 0.7 + end_s)


def test_inputs_take_a_worker_s_time_if_they_are_not_fetched_ahead() -> None:
    """3 minibatches of load 0.5, forward 1, backward 2; fetched ahead, only the first load is waited for."""
    pipeline = Pipeline((1,), (), "1f1b", True, 1)
    cluster = Cluster("one", "unit", None, (Level("server", 1, 100.0, 0.5),))
    ends = {}
    for fetches in (True, False):
        costs = Costs((stage(1.0, 2.0, 0.0, 0.5),), {}, {}, HostCosts(fetches=fetches))
        simulation = Simulation(pipeline, programs(pipeline, 3), costs, Network(cluster), lambda _: 1)
        *_, last = simulation
        ends[fetches] = last.end_s
    assert ends == {True: pytest.approx(3 * 3.5), False: pytest.approx(0.5 + 3 * 3)}


@pytest.mark.parametrize("early", [0.0, 5.0])
def test_an_all_reduce_takes_processor_time_of_its_members_if_given(early: float) -> None:
    """8 bytes over 2 replicas: each sends 8 at 0.5 s per byte of its own, whoever comes first."""
    pipeline = Pipeline((2,), (), "1f1b", True, 1)
    cluster = Cluster("one", "unit", None, (Level("server", 2, 100.0, 0.5),))
    stages = (stage(1.0, 2.0, early, 0.0, SimulatedBucket(8, 1.0)),)
    costs = Costs(stages, {}, {}, HostCosts(ring_byte_s=0.5))
    events = list(Simulation(pipeline, programs(pipeline, 2), costs, Network(cluster), lambda _: 1))
    waits = [event.end_s for event in events if event.instruction.op is Op.WAIT_ALL_REDUCE]
    link_s = 2 * (8 / 2 / 100 + 0.5)
    assert waits == [pytest.approx(3 + link_s + 4)] * 2


def test_a_scatter_takes_half_of_a_sum_s_processor_time_and_a_message_per_member() -> None:
    """8 bytes over 4 replicas: each sends 6 at 0.5 s per byte, three messages and takes three, 0.1 s each."""
    pipeline = Pipeline((4,), (), "sequential", True, 1, weights="one", sums="ordered", shard="gradients")
    cluster = Cluster("one", "unit", None, (Level("server", 4, 100.0, 0.0),))
    stages = (stage(1.0, 2.0, 0.0, 0.0, SimulatedBucket(8, 1.0)),)
    costs = Costs(stages, {}, {}, HostCosts(message_s=0.1, ring_byte_s=0.5))
    events = list(Simulation(pipeline, programs(pipeline, 4), costs, Network(cluster), lambda _: 1))
    own_s = 6 * 0.5 + 6 * 0.1
    (scattered_s,) = {event.end_s - event.start_s for event in events if event.instruction.op is Op.WAIT_SCATTER}
    assert scattered_s == pytest.approx(8 * 3 / 4 / 100 + own_s)
