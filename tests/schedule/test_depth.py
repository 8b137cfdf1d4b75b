"""How many minibatches are in flight in every stage, below, at and beyond NOAM: the recurrence over all small plans."""

import itertools
import math
import re

import pytest

from pipebench.schedule.operations import Op
from pipebench.schedule.pipeline import Pipeline, chain, noam
from pipebench.schedule.programs import most_in_flight, programs
from tests.instruction_text import render
from tests.oracles import staleness
from tests.oracles.playing import play, steps_of

PLANS = [
    replicas
    for num_stages, widest in ((1, 6), (2, 6), (3, 5), (4, 4))
    for replicas in itertools.product(range(1, widest + 1), repeat=num_stages)
]
BEYOND = (-1, 0, 1, 2, 3, 5)


def pipelines() -> list[Pipeline]:
    return [
        Pipeline(replicas, chain(len(replicas)), "1f1b", False, depth)
        for replicas in PLANS
        for depth in (noam(replicas) + more for more in BEYOND)
        if depth >= 1
    ]


def enough(p: Pipeline) -> int:
    """Return the minibatches after which every stage has reached its depth, and rounds repeat."""
    return 2 * max(d * r for d, r in zip(p.warmups, p.replicas, strict=True)) + 2 * max(p.replicas) + 1


def test_the_recurrence_on_every_small_plan_neither_deadlocks_nor_wastes() -> None:
    """Every d_s is the formula's, is reached, in minibatches as in versions, and the whole plays to its end."""
    cases = pipelines()
    assert len(cases) > 2000
    for p in cases:
        depths = staleness.depths(p.replicas, p.depth)
        assert [*p.warmups] == depths
        played = play(p.replicas, depths, enough(p))
        assert played.ended, (p.replicas, p.depth)
        assert played.in_flight == depths, (p.replicas, p.depth)
        assert played.versions == depths, (p.replicas, p.depth)


def test_a_depth_beyond_what_earlier_stages_send_is_a_deadlock() -> None:
    """The second bound is exact: wherever it holds a stage back, a d_s larger by one never gets its minibatches."""
    held_back = 0
    for p in pipelines():
        for stage in range(1, p.num_stages):
            sent = min(1 + (p.warmups[t] - 1) * p.replicas[t] // p.replicas[stage] for t in range(stage))
            if p.warmups[stage] == sent:
                held_back += 1
                deeper = [d + (s == stage) for s, d in enumerate(p.warmups)]
                count = 4 * max(d * r for d, r in zip(deeper, p.replicas, strict=True)) + 5 * p.block
                assert not play(p.replicas, deeper, count).ended, (p.replicas, p.depth, stage)
    assert held_back > 1000


@pytest.mark.sampled(3)
@pytest.mark.parametrize("replicas", PLANS[:: len(PLANS) // 30])
def test_the_schedule_s_lists_equal_the_recurrence_s(replicas: tuple[int, ...]) -> None:
    for more in BEYOND:
        if noam(replicas) + more < 1:
            continue
        p = Pipeline(replicas, chain(len(replicas)), "1f1b", False, noam(replicas) + more)
        count = enough(p)
        for worker, program in enumerate(programs(p, count)):
            (stage,) = p.stages_of(worker)
            found = [(what, int(n)) for what, n in re.findall(r"(?<!\S)\d+([FBU])(\d+)", render(program))]
            wanted = steps_of(stage, p.replica_of(worker), replicas, staleness.depths(replicas, p.depth)[stage], count)
            # An update is every replica's, and made once the round is whole: a worker's last may have no minibatch.
            rounds = math.ceil(count / replicas[stage])
            wanted += [("U", rounds - 1)] if ("U", rounds - 1) not in wanted else []
            assert found == wanted
        assert [*most_in_flight(p)] == staleness.depths(replicas, p.depth)


def test_every_stage_of_a_straight_pipeline_but_the_last_has_more_in_flight() -> None:
    def depths(depth: int) -> tuple[int, ...]:
        return Pipeline((1, 1, 1, 1), chain(4), "1f1b", False, depth).warmups

    assert [depths(depth) for depth in (2, 4, 5, 7)] == [(2, 2, 2, 1), (4, 3, 2, 1), (5, 4, 3, 1), (7, 6, 5, 1)]


def test_with_a_flush_a_stage_has_no_more_in_flight_than_an_update_covers() -> None:
    p = Pipeline((1, 1, 1, 1), chain(4), "1f1b", True, 7, microbatches=5)
    assert p.warmups == (7, 6, 5, 1)
    assert most_in_flight(p) == (5, 5, 5, 1)
    for program in programs(p, 6):
        in_flight = 0
        for op, *_ in program:
            in_flight += {Op.FORWARD: 1, Op.BACKWARD: -1}.get(op, 0)
            assert op is not Op.UPDATE or in_flight == 0
