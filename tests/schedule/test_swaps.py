"""Positions of copies to the host and back in a worker's list."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipebench.schedule.instructions import COPIES, Instruction
from pipebench.schedule.modes import MODES
from pipebench.schedule.operations import Op
from pipebench.schedule.pipeline import Pipeline, chain
from pipebench.schedule.programs import forward_programs, programs
from tests.instruction_text import render
from tests.schedule.test_rules import pipelines

PASSES = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
BEGIN_BACKWARD = (Op.BACKWARD, Op.BACKWARD_INPUT)

# Lists of the workers of two and three stages: passes, and copies of all stages.
PICTURES = {
    "1f1b": (
        Pipeline((1, 1, 1), chain(3), "1f1b", False, 3, swaps=(0, 1, 2)),
        4,
        (
            "0F0 0SO0 0F1 0SO1 0F2 0SO2 0SI0 0SI1 0B0 0F3 0SO3 0SI2 0B1 0SI3 0B2 0B3",
            "1F0 1SO0 1F1 1SO1 1SI0 1SI1 1B0 1F2 1SO2 1SI2 1B1 1F3 1SO3 1SI3 1B2 1B3",
            "2F0 2SO0 2SI0 2B0 2F1 2SO1 2SI1 2B1 2F2 2SO2 2SI2 2B2 2F3 2SO3 2SI3 2B3",
        ),
    ),
    "all-forwards": (
        Pipeline((1, 1), chain(2), "all-forwards", True, 2, 3, swaps=(0,)),
        1,
        ("0F0 0SO0 0F1 0SO1 0F2 0SO2 0SI2 0SI1 0B2 0SI0 0B1 0B0", "1F0 1F1 1F2 1B2 1B1 1B0"),
    ),
    "zero-bubble": (
        Pipeline((1, 1), chain(2), "zero-bubble", True, 2, 3, backward="split", swaps=(0, 1)),
        1,
        (
            "0F0 0SO0 0F1 0SO1 0SI0 0SI1 0BI0 0BW0 0F2 0SO2 0SI2 0BI1 0BW1 0BI2 0BW2",
            "1F0 1SO0 1SI0 1BI0 1F1 1SO1 1SI1 1BI1 1BW0 1F2 1SO2 1SI2 1BI2 1BW1 1BW2",
        ),
    ),
    "interleaved": (
        Pipeline((1,) * 4, chain(4), "interleaved", True, 2, 2, chunks=2, swaps=(0, 3)),
        1,
        (
            "0F0 0SO0 0F1 0SO1 2F0 2F1 2B0 0SI0 2B1 0SI1 0B0 0B1",
            "1F0 1F1 3F0 3SO0 3SI0 3B0 3F1 3SO1 3SI1 3B1 1B0 1B1",
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("pipeline", "count", "pictures"), PICTURES.values(), ids=PICTURES)
def test_pictures(pipeline: Pipeline, count: int, pictures: tuple[str, ...]) -> None:
    for program, picture in zip(programs(pipeline, count), pictures, strict=True):
        shown = [Instruction(i.op, i.stage, i.number) for i in program if i.op in (*PASSES, *COPIES)]
        assert render(shown) == picture


def test_a_copy_out_comes_after_the_sends() -> None:
    pipeline = Pipeline((1, 1), chain(2), "1f1b", False, 2, swaps=(0, 1))
    assert render(programs(pipeline, 1)[0]) == "0L0 0F0@0 0SA0>1 0SO0 0SI0 0RG0<1 0B0@0 0U0@1"


def test_asynchronous_replicas_copy_as_well() -> None:
    row = MODES["dp-asp"]
    pipeline = Pipeline((2,), (), row.order, row.flush, 1, weights=row.weights, sync=row.sync, swaps=(0,))
    assert render(programs(pipeline, 4)[0]) == (
        "0L0 0F0 0SO0 0SI0 0B0 0PUSH0 0PULL2 0L2 0F2 0SO2 0SI2 0B2 0PUSH2 0PULL3@4"
    )


@settings(deadline=None, max_examples=60)
@given(pipelines(), st.integers(1, 20), st.data())
def test_rules(pipeline: Pipeline, num_minibatches: int, data: st.DataObject) -> None:
    stages = st.sets(st.integers(0, pipeline.num_stages - 1))
    swapping = replace(pipeline, swaps=tuple(sorted(data.draw(stages))))
    for plain, copying in zip(programs(pipeline, num_minibatches), programs(swapping, num_minibatches), strict=True):
        without, steps = list(plain), list(copying)
        assert [it for it in steps if it.op not in COPIES] == without
        for stage in {it.stage for it in without}:
            units = [it.number for it in without if it.op is Op.FORWARD and it.stage == stage]
            place = {(it.op, it.number): at for at, it in enumerate(steps) if it.stage == stage}
            backwards = [it.number for it in steps if it.op in BEGIN_BACKWARD and it.stage == stage]
            for op in COPIES:
                copied = sorted(it.number for it in steps if it.op is op and it.stage == stage)
                assert copied == (sorted(units) if stage in swapping.swaps else [])
            for unit in units if stage in swapping.swaps else []:
                begins = next(at for op in BEGIN_BACKWARD if (at := place.get((op, unit))) is not None)
                out, back = place[Op.SWAP_OUT, unit], place[Op.SWAP_IN, unit]
                assert place[Op.FORWARD, unit] < out < back < begins
                between = [it.op for it in steps[place[Op.FORWARD, unit] + 1 : out]]
                assert set(between) <= {Op.SEND_ACTIVATION}
                # At most one backward lies between a copy back and its own, and none only if there could be none.
                ahead = [it for it in steps[back:begins] if it.op in BEGIN_BACKWARD]
                first = backwards.index(unit) == 0
                late = not first and place[Op.FORWARD, unit] > max(
                    at for op in BEGIN_BACKWARD
                    if (at := place.get((op, backwards[backwards.index(unit) - 1]))) is not None
                )  # fmt: skip
                assert len(ahead) == (0 if first or late else 1)


def test_an_evaluation_copies_nothing() -> None:
    pipeline = Pipeline((1, 1), chain(2), "1f1b", False, 2, swaps=(0, 1))
    assert not [it for program in forward_programs(pipeline, 3) for it in program if it.op in COPIES]
