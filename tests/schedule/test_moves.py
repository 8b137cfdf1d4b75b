"""The updates by which passes predict or correct weights in the printed schedule: the papers' numbers."""

import re
from collections import defaultdict

import pytest

from pipebench.schedule.modes import MODES
from pipebench.schedule.operations import Op
from pipebench.schedule.pipeline import Pipeline, chain, noam
from pipebench.schedule.programs import programs
from pipebench.schedule.weights import WEIGHT_POLICIES, delay
from tests.instruction_text import parse, render

PLANS = [(1, 1), (1, 1, 1), (1, 1, 1, 1), (1,) * 7, (2, 1), (3, 1), (1, 2, 1), (1, 3), (2, 2), (2, 2, 2)]
STRAIGHT = [plan for plan in PLANS if {*plan} == {1}]
EQUAL = [plan for plan in PLANS if len({*plan}) == 1]
_PASS = re.compile(r"(?<!\S)(\d+)([FB])(\d+)(?:\+\d+)?@(\d+)(?:~(-?\d+))?")


def pipeline_of(mode: str, replicas: tuple[int, ...], microbatches: int = 1) -> Pipeline:
    row = MODES[mode]
    return Pipeline(
        replicas, chain(len(replicas)), row.order, row.flush, noam(replicas), microbatches, weights=row.weights
    )


def printed(pipeline: Pipeline, count: int) -> dict[tuple[str, int], list[tuple[int, int, int]]]:
    """Return (unit, version, updates ahead) of every forward and backward, by kind and stage, ascending."""
    found = defaultdict(list)
    for program in programs(pipeline, count):
        for stage, what, unit, version, ahead in _PASS.findall(render(program)):
            found[what, int(stage)].append((int(unit), int(version), int(ahead or 0)))
    return {key: sorted(rows) for key, rows in found.items()}


@pytest.mark.parametrize("replicas", STRAIGHT, ids=len)
def test_spectrain_predicts_as_many_updates_as_its_paper(replicas: tuple[int, ...]) -> None:
    n = len(replicas)
    found = printed(pipeline_of("spectrain", replicas), 4 * n)
    for rank in range(n):
        for unit, _, ahead in found["F", rank]:
            assert ahead == rank // 2 + min(unit, n - rank - 1)
        assert {ahead for _, _, ahead in found["B", rank]} == {rank // 2}


@pytest.mark.parametrize("microbatches", [1, 2, 4, 8])
@pytest.mark.parametrize("replicas", EQUAL, ids=str)
def test_xpipe_s_microbatches_share_their_bellwether_s_prediction(replicas: tuple[int, ...], microbatches: int) -> None:
    pipeline, n = pipeline_of("xpipe", replicas, microbatches), len(replicas)
    found = printed(pipeline, 16)
    for rank in range(n):
        assert {ahead for _, _, ahead in found["B", rank]} == {(microbatches + rank // 2 - 1) // microbatches}
        of_minibatch = defaultdict(set)
        for unit, version, ahead in found["F", rank]:
            of_minibatch[pipeline.minibatch(unit)[0]].add((version, ahead))
        assert len(of_minibatch) == 16
        assert all(len(used) == 1 for used in of_minibatch.values())


@pytest.mark.parametrize("replicas", PLANS, ids=str)
def test_pipemare_takes_a_backward_s_weights_back_to_those_of_its_forward(replicas: tuple[int, ...]) -> None:
    pipeline = pipeline_of("pipemare", replicas)
    found = printed(pipeline, 12 * pipeline.block)
    for stage, r in enumerate(replicas):
        forwards = {unit: version for unit, version, _ in found["F", stage]}
        assert {ahead for _, _, ahead in found["F", stage]} == {0}
        for unit, version, ahead in found["B", stage]:
            assert version == unit // r
            assert ahead == forwards[unit] - version
        late = {-ahead for unit, _, ahead in found["B", stage] if unit >= r * pipeline.depth}
        assert late == {delay(pipeline, stage)}


@pytest.mark.parametrize("microbatches", [2, 3, 4])
@pytest.mark.parametrize("replicas", STRAIGHT, ids=len)
def test_the_delay_is_the_mean_of_the_printed_ones(replicas: tuple[int, ...], microbatches: int) -> None:
    """Where the newest version is read, minibatches that are cut wait for a fraction of their updates."""
    pipeline = Pipeline(replicas, chain(len(replicas)), "1f1b", False, len(replicas), microbatches, weights="none")
    found = printed(pipeline, 40)
    for stage in range(len(replicas)):
        late = [unit // microbatches - version for unit, version, _ in found["F", stage]][20 * microbatches :]
        assert sum(late) / len(late) == pytest.approx(delay(pipeline, stage))


@pytest.mark.parametrize("mode", ["spectrain", "xpipe", "pipemare"])
@pytest.mark.parametrize("replicas", PLANS, ids=str)
def test_a_stage_that_never_predicts_weights_has_no_prediction_in_its_text(
    replicas: tuple[int, ...], mode: str
) -> None:
    pipeline = pipeline_of(mode, replicas)
    moved = {stage for (_, stage), rows in printed(pipeline, 24).items() if any(ahead for _, _, ahead in rows)}
    policy = WEIGHT_POLICIES[pipeline.weights]
    assert moved == {stage for stage in range(len(replicas)) if policy.moves(pipeline, stage)}


@pytest.mark.parametrize("mode", ["spectrain", "xpipe", "pipemare"])
def test_the_text_form_has_all_updates_ahead(mode: str) -> None:
    moved = 0
    for program in programs(pipeline_of(mode, (1, 1, 1, 1)), 9):
        instructions = list(program)
        assert [parse(text) for text in render(instructions).split()] == instructions
        moved += sum(it.ahead != 0 for it in instructions)
        assert all(it.ahead == 0 for it in instructions if it.op not in (Op.FORWARD, Op.BACKWARD))
    assert moved > 0


def test_an_update_marks_that_its_bellwether_s_version_is_still_needed() -> None:
    """Two stages, two microbatches: F2 reads version 0 before the first update, F3 the same after it."""
    first, _ = programs(pipeline_of("xpipe", (1, 1), 2), 3)
    shown = [text for text in render(first).split() if text[1] in "FBU"]
    expected = "0F0@0 0F1@0 0B0@0 0F2@0~1 0B1@0 0U0@0 0F3@0~1 0B2@1 0F4@1~1 0B3@1 0U1@1 0F5@1~1 0B4@2 0B5@2 0U2@3"
    assert shown == expected.split()
