"""Stages in a V: torch's orders, the bubbles and the memory of their papers."""

import itertools
import re
from collections.abc import Iterator

import pytest

from pipebench.schedule.operations import Op
from pipebench.schedule.orders import ORDERS
from pipebench.schedule.pipeline import Pipeline, chain
from pipebench.schedule.programs import programs
from pipebench.simulate.drawing import draw_cells
from tests.schedule.torch_schedules import make

TORCH = {"zbv": "ScheduleZBVZeroBubble", "dualpipev": "ScheduleDualPipeV"}
_LETTERS = {Op.FORWARD: "F", Op.BACKWARD: "IW", Op.BACKWARD_INPUT: "I", Op.BACKWARD_WEIGHT: "W"}
_Cell = tuple[int, str, int]


def pipeline_of(order: str, positions: int, microbatches: int, *, width: int = 1) -> Pipeline:
    replicas = (width,) * 2 * positions
    return Pipeline(
        replicas, chain(2 * positions), order, True, positions, microbatches, chunks=2, backward="split"
    )  # fmt: skip


def theirs(actions: list[object]) -> Iterator[_Cell]:
    """Yield the passes of one of torch's ranks; whole backwards as their parts."""
    for stage, letter, number in re.findall(r"(\d+)([FBIW])(\d+)", " ".join(map(str, actions))):
        yield from ((int(stage), part, int(number)) for part in {"B": "IW"}.get(letter, letter))


def ours(pipeline: Pipeline, worker: int) -> Iterator[_Cell]:
    for stage, op, unit in ORDERS[pipeline.order].passes(pipeline, worker, range(pipeline.microbatches)):
        yield from ((stage, letter, unit) for letter in _LETTERS[op])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("order", TORCH)
@pytest.mark.parametrize("positions", range(1, 9))
def test_the_order_equals_torch_s(order: str, positions: int) -> None:
    """At every number of microbatches that torch takes, fewer than stages included where it takes them."""
    compared = 0
    for microbatches in range(1, 4 * positions + 3):
        if order == "dualpipev" and microbatches < 2 * positions:
            with pytest.raises(ValueError, match="at least as many microbatches as stages"):
                make(TORCH[order], positions, 2, microbatches)
            continue
        schedule = make(TORCH[order], positions, 2, microbatches)
        pipeline = pipeline_of(order, positions, microbatches)
        for worker in range(positions):
            assert [*ours(pipeline, worker)] == [*theirs(schedule.pipeline_order[worker])]
            compared += 1
    assert compared >= positions * (2 * positions + 3)


def idle(pipeline: Pipeline, forward: int = 1, inputs: int = 1, weights: int = 1) -> int:
    """Return the units of time of one update that a worker is idle for; a stage's passes take the given ones."""
    n = pipeline.num_stages
    rows = draw_cells(pipeline, 1, [forward] * n, [inputs + weights] * n, weight=[weights] * n)
    (busy,) = {sum(map(bool, row)) for row in rows}
    assert busy == 2 * pipeline.microbatches * (forward + inputs + weights)
    return len(rows[0]) - busy


def most_kept(pipeline: Pipeline) -> list[int]:
    """Return the most units in flight per worker, over both its stages: until their weight part is over."""
    return [
        max(itertools.accumulate((op is Op.FORWARD) - (op is Op.BACKWARD_WEIGHT) for op, *_ in program))
        for program in programs(pipeline, pipeline.block)
    ]


@pytest.mark.parametrize("positions", range(1, 9))
@pytest.mark.parametrize("more", [0, 1, 2, 7])
def test_zbv_has_no_bubble_and_keeps_as_much_as_1f1b(positions: int, more: int) -> None:
    """Qi et al. (NeurIPS'24), table of V-shaped schedules, T_F = T_B = T_W: no bubble, activations of p microbatches.

    Every worker works from its first pass to its last without a wait; as the first unit reaches worker w after w
    passes, an update takes p - 1 of them longer than a worker's passes. A stage in a V is half of one that is alone on
    its worker, so p microbatches are 2p units of half the bytes.
    """
    pipeline = pipeline_of("zbv", positions, 2 * positions - 1 + more)
    assert idle(pipeline) == positions - 1
    n = 2 * positions
    for worker, row in enumerate(draw_cells(pipeline, 1, [1] * n, [2] * n, weight=[1] * n)):
        assert all(row[worker : worker + 6 * pipeline.microbatches])
    assert most_kept(pipeline) == [min(n, pipeline.microbatches * 2)] * positions


TIMES = [(1, 1, 1), (2, 2, 1), (3, 3, 1), (3, 3, 2), (4, 4, 1)]  # as long a forward as the input part of a backward


@pytest.mark.sampled(2)
@pytest.mark.parametrize("positions", range(1, 7))
@pytest.mark.parametrize(("forward", "inputs", "weights"), TIMES)
def test_the_bubble_of_dualpipev(positions: int, forward: int, inputs: int, weights: int) -> None:
    """DeepSeek's table, P = 2p stages: (P/2 - 1) (F&B + B - 3W), where F&B is a pair run as one.

    Run one after the other, a forward's activation leaves before its backward begins, and less is idle:
    (P/2 - 1) (F + I - W). The table counts 2p + 1 units' activations per worker, of stages of one of P workers.
    """
    for more in (0, 1, 5):
        pipeline = pipeline_of("dualpipev", positions, 2 * positions + more)
        assert idle(pipeline, forward, inputs, weights) == (positions - 1) * (forward + inputs - weights)
        assert most_kept(pipeline) == [2 * positions + 1] * positions
        whole = inputs + weights
        for pair in (forward + whole, max(forward, whole) + 1):
            found = idle_in_pairs(pipeline, {"F": forward, "I": inputs, "W": weights, "B": whole}, pair)
            assert found == (positions - 1) * (pair + whole - 3 * weights)


def idle_in_pairs(pipeline: Pipeline, times: dict[str, int], pair: int) -> int:
    """Return the longest idle time of a worker that runs what torch overlaps in `pair` units of time, as one."""
    positions, n = pipeline.num_positions, pipeline.num_stages
    schedule = make(TORCH[pipeline.order], positions, 2, pipeline.microbatches)
    rows = [
        [re.findall(r"(\d+)([FBIW])(\d+)", str(action)) for action in row] for row in schedule.pipeline_order.values()
    ]
    ends: dict[tuple[int, str, int], int] = {}  # of forwards, and of backwards' input parts
    at, now, busy = [0] * positions, [0] * positions, [0] * positions
    while any(at[worker] < len(row) for worker, row in enumerate(rows)):
        for worker, row in enumerate(rows):
            while at[worker] < len(row):
                own = [(int(stage), letter, int(unit)) for stage, letter, unit in row[at[worker]]]
                needed = [(s - 1, "F", u) for s, letter, u in own if letter == "F" and s > 0]
                needed += [(s + 1, "B", u) for s, letter, u in own if letter in "BI" and s < n - 1]
                if not {*needed} <= ends.keys():
                    break
                lasts = pair if len(own) > 1 else times[own[0][1]]
                now[worker] = max([now[worker], *(ends[each] for each in needed)]) + lasts
                busy[worker] += lasts
                ends |= {(s, "F" if letter == "F" else "B", u): now[worker] for s, letter, u in own if letter != "W"}
                at[worker] += 1
    return max(now) - min(busy)


@pytest.mark.parametrize("half", range(1, 5))
@pytest.mark.parametrize("num_minibatches", [1, 2, 3, 5])
def test_dualpipe_is_dualpipev_with_the_other_replica_s_units_on_the_way_up(half: int, num_minibatches: int) -> None:
    """DeepSeek's table: the bubble of DualPipeV, parameters twice, P + 1 activations, on P workers for P stages.

    An odd minibatch leaves one direction without a unit at the end.
    """
    microbatches, n = 2 * half + 1, 2 * half
    one_way = pipeline_of("dualpipev", half, microbatches)
    both = pipeline_of("dualpipe", half, microbatches, width=2)
    assert both.num_workers == n
    for worker in range(n):
        down, up = both.stages_of(worker)
        direction = both.replica_of(worker, down)
        assert (down + up, both.replica_of(worker, up)) == (n - 1, 1 - direction)
        found = ORDERS["dualpipe"].passes(both, worker, range(2 * microbatches))
        for ours, theirs in zip(found, ORDERS["dualpipev"].passes(one_way, down, range(microbatches)), strict=True):
            assert (ours.stage, ours.op, ours.unit // 2) == theirs
            assert ours.unit % 2 == (direction if ours.stage == down else 1 - direction)
    assert most_kept(both) == [n + 1] * n
    draw_cells(both, num_minibatches, [1] * n, [2] * n, weight=[1] * n)
    if num_minibatches == 2:
        rows = draw_cells(both, 2, [2] * n, [3] * n, weight=[1] * n)
        assert len(rows[0]) - 2 * microbatches * 5 == (half - 1) * (2 + 2 - 1)
