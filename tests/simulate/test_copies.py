"""Copies to hosts and back: closed formulas, recurrences, and the bandwidth that messages leave copies."""

import heapq
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipebench.cluster import Cluster, Level
from pipebench.schedule.instructions import COPIES, Instruction
from pipebench.schedule.operations import Op
from pipebench.schedule.pipeline import Edge, Pipeline, chain
from pipebench.schedule.programs import programs
from pipebench.simulate.costs import Costs, Crossing, HostCosts, SharedProcessors, SimulatedBucket, StageCosts
from pipebench.simulate.crowded import Crowded
from pipebench.simulate.meter import Meter, fractions, pcie_fractions
from pipebench.simulate.network import Network
from pipebench.simulate.simulation import Simulation, TimelineEvent
from pipebench.simulate.steady import simulate_all, simulate_segment
from pipebench.simulate.timeline import Transfer
from tests.instruction_text import render
from tests.oracles.copies import Seconds, play
from tests.support import Blobs, Mlp, make_setup

LANE = 10.0  # bytes per second


def cluster_of(num_workers: int, bandwidth: float = 1e18, **more: Any) -> Cluster:
    level = Level("server", num_workers, bandwidth, 0.0, **more)
    return Cluster("hosts", "unit", None, (level,), pcie_bytes_per_s=LANE)


def costs_of(pipeline: Pipeline, stages: Sequence[StageCosts], num_bytes: int = 0) -> Costs:
    sizes: Crossing = {(edge.source, edge.target): {1: num_bytes} for edge in pipeline.edges}
    return Costs(tuple(stages), sizes, sizes)


def simulated(
    pipeline: Pipeline, count: int, costs: Costs, cluster: Cluster, in_words: list[Transfer] | None = None
) -> list[TimelineEvent]:
    network = Network(cluster, observe=None if in_words is None else in_words.append, copies=bool(pipeline.swaps))
    return list(Simulation(pipeline, programs(pipeline, count), costs, network, lambda unit: 1))


def stage(forward: float, backward: float, swapped: int = 0, *buckets: SimulatedBucket) -> StageCosts:
    return StageCosts({1: forward}, {1: backward}, {1: backward / 4}, {1: 0.0}, 0.0, buckets, swap_bytes={1: swapped})


def times_of(events: Sequence[TimelineEvent]) -> dict[str, tuple[float, float]]:
    wanted = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, *COPIES)
    found = [(Instruction(*e.instruction[:3]), e) for e in events if e.instruction.op in wanted]
    assert len({it for it, _ in found}) == len(found)
    return {str(it): (event.start_s, event.end_s) for it, event in found}


# Equation 2: what swapping adds to a unit is what its two copies take beyond the time between its passes.


@pytest.mark.parametrize(("swapped", "added_s"), [(0, 0.0), (20, 0.0), (35, 0.0), (36, 0.2), (60, 5.0)])
def test_equation_2_with_one_unit_in_the_pipeline(swapped: int, added_s: float) -> None:
    """Between the first stage's passes lie 7 s of the second's; two copies of `swapped` bytes at 10 bytes/s."""
    pipeline = Pipeline((1, 1), chain(2), "1f1b", True, 1, weights="one", swaps=(0,))
    costs = costs_of(pipeline, [stage(1.0, 2.0, swapped), stage(3.0, 4.0)])
    events = simulated(pipeline, 5, costs, cluster_of(2))
    assert max(event.end_s for event in events) == pytest.approx(5 * (10.0 + added_s), rel=1e-12)
    assert added_s == pytest.approx(max(0.0, 2 * swapped / LANE - 7.0), rel=1e-12)
    assert sum(event.stall_s for event in events if event.instruction.op is Op.SWAP_IN) == pytest.approx(5 * added_s)


@pytest.mark.parametrize("swapped", [0, 10, 29, 30, 31, 45, 90])
@pytest.mark.parametrize("depth", [3, 4, 6])
def test_in_the_steady_state_copies_of_both_directions_overlap(depth: int, swapped: int) -> None:
    """Both directions at once, and units overlap: a unit adds what one copy takes beyond a forward and a backward."""
    pipeline = Pipeline((1,) * depth, chain(depth), "1f1b", False, depth, swaps=(0,))
    costs = costs_of(pipeline, [stage(1.0, 2.0, swapped)] + [stage(1.0, 2.0)] * (depth - 1))
    events = simulated(pipeline, 60, costs, cluster_of(depth))
    ends = [event.end_s for event in events if event.worker == 0 and event.instruction.op is Op.BACKWARD]
    assert (ends[50] - ends[20]) / 30 == pytest.approx(3.0 + max(0.0, swapped / LANE - 3.0), rel=1e-9)


@pytest.mark.parametrize("order", ["1f1b", "all-forwards"])
def test_copies_that_fit_cost_nothing_to_the_bit(order: str) -> None:
    """The first stage's: its last unit waits for its gradient, so that even the last copy has its time."""
    plain = Pipeline((1, 1, 1), chain(3), order, True, 3, 6, weights="one")
    costs = costs_of(plain, [stage(1.0, 2.0, 10), stage(1.0, 2.0), stage(1.0, 2.0)])
    free = simulated(plain, 3, costs, cluster_of(3))
    swapping = simulated(replace(plain, swaps=(0,)), 3, costs, cluster_of(3))
    assert [event for event in swapping if event.instruction.op not in COPIES] == free
    assert all(event.stall_s == 0 for event in swapping if event.instruction.op in COPIES)


@st.composite
def swapping_pipelines(draw: st.DrawFn) -> Pipeline:
    n = draw(st.integers(1, 4))
    order = draw(st.sampled_from(["1f1b", "all-forwards", "zero-bubble", "interleaved"]))
    chunks = 2 if order == "interleaved" else 1
    n *= chunks
    flushes = order != "1f1b" or draw(st.booleans())
    skips = [Edge(a, b) for a in range(n) for b in range(a + 2, n) if chunks == 1 and draw(st.booleans())]
    swaps = draw(st.sets(st.integers(0, n - 1), min_size=1))
    return Pipeline(
        (1,) * n, tuple(sorted([*chain(n), *skips], key=lambda e: (e.source, e.target))), order, flushes,
        draw(st.integers(1, 5)), draw(st.integers(1, 4)) if flushes else 1, chunks=chunks, weights="one",
        backward="split" if order == "zero-bubble" else "whole", swaps=tuple(sorted(swaps)),
    )  # fmt: skip


@settings(deadline=None, max_examples=40)
@given(swapping_pipelines(), st.integers(1, 7), st.integers(0, 10**6))
def test_times_equal_the_recurrences(pipeline: Pipeline, count: int, seed: int) -> None:
    chosen = random.Random(seed)
    stages = [
        stage(chosen.randint(1, 3), 4 * chosen.randint(1, 2), LANE * chosen.randint(0, 6))  # type: ignore[arg-type]
        for _ in range(pipeline.num_stages)
    ]
    if pipeline.chunks > 1:  # values of a worker's own stages don't travel, and nothing printed tells of them
        pipeline = replace(pipeline, edges=chain(pipeline.num_stages))
    seconds = [
        Seconds(
            {"F": each.forward_s[1], "B": each.backward_s[1], "BW": each.weight_s[1],
             "BI": each.backward_s[1] - each.weight_s[1]},
            each.swap_bytes[1] / LANE,
        )
        for each in stages
    ]  # fmt: skip
    if pipeline.num_positions == 1 and pipeline.chunks > 1:
        return
    events = simulated(pipeline, count, costs_of(pipeline, stages), cluster_of(pipeline.num_workers))
    expected = play([render(program) for program in programs(pipeline, count)], seconds)
    found = times_of(events)
    assert found.keys() == expected.times_s.keys()
    for name, times in found.items():
        assert times == pytest.approx(expected.times_s[name], abs=1e-9), name
    assert sum(e.stall_s for e in events if e.instruction.op is Op.SWAP_IN) == pytest.approx(expected.waited_s)
    assert all(e.stall_s == 0 for e in events if e.instruction.op in (Op.SWAP_OUT, Op.BACKWARD, Op.BACKWARD_INPUT))


@settings(deadline=None, max_examples=30)
@given(swapping_pipelines(), st.integers(1, 6))
def test_events_come_in_an_executable_order(pipeline: Pipeline, count: int) -> None:
    stages = [stage(1.0, 2.0, 25)] * pipeline.num_stages
    events = simulated(pipeline, count, costs_of(pipeline, stages, 3), cluster_of(pipeline.num_workers, 7.0))
    place = {(e.instruction.op, e.instruction.stage, e.instruction.number): at for at, e in enumerate(events)}
    for (op, stage_index, unit), at in place.items():
        if op is Op.SWAP_IN:
            assert place[Op.FORWARD, stage_index, unit] < place[Op.SWAP_OUT, stage_index, unit] < at
            begins = [place.get((each, stage_index, unit)) for each in (Op.BACKWARD, Op.BACKWARD_INPUT)]
            assert all(at < begin for begin in begins if begin is not None)


def test_workers_that_share_cores_wait_for_their_copies_as_well() -> None:
    """With enough cores, it equals the plain simulation; a receive or an update of the unit's number doesn't wait."""
    pipeline = Pipeline((1, 1), chain(2), "1f1b", False, 2, swaps=(0, 1))
    costs = costs_of(pipeline, [stage(1.0, 2.0, 70), stage(1.0, 2.0, 40)])
    plain = times_of(simulated(pipeline, 8, costs, cluster_of(2)))
    crowded = replace(costs, host=HostCosts(shared=SharedProcessors(2.0)))
    network = Network(cluster_of(2), copies=True)
    found = times_of(list(Crowded(pipeline, programs(pipeline, 8), crowded, network, lambda unit: 1)))
    assert found == {name: pytest.approx(times) for name, times in plain.items()}


def test_backwards_that_have_waited_for_their_copies_share_cores() -> None:
    """Two replicas on one core: forwards until 2 s, copies out and in until 6 s, backwards and their sum until 10 s."""
    pipeline = Pipeline((2,), chain(1), "1f1b", True, 1, swaps=(0,))
    costs = costs_of(pipeline, [stage(1.0, 2.0, 20, SimulatedBucket(8, 0.5))])
    crowded = replace(costs, host=HostCosts(shared=SharedProcessors(1.0)))
    network = Network(cluster_of(2), copies=True)
    events = list(Crowded(pipeline, programs(pipeline, 2), crowded, network, lambda unit: 1))
    ends = {op: [event.end_s for event in events if event.instruction.op is op] for op in Op}
    assert ends[Op.FORWARD] == [2.0, 2.0]
    assert ends[Op.SWAP_IN] == [6.0, 6.0]
    assert ends[Op.BACKWARD] == ends[Op.WAIT_ALL_REDUCE] == [10.0, 10.0]


# Messages have the lane first.


def copy_beside(network: Network, copies: Sequence[tuple[float, int, bool]]) -> list[float]:
    """Let worker 0 make copies (start, bytes, whether out); return when they end."""
    ends: list[float] = [0.0] * len(copies)
    for index, (start_s, num_bytes, out) in enumerate(copies):
        done = partial(ends.__setitem__, index)
        network.agenda.push(start_s, partial(_copy, network, num_bytes, done, out))
    return ends


def _copy(network: Network, num_bytes: int, done: Any, out: bool, now_s: float) -> None:
    network.copy(0, num_bytes, now_s, done, out=out)


def test_a_copy_gets_the_bandwidth_that_messages_leave() -> None:
    """100 bytes out: 5 s beside a message of 4 bytes/s at 6, the other 70 at 10. Back there is no message: 10 s."""
    network = Network(cluster_of(2, 4.0), copies=True)
    message = network.send(network.connection("activation", 0, 1), 20, 0.0)
    ends = copy_beside(network, [(0.0, 100, True), (0.0, 100, False)])
    network.agenda.play()
    assert (message.end_s, ends) == (5.0, [12.0, 10.0])


def test_a_message_that_fills_the_lane_lets_a_copy_wait() -> None:
    network = Network(cluster_of(2, 25.0), copies=True)
    messages: list[Any] = []

    network.agenda.push(2.0, partial(send, network, (0, 1), 75, messages))
    ends = copy_beside(network, [(0.0, 50, True)])
    network.agenda.play()
    assert messages[0].end_s == 5.0
    assert ends == [8.0]


def test_messages_over_nvlink_do_not_use_the_lane() -> None:
    network = Network(cluster_of(2, 4.0, over_pcie=False), copies=True)
    network.send(network.connection("activation", 0, 1), 20, 0.0)
    ends = copy_beside(network, [(0.0, 100, True)])
    network.agenda.play()
    assert ends == [10.0]


def test_a_ring_takes_its_part_of_every_members_lanes() -> None:
    """Two workers sum 40 bytes at 4 bytes/s: each sends 40 and receives 40 in 10 s."""
    network, done = Network(cluster_of(2, 4.0), copies=True), list[float]()
    network.sum_up(network.group("all-reduce", "all-reduce", (0, 1)), "R0", 40, 0.0, done.append)
    ends = copy_beside(network, [(0.0, 100, True), (0.0, 30, False)])
    network.agenda.play()
    assert (done, ends) == ([10.0], [14.0, 5.0])


def test_a_message_from_host_to_host_takes_the_lane_while_it_is_copied() -> None:
    """30 bytes to the host at 6 bytes/s, then on the wire for 15 s: a copy has 4 bytes/s for 5 s, then all."""
    network = Network(cluster_of(2, 2.0, host_copy_bytes_per_s=6.0), copies=True)
    message = network.send(network.connection("activation", 0, 1), 30, 0.0)
    ends = copy_beside(network, [(0.0, 60, True)])
    network.agenda.play()
    assert (message.end_s, ends) == (20.0, [9.0])


def send(network: Network, ends: tuple[int, int], num_bytes: int, found: list[Any], now_s: float) -> None:
    found.append(network.send(network.connection("activation", *ends), num_bytes, now_s))


@pytest.mark.parametrize("seed", range(40))
def test_no_message_is_later_for_any_copy_and_no_copy_idles(seed: int) -> None:
    """Against steps of time: at every moment a copy has what the messages of its lane leave."""
    chosen = random.Random(seed)
    messages = [
        (chosen.randint(0, 8), chosen.randint(1, 40), chosen.choice([(0, 1), (1, 0), (0, 2), (2, 0), (1, 2)]))
        for _ in range(chosen.randint(1, 6))
    ]
    copies = [(2.0 * index, chosen.randint(1, 120), out) for index, out in enumerate((True, False))]
    alone, beside = (Network(cluster_of(3, 7.0), copies=copying) for copying in (False, True))
    sent: list[list[Any]] = [[], []]
    for network, found in zip((alone, beside), sent, strict=True):
        for start_s, num_bytes, ends in messages:
            network.agenda.push(start_s, partial(send, network, ends, num_bytes, found))
    ended_s = copy_beside(beside, copies)
    rates: list[tuple[float, float, float]] = []  # from when, of worker 0's messages out and in
    for network in (alone, beside):
        while network.agenda.heap:
            now_s, _, _, _, action = heapq.heappop(network.agenda.heap)
            action(now_s)  # type: ignore[operator]
            if network is beside:
                under_way = [m for m in sent[1] if m.start_s <= now_s < m.end_s]
                out = sum(m.rate for m in under_way if m.connection.ends[0] == 0)
                back = sum(m.rate for m in under_way if m.connection.ends[1] == 0)
                rates.append((now_s, out, back))
    assert [m.end_s for m in sent[1]] == [m.end_s for m in sent[0]]
    # What was under way between two moments is what stood there at the first, once all of that moment has happened.
    for (asked_s, num_bytes, out), end_s in zip(copies, ended_s, strict=True):
        moments = sorted({asked_s, end_s, *(m.start_s for m in sent[0]), *(m.end_s for m in sent[0])})
        moved = 0.0
        for a, b in itertools.pairwise(moments):
            if asked_s <= a and b <= end_s:
                at = [each for each in rates if each[0] <= a][-1]
                moved += max(0.0, LANE - at[1 if out else 2]) * (b - a)
        assert moved == pytest.approx(num_bytes, rel=1e-9)


# Long segments, and their reported fractions.


def workload_of(plan: tuple[list[int], list[int]], swaps: tuple[int, ...], swapped: int, **columns: Any) -> Any:
    setup = make_setup(Mlp(), plan, dataset=Blobs(num_train=40 * 12 + 3, num_eval=4), **columns)
    level = Level("server", setup.pipeline.num_workers, 400.0, 1e-3)
    stages = tuple(
        replace(each, swap_bytes={size: swapped * (size > 0) for size in range(5)}) for each in setup.costs.stages
    )
    return replace(
        setup,
        pipeline=replace(setup.pipeline, swaps=swaps),
        costs=replace(setup.costs, stages=stages),
        cluster=Cluster("hosts", "unit", None, (level,), pcie_bytes_per_s=450.0),
    )


@pytest.mark.parametrize("swapped", [300, 3000])
@pytest.mark.parametrize(
    ("plan", "columns"),
    [
        (([2, 4, 6], [1] * 4), {"weights": "stash"}),
        (([4], [3, 1]), {"weights": "stash"}),
        (([2, 4, 6], [1] * 4), {"weights": "one", "microbatches": 2, "order": "all-forwards"}),
        (([2, 4, 6], [1] * 4), {"weights": "one", "microbatches": 2, "order": "interleaved", "chunks": 2}),
    ],
    ids=str,
)
def test_extrapolation_is_exact_beside_copies(plan: Any, columns: dict[str, Any], swapped: int) -> None:
    workload = workload_of(plan, (0, 1), swapped, **columns)
    count = workload.sampler.minibatches_per_epoch
    meters = [Meter(workload.pipeline), Meter(workload.pipeline)]
    whole, short = simulate_all(workload, count, meters[0]), simulate_segment(workload, count, meters[1])
    spans = [len(meter.timeline().spans) for meter in meters]
    assert spans[1] < 0.7 * spans[0], "nothing was extrapolated, so this would test nothing"
    assert short.end_s == pytest.approx(whole.end_s, rel=1e-9)
    for name in ("busy_s", "stall_s", "swap_stall_s"):
        assert getattr(short, name) == pytest.approx(getattr(whole, name), rel=1e-6, abs=1e-6)
    assert short.num_bytes == whole.num_bytes
    units = count * workload.pipeline.microbatches
    assert whole.num_bytes["swap-out", "pcie"] == whole.num_bytes["swap-in", "pcie"] == 2 * units * swapped
    assert meters[0].swap_stall_s == pytest.approx(whole.swap_stall_s)
    assert swapped == 300 or whole.swap_stall_s > 0


def test_parts_of_the_workers_time_add_up() -> None:
    workload = workload_of(([2, 4, 6], [1] * 4), (0, 1), 3000, weights="stash", recompute=[4, 5])
    meter = Meter(workload.pipeline)
    totals = simulate_all(workload, 24, meter)
    # Stage 2's two forwards of 1 s each, again for every minibatch.
    assert totals.again_s == meter.again_s == pytest.approx(2.0 * 24)
    shares = fractions(
        totals.busy_s, totals.stall_s, 4, totals.end_s, again_s=totals.again_s, swap_stall_s=totals.swap_stall_s
    )
    assert shares["effective_fraction"] + shares["recompute_fraction"] + shares["bubble_fraction"] == pytest.approx(1)
    assert shares["recompute_fraction"] == pytest.approx(48.0 / (4 * totals.end_s))
    assert 0 < shares["swap_stall_fraction"] < shares["bubble_fraction"]


def test_the_used_fraction_of_pcie() -> None:
    """Of 4 devices, 10 bytes/s each way, in 100 s: messages over PCIe count both ways, each copy one."""
    levels = (Level("server", 2, 1.0, 0.0, over_pcie=False), Level("cluster", 2, 1.0, 0.0))
    cluster = Cluster("two", "unit", None, levels, pcie_bytes_per_s=LANE)
    num_bytes = {
        ("activation", "server"): 999, ("activation", "cluster"): 300, ("gradient", "cluster"): 100,
        ("evaluation", "cluster"): 999, ("swap-out", "pcie"): 1600, ("swap-in", "pcie"): 1200,
    }  # fmt: skip
    assert pcie_fractions(cluster, num_bytes, 4, 100.0) == {"pcie_out_fraction": 0.5, "pcie_in_fraction": 0.4}
    assert pcie_fractions(replace(cluster, pcie_bytes_per_s=None), num_bytes, 4, 100.0) == {}


def test_a_timeline_has_copies_as_transfers_and_not_as_spans() -> None:
    pipeline = Pipeline((1, 1), chain(2), "1f1b", False, 2, swaps=(0,))
    in_words: list[Transfer] = []
    events = simulated(pipeline, 2, costs_of(pipeline, [stage(1.0, 2.0, 5), stage(1.0, 2.0)]), cluster_of(2), in_words)
    copies = [
        (each.kind, each.label, each.senders, each.level, each.start_s, each.end_s)
        for each in in_words
        if each.level == "pcie"
    ]
    assert copies[:2] == [("swap-out", "0", (0,), "pcie", 1.0, 1.5), ("swap-out", "1", (0,), "pcie", 2.0, 2.5)]
    assert [each[1] for each in copies[2:]] == ["B0", "B1"]
    meter = Meter(pipeline)
    for event in events:
        meter.event(event)
    assert {span.kind for span in meter.timeline().spans} == {"forward", "backward", "wait"}
