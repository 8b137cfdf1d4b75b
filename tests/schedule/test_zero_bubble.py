"""ZB-H1: the bubble of its paper's formula, the memory of 1F1B, and its order for groups of any length."""

import itertools

import pytest

from pipebench.schedule.operations import Op
from pipebench.schedule.pipeline import Pipeline, chain, noam
from pipebench.schedule.programs import most_in_flight, programs
from pipebench.simulate.drawing import draw_cells
from tests.instruction_text import render

# Figure 2 of the paper: four workers, eight microbatches, every forward and every part of a backward one unit long.
PICTURE = """\
F0 F1 F2 F3 .  .  .  I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7
.  F0 F1 F2 .  .  I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 F6 I4 W3 F7 I5 W4 I6 W5 I7 W6 W7
.  .  F0 F1 .  I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 F6 I5 W3 F7 I6 W4 I7 W5 W6 W7
.  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4 W5 W6 W7"""


def pipeline_of(num_stages: int, microbatches: int, order: str = "zero-bubble", backward: str = "split") -> Pipeline:
    return Pipeline(
        (1,) * num_stages, chain(num_stages), order, True, num_stages, microbatches, backward=backward
    )  # fmt: skip


def bubble(pipeline: Pipeline, forward: int, inputs: int, weights: int) -> int:
    """Return the units of time of one update that a worker is idle for."""
    n = pipeline.num_stages
    rows = draw_cells(pipeline, 1, [forward] * n, [inputs + weights] * n, weight=[weights] * n)
    return len(rows[0]) - pipeline.microbatches * (forward + inputs + weights)


def test_the_picture_equals_the_paper_s() -> None:
    rows = draw_cells(pipeline_of(4, 8), 1, [1] * 4, [2] * 4)
    assert [[cell or "." for cell in row] for row in rows] == [line.split() for line in PICTURE.splitlines()]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("num_stages", range(1, 8))
@pytest.mark.parametrize("more", [0, 1, 2, 5, 9])
def test_the_bubble_equals_the_paper_s(num_stages: int, more: int) -> None:
    """Section 2.3, table 1: (p - 1) (T_F + T_B - T_W), in 1F1B (p - 1) (T_F + T_B + T_W), for m >= p."""
    for forward, inputs, weights in itertools.product(range(1, 5), repeat=3):
        if weights > min(forward, inputs):
            continue
        expected = (num_stages - 1) * (forward + inputs - weights)
        assert bubble(pipeline_of(num_stages, num_stages + more), forward, inputs, weights) == expected
        usual = (num_stages - 1) * (forward + inputs + weights)
        whole = pipeline_of(num_stages, num_stages + more, "1f1b", "whole")
        assert bubble(whole, forward, inputs, weights) == usual


@pytest.mark.parametrize("num_stages", range(2, 7))
def test_fewer_microbatches_than_stages_have_fewer_weight_parts_to_fill_with(num_stages: int) -> None:
    for microbatches in range(1, num_stages):
        expected = (num_stages - 1) * (3 + 2) - (microbatches - 1) * 2
        assert bubble(pipeline_of(num_stages, microbatches), 3, 2, 2) == expected


def test_a_weight_part_longer_than_a_forward_is_never_worse_than_1f1b() -> None:
    for times in itertools.product(range(1, 5), repeat=3):
        assert bubble(pipeline_of(4, 8), *times) <= bubble(pipeline_of(4, 8, "1f1b", "whole"), *times)


@pytest.mark.parametrize(("num_stages", "microbatches"), [(1, 4), (2, 2), (4, 2), (4, 8), (6, 9)])
def test_no_stage_has_more_in_flight_than_the_first_has_in_1f1b(num_stages: int, microbatches: int) -> None:
    """A unit counts until its weight part is done; the paper's p M_B."""
    first = most_in_flight(pipeline_of(num_stages, microbatches, "1f1b", "whole"))[0]
    assert first == min(num_stages, microbatches)
    assert most_in_flight(pipeline_of(num_stages, microbatches)) == (first,) * num_stages


@pytest.mark.parametrize("replicas", [(1, 1, 1), (2, 1), (2, 2), (1, 3), (3, 1, 1, 1)])
@pytest.mark.parametrize("num_minibatches", [1, 2, 3, 5, 7, 13])
def test_forwards_and_input_parts_are_in_1f1b_s_order(replicas: tuple[int, ...], num_minibatches: int) -> None:
    """Short groups, replicas, several minibatches per update: only weight parts move, and none past its update."""
    n = len(replicas)
    zero, usual = (
        Pipeline(replicas, chain(n), order, True, noam(replicas), 2, 2, backward="split")
        for order in ("zero-bubble", "1f1b")
    )
    for ours, theirs in zip(programs(zero, num_minibatches), programs(usual, num_minibatches), strict=True):
        mine, others = list(ours), list(theirs)
        assert [i for i in mine if i.op is not Op.BACKWARD_WEIGHT and i.reduce < 0] == [
            i for i in others if i.op is not Op.BACKWARD_WEIGHT and i.reduce < 0
        ]
        assert sorted(str(i) for i in mine) == sorted(str(i) for i in others)
    draw_cells(zero, num_minibatches, [2] * n, [3] * n, weight=[1] * n)


def test_the_printed_list() -> None:
    pipeline = Pipeline((2, 2), chain(2), "zero-bubble", True, 2, 2, backward="split")
    assert render(programs(pipeline, 2)[2]) == (
        "1RA0<0 1F0@0 1BI0@0 1SG0>0 1RA2<0 1F2@0 1BI2@0 1SG2>0 1BW0@0 1BW2+0@0 1W0 1U0@1"
    )
    apart = Pipeline((2, 2), chain(2), "1f1b", True, 2, 2, backward="split")
    assert render(programs(apart, 2)[2]) == (
        "1RA0<0 1F0@0 1BI0@0 1SG0>0 1BW0@0 1RA2<0 1F2@0 1BI2@0 1SG2>0 1BW2+0@0 1W0 1U0@1"
    )
