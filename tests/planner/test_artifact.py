"""The `artifact` cost model against the published optimizer, which `tests/oracles/artifact.py` implements again."""

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipebench.cluster import Level
from pipebench.planner.cost_models import COST_MODELS, UnitWork
from pipebench.planner.flat import FlatProblem, bottleneck_s, plan_flat
from pipebench.planner.hierarchical import HierarchicalProblem, plan_hierarchical
from pipebench.planner.state_graph import antichains
from pipebench.profile.model import LayerProfile
from tests.oracles.artifact import Machines, Optimizer
from tests.planner.problems import as_set

Rows = tuple[LayerProfile, ...]
ARTIFACT = COST_MODELS["artifact"]


def graph(reads: Sequence[Sequence[int]], seed: int, *, kinds: dict[int, str] | None = None) -> Rows:
    """Return layers with these reads and random costs, and a loss that reads the values without another reader."""
    numbers = random.Random(seed)
    rows = [
        LayerProfile(
            name=f"layer{index}",
            kind=(kinds or {}).get(index, "Linear"),
            forward_s=numbers.choice([0.0, numbers.random() * 1e-2]),
            backward_s=numbers.random() * 2e-2,
            output_bytes=numbers.randrange(10 ** numbers.randrange(1, 9)),
            gradient_bytes=0,
            reads=tuple(own),
            parameter_sizes={f"own{index}": numbers.randrange(10**7)} if numbers.random() < 0.5 else {},
        )
        for index, own in enumerate(reads)
    ]
    last = sorted({*range(len(rows))} - {index for own in reads for index in own})
    return (*rows, LayerProfile("loss", "loss", 0.0, 0.0, 0, 0, tuple(last)))


def residual(blocks: int, length: int) -> list[list[int]]:
    """Return blocks whose sum reads the end of a branch and what came before the block."""
    reads: list[list[int]] = [[]]
    for _ in range(blocks):
        before = len(reads) - 1
        reads += [[len(reads) - 1 + index] for index in range(length)]
        reads.append([before, len(reads) - 1])
    return reads


def inception(modules: int, lengths: Sequence[int]) -> list[list[int]]:
    """Return modules of branches that are concatenated."""
    reads: list[list[int]] = [[]]
    for _ in range(modules):
        before, ends = len(reads) - 1, []
        for length in lengths:
            for index in range(length):
                reads.append([len(reads) - 1 if index else before])
            ends.append(len(reads) - 1)
        reads.append(ends)
    return reads


ALEXNET: list[list[int]] = [[], *([index] for index in range(7)), [7], [7, 8], *([index] for index in range(9, 14))]
LONG_SKIPS: list[list[int]] = [[], [0], [1], [2, 0], [3], [4, 1], [5, 0], [6], [7, 2], [8, 0]]
SOURCES: list[list[int]] = [[], [0], [], [1, 2], [3], [], [4, 5], [6], [7, 2]]
OUTPUTS: list[list[int]] = [[], [0], [1], [1], [2], [3], [0], [4, 5], [7]]
DIAMONDS: list[list[int]] = [[], [0], [1], [1], [2, 3], [0], [5], [5], [6, 7], [4, 8], [9, 0]]
DENSE = [list(range(max(0, index - 4), index)) for index in range(9)]
ITEMS: list[list[int]] = [[], [0], [0], [1], [3, 2], [4], [5, 2]]
SHAPES = {
    "resnet": residual(4, 2),
    "resnet with one layer in a branch": residual(5, 1),
    "inception": inception(2, (1, 2, 1)),
    "inception of unequal branches": inception(2, (1, 3)),
    "alexnet": ALEXNET,
    "long skips": LONG_SKIPS,
    "several sources": SOURCES,
    "several outputs": OUTPUTS,
    "a diamond in a diamond": DIAMONDS,
    "densely connected": DENSE,
}


def _check_flat(rows: Rows, num_workers: int, bandwidth: float) -> None:
    """Assert the optimizer's bottleneck, and a plan that costs so much by its own rule, on the fewest workers."""
    optimizer = Optimizer(rows)
    found = optimizer.best([Machines(num_workers, bandwidth)], fewer=True)
    work = UnitWork(antichains(rows))
    assert {as_set(each) for each in work.states.members[1:]} == set(map(optimizer.members, optimizer.states))
    problem = FlatProblem(work, ARTIFACT, Level("level", num_workers, bandwidth, 0.0), num_workers)
    plan = plan_flat(problem)
    assert plan is not None
    assert bottleneck_s(problem, plan) == pytest.approx(found.seconds, rel=1e-9)
    members = [as_set(each) for each in work.states.members]
    stages = [(members[stage.stop] - members[stage.start], stage.replicas) for stage in plan]
    assert optimizer.plan_s(stages, Machines(num_workers, bandwidth)) == pytest.approx(found.seconds, rel=1e-9)
    replicas = [stage.replicas for stage in plan]
    assert sum(replicas) <= sum(found.machines)
    fewest = next(
        count
        for count in range(1, num_workers + 1)
        if optimizer.best([Machines(count, bandwidth)], fewer=True).seconds <= found.seconds * (1 + 1e-9)
    )
    assert sum(replicas) == fewest


def _check_nested(rows: Rows, counts: Sequence[int], bandwidths: Sequence[float]) -> None:
    links = list(zip(counts, bandwidths, strict=True))
    optimizer = Optimizer(rows)
    found = optimizer.best([Machines(*each) for each in links], fewer=True)
    levels = tuple(Level("level", count, bandwidth, 0.0) for count, bandwidth in links)
    plan = plan_hierarchical(HierarchicalProblem(UnitWork(antichains(rows)), ARTIFACT, levels))
    assert plan is not None
    assert plan.bottleneck_s == pytest.approx(found.seconds, rel=1e-9)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("bandwidth", [1e7, 1e9, 1e10])
@pytest.mark.parametrize("reads", SHAPES.values(), ids=SHAPES)
def test_flat_plans_are_the_optimizers(reads: list[list[int]], bandwidth: float) -> None:
    for seed, num_workers in itertools.product(range(3), (4, 7)):
        _check_flat(graph(reads, seed), num_workers, bandwidth)


@pytest.mark.parametrize("bandwidths", [(1e10, 1e9), (1e9, 1e7), (1e8, 1e10)])
@pytest.mark.parametrize("reads", SHAPES.values(), ids=SHAPES)
def test_plans_on_two_levels_are_the_optimizers(reads: list[list[int]], bandwidths: tuple[float, float]) -> None:
    for seed, counts in enumerate([(2, 2), (3, 2), (2, 4)]):
        _check_nested(graph(reads, seed), counts, bandwidths)


def test_plans_on_three_levels_are_the_optimizers() -> None:
    for seed in range(3):
        _check_nested(graph(residual(3, 1), seed), (2, 2, 2), (1e10, 1e9, 1e8))


@pytest.mark.parametrize("reads", SHAPES.values(), ids=SHAPES)
def test_the_optimizer_is_only_faster_by_splits_that_no_plan_has(reads: list[list[int]]) -> None:
    """Inside a component it also splits between states of which neither holds the other; so docs/planner.md says."""
    optimizer = Optimizer(graph(reads, 2))
    levels = [Machines(2, 1e10), Machines(2, 1e9)]
    members = list(map(optimizer.members, optimizer.states))
    if all(a < b for a, b in itertools.pairwise(members)):
        assert optimizer.best(levels, fewer=True, literal=True).seconds >= optimizer.best(levels, fewer=True).seconds
    # On one level there is no difference.
    assert optimizer.best(levels[:1], fewer=True, literal=True) == optimizer.best(levels[:1], fewer=True)


def test_a_value_with_readers_in_two_branches_counts_although_no_later_stage_reads_it() -> None:
    """Layer 0 is read by 1 and 2, both before the cut behind them; only their own outputs cross it."""
    rows = graph([[], [0], [0], [1, 2]], 0)
    states = antichains(rows)
    behind_both = [as_set(each) for each in states.members].index(frozenset({0, 1, 2}))
    assert states.antichain_bytes[behind_both] == sum(row.output_bytes for row in rows[:3])
    assert states.sent_bytes[behind_both] == sum(row.output_bytes for row in rows[1:3])


def test_a_value_that_skips_a_layer_is_paid_for() -> None:
    """0.1.0: only the output of the last layer was, so that AlexNet was cut behind a `Size(0)` of 4 bytes."""
    work = UnitWork(antichains(graph(ALEXNET, 0)))
    behind_size = [as_set(each) for each in work.states.members].index(frozenset(range(9)))
    assert work.states.antichain_bytes[behind_size] == sum(work.states.rows[index].output_bytes for index in (7, 8))


def test_stand_ins_for_inputs_and_unread_items_cost_nothing() -> None:
    rows = graph(ITEMS, 1, kinds={1: "__getitem__(0)", 2: "__getitem__(1)"})
    unread = LayerProfile("item", "__getitem__(2)", 1.0, 1.0, 10**9, 0, (0,))
    _check_flat((*rows[:-1], unread, rows[-1]), 4, 1e9)


@st.composite
def random_reads(draw: Any) -> list[list[int]]:
    """Draw edges: a layer reads up to three layers before it, most often the last one."""
    reads: list[list[int]] = [[]]
    for index in range(1, draw(st.integers(2, 9))):
        own = set(draw(st.lists(st.integers(0, index - 1), max_size=3)))
        reads.append(sorted(own | ({index - 1} if draw(st.booleans()) else {draw(st.integers(0, index - 1))})))
    return reads


@settings(max_examples=60, deadline=None)
@given(reads=random_reads(), seed=st.integers(0, 10**6), num_workers=st.integers(1, 5), power=st.floats(6, 11))
def test_flat_plans_of_random_graphs(reads: list[list[int]], seed: int, num_workers: int, power: float) -> None:
    _check_flat(graph(reads, seed), num_workers, 10**power)


@settings(max_examples=30, deadline=None)
@given(reads=random_reads(), seed=st.integers(0, 10**6), power=st.floats(6, 11), below=st.floats(-2, 2))
def test_plans_on_two_levels_of_random_graphs(reads: list[list[int]], seed: int, power: float, below: float) -> None:
    counts = ((2, 2), (2, 3), (3, 2))[seed % 3]
    _check_nested(graph(reads, seed), counts, (10 ** (power + below), 10**power))
