"""Messages between processes: changing shapes, large values, skip edges, slow receivers, lost peers, early ends."""

import itertools
from dataclasses import replace

import pytest

from pipebench.cluster import Cluster, Level
from pipebench.distributed.message import HEADER_BYTES
from pipebench.model.graph import trace
from pipebench.model.plan import Plan, make_plan
from pipebench.simulate.timeline import BUFFERS, EVALUATION
from tests.distributed.cases import Case, compare, on_virtual_engine, small_setup, virtually
from tests.distributed.scenarios import _SIZES, huge_setup, rows_setup
from tests.models import SkipNet
from tests.processes import Processes

ACTIVATIONS, GRADIENTS = 2, 4  # tags; what spills has the next one


def test_shapes_that_repeat_travel_in_one_message_each(two: Processes) -> None:
    """24 units of 7 lengths, drained twice: no requests or replies, and layout text for new shapes only."""
    found = two.run("tests.distributed.scenarios:rows", huge=False)
    compare([outcome for outcome, *_ in found], on_virtual_engine(rows_setup(), (7, 12, 5)), 0.0)
    (_, ahead, ahead_words, _), (_, back, back_words, _) = found
    num_evaluations = 3 * 2
    num_lengths = len(set(_SIZES))
    assert ahead[ACTIVATIONS] == 24 + num_evaluations
    assert back[GRADIENTS] == 24
    assert back_words == {GRADIENTS: num_lengths}
    assert ahead_words[ACTIVATIONS] <= num_lengths + 2  # evaluation's want no gradient: layouts of their own
    for spilled in (ahead[ACTIVATIONS + 1], back[GRADIENTS + 1]):
        assert 0 < spilled <= num_lengths


def test_changing_shapes_use_few_slots(two: Processes) -> None:
    """As many as there are values held and in flight; a slot that has grown also takes smaller values."""
    found = two.run("tests.distributed.scenarios:shared_rows")
    compare([outcome for outcome, _ in found], on_virtual_engine(rows_setup(), (7, 12, 5)), 0.0)
    assert max(slots for _, slots in found) <= 3 * len(set(_SIZES))


def test_values_above_64_megabytes_travel_both_ways(two: Processes) -> None:
    """Beyond that size sends have been seen to wait for their receiver; here no buffer is ready for them."""
    found = two.run("tests.distributed.scenarios:rows", huge=True)
    compare([outcome for outcome, *_ in found], on_virtual_engine(huge_setup(), (3,)), 0.0)
    for _, _, _, sizes in found:
        assert max(sizes) > 64 << 20
        assert HEADER_BYTES in sizes  # the header of what comes apart


def skip_plan() -> tuple[Plan, tuple[int, ...]]:
    """Return four stages of which the first feeds all others, and integers cross."""
    graph = trace(SkipNet())
    for starts in itertools.combinations(range(1, len(graph.layers)), 3):
        plan = make_plan(graph, list(starts), [1, 1, 1, 1])
        if {(0, 1), (0, 2), (0, 3)} <= set(plan.crossings):
            return plan, starts
    raise AssertionError("SkipNet has no such cut")


@pytest.mark.parametrize(
    "columns", [{}, {"weights": "one", "microbatches": 3, "order": "all-forwards"}, {"depth": 6}], ids=str
)
def test_values_go_straight_to_every_stage_that_reads_them(four: Processes, columns: dict[str, object]) -> None:
    _, starts = skip_plan()
    case = Case("skip", starts, (1, 1, 1, 1), columns)
    by_sockets = replace(case, shares_memory=False)
    edges = {(edge.source, edge.target): edge.has_gradient for edge in small_setup(case).pipeline.edges}
    assert {(0, 1), (0, 2), (0, 3)} <= set(edges)
    expected = virtually(case)
    for each in (by_sockets,) if columns else (case, by_sockets):
        compare(four.run("tests.distributed.cases:distributed", each), expected, 0.0)


def test_bytes_count_on_the_links_between_devices(four: Processes) -> None:
    """Distributed runs counted them on those between the devices that have the workers' numbers."""
    servers = Cluster("servers", "unit", None, (Level("server", 2, 1e6, 1e-3), Level("cluster", 2, 1e5, 1e-3)))
    case = Case("mlp", (2,), (2, 2), {"cluster": servers}, devices=(0, 2, 1, 3))
    compare(four.run("tests.distributed.cases:distributed", case), virtually(case), 0.0)


def test_values_without_a_gradient_cross_forward_only(three: Processes) -> None:
    """Where nothing but the integers of SkipNet's table crosses an edge, no gradient comes back over it."""
    graph = trace(SkipNet())
    for starts in itertools.combinations(range(1, len(graph.layers)), 2):
        case = Case("skip", starts, (1, 1, 1))
        if not all(edge.has_gradient for edge in small_setup(case).pipeline.edges):
            compare(three.run("tests.distributed.cases:distributed", case), virtually(case), 0.0)
            return
    pytest.fail("no cut of SkipNet has an edge without a gradient")


@pytest.mark.parametrize("shares_memory", [True, False])
def test_an_evaluation_does_not_run_far_ahead_of_a_slow_stage(three: Processes, shares_memory: bool) -> None:
    most = three.run("tests.distributed.scenarios:slow_evaluation", shares_memory)
    assert most[0] <= 4
    assert most[1] == 4  # it would have, if nothing held it
    assert most[2] == 0


@pytest.mark.parametrize("shares_memory", [True, False])
def test_a_segment_holds_no_more_buffers_than_messages_in_flight(two: Processes, shares_memory: bool) -> None:
    """Gloo's sends never complete by themselves: 200 minibatches would keep 200 buffers."""
    case = Case("mlp", (4,), (1, 1), shares_memory=shares_memory)
    found = two.run("tests.distributed.scenarios:buffers_of_a_segment", case, 200)
    assert max(found) <= 8


@pytest.mark.parametrize(
    ("case", "asks", "by_key"),
    [
        (Case("skip", (3, 6), (1, 1, 1), segments=(5, 4000, 3)), 2, False),
        (Case("conv", (4,), (2, 1), segments=(3, 4000, 3)), 1, True),
        (Case("skip", (4,), (1, 2), {"weights": "one", "microbatches": 2}, segments=(4000, 2)), 0, False),
    ],
    ids=["pipedream, one worker asks", "replicated, the store asks", "flush, the first asks"],
)
def test_a_stop_ends_all_workers_at_one_minibatch(three: Processes, case: Case, asks: int, by_key: bool) -> None:
    """And with the weights that the virtual engine has after so many."""
    found = three.run("tests.distributed.scenarios:stopped", case, f"{asks}, {by_key}", 20, asks, by_key)
    done = found[0].done
    assert sum(case.segments[:-2]) < sum(done) < 3000
    assert done[-1] == 0
    whole = on_virtual_engine(small_setup(case), [count for count in done if count > 0])
    whole.done = done
    whole.scores.pop()  # after the stop nothing is evaluated
    for outcome in (*found, whole):  # the segment that was left out drained, too
        kinds = {key: count for key, count in outcome.num_bytes.items() if key[0] not in (EVALUATION, BUFFERS)}
        outcome.num_bytes = kinds
    compare(found, whole, 0.0)


@pytest.mark.parametrize(("shares_memory", "asks"), [(True, 0), (False, 2)])
def test_a_stop_ends_an_evaluation_of_all_workers(three: Processes, shares_memory: bool, asks: int) -> None:
    """At one minibatch, with the bytes of before; nothing is trained afterwards."""
    found = three.run("tests.distributed.scenarios:stopped_in_an_evaluation", shares_memory, asks)
    counts = {evaluated for evaluated, *_ in found}
    assert len(counts) == 1
    assert 1 < counts.pop() < 400
    assert all(same_bytes and trained == 0 for _, same_bytes, trained in found)


@pytest.mark.parametrize("shares_memory", [True, False])
def test_a_killed_worker_is_reported_to_the_others(shares_memory: bool) -> None:
    """The one in the middle: one waits for its gradients, the other for its activations."""
    case = Case("skip", (3, 6), (1, 1, 1), shares_memory=shares_memory)
    with Processes(3) as processes:
        found = processes.run("tests.distributed.scenarios:killed", case, 1, lost=[1])
    for rank in (0, 2):
        assert found[rank].startswith("lost a peer: ")
