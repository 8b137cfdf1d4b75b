"""Weight versions as the printed schedule has them, without a model: the recurrences of the papers, for every mode."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import product

import pytest

from pipebench.schedule.modes import MODES
from pipebench.schedule.pipeline import Pipeline, chain, noam
from pipebench.schedule.programs import programs
from pipebench.schedule.syncs import SYNCS
from tests.in_turn import in_turn
from tests.instruction_text import render
from tests.oracles import staleness

PLANS = [(1, 1), (1, 1, 1, 1), (2, 1), (3, 1), (1, 2, 1), (1, 3, 1), (1, 3), (4,), (1,), (2, 2), (2, 2, 2)]
SHAPES: dict[str, Callable[[tuple[int, ...]], bool]] = {
    "one": lambda r: r == (1,),
    "one-stage": lambda r: len(r) == 1,
    "straight": lambda r: {*r} == {1},
    "equal": lambda r: len({*r}) == 1,
    "even": lambda r: len({*r}) == 1 and r[0] % 2 == 0,
    "any": lambda r: True,
}
UNSTASHED = ("predict", "correct")
SCHEDULED = {mode: row for mode, row in MODES.items() if SYNCS[row.sync].waits}  # elsewhere the clock decides
CASES = [(mode, replicas) for mode, row in SCHEDULED.items() for replicas in PLANS if SHAPES[row.shape](replicas)]
Step = tuple[str, int, int, int]  # F, B (or its parts BI and BW) or U; stage; unit or round; version


def pipeline_of(mode: str, replicas: tuple[int, ...], weights: str | None = None) -> Pipeline:
    row = MODES[mode]
    depth = row.depth or noam(replicas)
    stages = replicas * row.chunks
    return Pipeline(
        stages, chain(len(stages)), row.order, row.flush, depth, 4 if row.microbatches else 1, row.accumulate or depth,
        weights=weights or row.weights, chunks=row.chunks, sync=row.sync, backward=row.backward,
    )  # fmt: skip


def printed(pipeline: Pipeline, count: int) -> Iterator[list[Step]]:
    """Yield the versions in every worker's printed list."""
    for program in programs(pipeline, count):
        found = re.findall(r"(?<!\S)(\d+)(F|BI?|BW|U)(\d+)(?:\+\d+)?@(\d+)", render(program))
        yield [(what, int(stage), int(number), int(version)) for stage, what, number, version in found]


def expected_of_unstashed(pipeline: Pipeline, stage: int, minibatch: int, what: str) -> int:
    """A backward reads the newest version; so does a forward, unless its update's first unit has read an older one."""
    r, units = pipeline.replicas[stage], pipeline.microbatches
    if what == "B":
        return minibatch // r
    d = staleness.depths(pipeline.replicas, pipeline.depth)[stage]
    return max(0, minibatch // r * units - d + 1) // units


def expected(pipeline: Pipeline, stage: int, minibatch: int) -> int:
    """The formula of the versions that minibatches use, restated."""
    if pipeline.flushes:
        return minibatch // (math.lcm(*pipeline.replicas) * pipeline.accumulate)
    if pipeline.weights == "double-buffer":
        return max(0, minibatch // (pipeline.replicas[0] * pipeline.accumulate) - 1)
    depths, r = staleness.depths(pipeline.replicas, pipeline.depth), pipeline.replicas
    if pipeline.weights == "stash-vertical-sync":
        return max(0, minibatch // r[0] - depths[0] + 1) * r[0] // r[stage]
    return max(0, minibatch // r[stage] - depths[stage] + 1)


@in_turn(*((*case, count) for case in CASES for count in (1, 7, 24, 31)))
def test_forward_and_backward_use_the_version_of_the_recurrence(
    mode: str, replicas: tuple[int, ...], count: int
) -> None:
    pipeline = pipeline_of(mode, replicas)
    for steps in printed(pipeline, count):
        assert any(what == "F" for what, *_ in steps) or count < sum(replicas)
        for what, stage, number, version in steps:
            minibatch = pipeline.minibatch(number)[0]
            if what != "U" and pipeline.weights in UNSTASHED:
                assert version == expected_of_unstashed(pipeline, stage, minibatch, what), (what, stage, number)
            elif what != "U":
                assert version == expected(pipeline, stage, minibatch), (what, stage, number)


@pytest.mark.parametrize("replicas", [r for r in PLANS if len(r) > 1])
def test_vertical_sync_uses_the_input_stage_s_version(replicas: tuple[int, ...]) -> None:
    pipeline = pipeline_of("pipedream", replicas, "stash-vertical-sync")
    for steps in printed(pipeline, 24):
        for what, stage, number, version in steps:
            if what != "U":
                assert version == expected(pipeline, stage, number)


@in_turn(*product(PLANS, (1, 3), ("stash", "stash-vertical-sync")))
def test_versions_of_a_depth_beyond_noam(replicas: tuple[int, ...], beyond: int, weights: str) -> None:
    depth = noam(replicas) + beyond
    pipeline = Pipeline(replicas, chain(len(replicas)), "1f1b", False, depth, weights=weights)
    for steps in printed(pipeline, 31):
        for what, stage, number, version in steps:
            if what != "U":
                assert version == expected(pipeline, stage, number)
        for stage in {stage for _, stage, *_ in steps}:
            if weights == "stash":
                assert most_alive(steps, stage) <= staleness.depths(replicas, depth)[stage]


@pytest.mark.parametrize("replicas", [(1, 1), (1, 1, 1, 1), (2, 2), (2, 2, 2)])
def test_two_buffers_are_enough_beyond_noam(replicas: tuple[int, ...]) -> None:
    """An update takes in as many minibatches as are in flight at least, so that the version before is there."""
    for depth in range(noam(replicas), noam(replicas) + 5):
        pipeline = Pipeline(
            replicas, chain(len(replicas)), "1f1b", False, depth, accumulate=depth, weights="double-buffer"
        )
        assert pipeline.warmups[:-1] == tuple(depth - s for s in range(len(replicas) - 1))
        for steps in printed(pipeline, 60):
            for what, stage, number, version in steps:
                assert what == "U" or version == expected(pipeline, stage, number)
            assert all(most_alive(steps, stage) <= 2 for stage in {stage for _, stage, *_ in steps})


def test_without_stashing_a_backward_meets_newer_weights() -> None:
    """PipeDream section 3.3: minibatch 5 (here 4) of four stages, forward after update 1, backward after 2, 3, 4."""
    pipeline = pipeline_of("pipedream", (1, 1, 1, 1), "none")
    versions = {
        (what, stage): version
        for steps in printed(pipeline, 12)
        for what, stage, number, version in steps
        if number == 4 and what in "FB"
    }
    assert [versions["F", stage] for stage in range(4)] == [1, 2, 3, 4]
    assert [versions["B", stage] for stage in range(4)] == [4, 4, 4, 4]


def most_alive(steps: list[Step], stage: int) -> int:
    """Return the most versions that must be kept at once, and check that each that is asked for is there."""
    alive, used, most = {0}, defaultdict[int, int](int), 1
    for what, own, _, version in steps:
        if own != stage:
            continue
        if what == "F":
            assert version in alive, f"version {version} is gone or not made yet"
            used[version] += 1
        elif what.startswith("B"):
            assert version in alive
            used[version] -= what != "BI"
        else:
            made = max(alive) + 1
            alive = {v for v in (*alive, made) if v >= version or used[v]}
            most = max(most, len(alive))
    return most


STASHED = [(mode, replicas) for mode, replicas in CASES if MODES[mode].weights not in UNSTASHED]


@in_turn(*STASHED)
def test_the_number_of_versions_that_must_be_kept(mode: str, replicas: tuple[int, ...]) -> None:
    """At most d_s with stashing, 2 with two buffers, 1 with a flush."""
    pipeline = pipeline_of(mode, replicas)
    for steps in printed(pipeline, 31):
        for stage in {stage for _, stage, *_ in steps}:
            bound = {"double-buffer": 2, "stash": staleness.depths(pipeline.replicas, pipeline.depth)[stage]}
            assert most_alive(steps, stage) <= bound.get(pipeline.weights, 1)


def test_two_buffers_are_needed() -> None:
    """The bound is tight: one buffer would be too few."""
    pipeline = pipeline_of("pipedream-2bw", (1, 1, 1, 1))
    assert [most_alive(steps, stage) for stage, steps in enumerate(printed(pipeline, 31))] == [2] * 4


def test_the_papers_minibatch_5() -> None:
    """PipeDream section 3.3: it (here 4) uses update 1 on machine 1, 2 on machine 2; with vertical sync 1 on all."""
    for weights, wanted in {"stash": [1, 2, 3, 4], "stash-vertical-sync": [1, 1, 1, 1]}.items():
        pipeline = pipeline_of("pipedream", (1, 1, 1, 1), weights)
        used = {
            (what, stage): version
            for steps in printed(pipeline, 12)
            for what, stage, number, version in steps
            if number == 4 and what in "FB"
        }
        for what in "FB":
            assert [used[what, stage] for stage in range(4)] == wanted, weights


def test_gpipe_s_first_activation_lives_until_the_last_backward() -> None:
    """The blog's example, n = m = 4, a step per forward and backward: from step 0 until step 13 on the first GPU."""
    lists = [[step[:3] for step in steps if step[0] in "FB"] for steps in printed(pipeline_of("gpipe", (1,) * 4), 1)]
    done: dict[tuple[str, int, int], int] = {}
    for now in range(100):
        for steps in lists:
            what, stage, number = steps[0] if steps else ("", 0, 0)
            before = ("F", stage - 1, number) if what == "F" else ("B", stage + 1, number)
            if steps and (before[1] in (-1, 4) or done.get(before, now) < now):
                done[steps.pop(0)] = now
    assert (done["F", 0, 0], done["B", 0, 0]) == (0, 13)
