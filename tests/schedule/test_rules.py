"""Rules every schedule keeps, over random pipelines."""

import math
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipebench.errors import ScheduleError
from pipebench.schedule.instructions import Instruction
from pipebench.schedule.operations import Op
from pipebench.schedule.pipeline import Edge, Pipeline, chain, noam
from pipebench.schedule.programs import programs
from pipebench.simulate.drawing import draw_cells
from tests.instruction_text import parse, render


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    replicas = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    n = len(replicas)
    skips = [Edge(a, b, draw(st.booleans())) for a in range(n) for b in range(a + 2, n) if draw(st.booleans())]
    flushes = draw(st.booleans())
    order = draw(st.sampled_from(["1f1b", "all-forwards", "zero-bubble"])) if flushes else "1f1b"
    splits = order == "zero-bubble" or draw(st.booleans())
    return Pipeline(
        replicas,
        tuple(sorted([*chain(n), *skips], key=lambda e: (e.source, e.target))),
        order,
        flushes,
        draw(st.one_of(st.just(noam(replicas)), st.integers(1, 8))),
        draw(st.integers(1, 4)) if flushes else 1,
        draw(st.integers(1, 2)) if flushes else 1,
        loads=(0, n - 1) if n > 1 else (0,),
        backward="split" if splits else "whole",
    )


@settings(deadline=None, max_examples=60)
@given(pipelines(), st.integers(1, 30), st.data())
def test_no_pipeline_deadlocks(pipeline: Pipeline, num_minibatches: int, data: st.DataObject) -> None:
    durations = st.lists(st.integers(1, 3), min_size=pipeline.num_stages, max_size=pipeline.num_stages)
    draw_cells(pipeline, num_minibatches, data.draw(durations), data.draw(durations))


@settings(deadline=None, max_examples=60)
@given(pipelines(), st.integers(1, 30))
def test_every_unit_once_forward_and_backward_on_its_replica(pipeline: Pipeline, num_minibatches: int) -> None:
    for worker, program in enumerate(programs(pipeline, num_minibatches)):
        (stage,), replica = pipeline.stages_of(worker), pipeline.replica_of(worker)
        steps = list(program)
        wanted = sorted(
            unit
            for k in range(num_minibatches)
            if k % pipeline.replicas[stage] == replica
            for unit in pipeline.units(k)
        )
        parts = (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT) if pipeline.backward == "split" else (Op.BACKWARD,)
        assert {i.op for i in steps} & {Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT} <= {*parts}
        before = dict.fromkeys(wanted, -1)
        for op in (Op.FORWARD, *parts):
            places = {i.number: place for place, i in enumerate(steps) if i.op is op}
            assert sorted(i.number for i in steps if i.op is op) == wanted
            assert all(before[unit] < place for unit, place in places.items())
            before = places


@settings(deadline=None, max_examples=60)
@given(pipelines(), st.integers(1, 30))
def test_in_flight_stays_within_the_depth(pipeline: Pipeline, num_minibatches: int) -> None:
    for worker, program in enumerate(programs(pipeline, num_minibatches)):
        (stage,) = pipeline.stages_of(worker)
        in_flight = most = 0
        for instruction in program:
            in_flight += {Op.FORWARD: 1, Op.BACKWARD: -1, Op.BACKWARD_WEIGHT: -1}.get(instruction.op, 0)
            most = max(most, in_flight)
            if instruction.op is Op.UPDATE and pipeline.flushes:
                assert in_flight == 0
        if pipeline.order == "1f1b":
            assert most <= pipeline.warmups[stage]
        if pipeline.order == "zero-bubble":
            assert most <= max(pipeline.depth, pipeline.warmups[stage])


@settings(deadline=None, max_examples=40)
@given(pipelines(), st.integers(1, 30))
def test_every_round_is_reduced_once_by_every_replica(pipeline: Pipeline, num_minibatches: int) -> None:
    for worker, program in enumerate(programs(pipeline, num_minibatches)):
        (stage,) = pipeline.stages_of(worker)
        rounds = math.ceil(num_minibatches / pipeline.round_size(stage))
        steps = list(program)
        assert [i.number for i in steps if i.op is Op.UPDATE] == list(range(rounds))
        joined = [i.reduce for i in steps if i.reduce >= 0]
        assert joined == (list(range(rounds)) if pipeline.replicas[stage] > 1 else [])


@settings(deadline=None, max_examples=40)
@given(pipelines(), st.integers(1, 30))
def test_every_send_meets_one_receive(pipeline: Pipeline, num_minibatches: int) -> None:
    sent: dict[tuple[str, int, int, int], int] = defaultdict(int)
    for program in programs(pipeline, num_minibatches):
        for op, stage, number, peer, *_ in program:
            if op is Op.SEND_ACTIVATION or op is Op.SEND_GRADIENT:
                sent[op.name[5:], number, stage, peer] += 1
            elif op is Op.RECEIVE_ACTIVATION or op is Op.RECEIVE_GRADIENT:
                sent[op.name[8:], number, peer, stage] -= 1
    assert set(sent.values()) <= {0}


@pytest.mark.parametrize("removed", [Op.SEND_ACTIVATION, Op.SEND_GRADIENT, Op.BACKWARD])
def test_a_missing_instruction_is_a_deadlock_that_names_the_waiting_workers(
    removed: Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipebench.simulate import drawing

    def without(pipeline: Pipeline, n: int, _: object) -> list[object]:
        whole = [list(program) for program in programs(pipeline, n)]
        place = next(i for i, x in enumerate(whole[1]) if x.op is removed)
        del whole[1][place]
        if removed is Op.BACKWARD:  # its gradient can't leave either
            del whole[1][place]
        return [iter(program) for program in whole]

    monkeypatch.setattr(drawing, "programs", without)
    with pytest.raises(ScheduleError, match=r"worker \d \(stage \d\) waits in \dR[AG]\d<\d"):
        draw_cells(Pipeline((1, 1, 1), chain(3), "1f1b", False, 3), 6, [1] * 3, [1] * 3)


@given(st.sampled_from(list(Op)), st.tuples(*[st.integers(0, 10**6)] * 2), st.tuples(*[st.integers(-1, 99)] * 3))
def test_text_form_round_trips(op: Op, place: tuple[int, int], rest: tuple[int, int, int]) -> None:
    instruction = Instruction(op, *place, *rest)
    assert parse(str(instruction)) == instruction


def test_text_form_of_a_worker() -> None:
    pipeline = Pipeline((2, 1), chain(2), "1f1b", False, 2)
    first = list(programs(pipeline, 3)[0])
    assert render(first) == ("0L0 0F0@0 0SA0>1 0L2 0F2@0 0SA2>1 0RG0<1 0B0+0@0 0W0 0U0@1 0RG2<1 0B2+1@0 0W1 0U1@2")
    assert render(programs(pipeline, 3)[1]) == "0L1 0F1@0 0SA1>1 0RG1<1 0B1+0@0 0W0 0U0@1 0W1+1 0U1@2"
