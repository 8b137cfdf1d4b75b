"""Outlines: exactly those whose every stage alone is fast enough and fits, counted and listed."""

import itertools
import random

import pytest

from pipebench.planner.flat import SearchStage
from pipebench.planner.neighbours import Outlines


def every(last: int, num_workers: int) -> list[tuple[SearchStage, ...]]:
    """Return all outlines, by brute force."""
    found = []
    for count in range(1, min(last, num_workers) + 1):
        for cuts in itertools.combinations(range(1, last), count - 1):
            for replicas in itertools.product(range(1, num_workers + 1), repeat=count):
                if sum(replicas) <= num_workers:
                    bounds = itertools.pairwise((0, *cuts, last))
                    found.append(tuple(SearchStage(a, b, m) for (a, b), m in zip(bounds, replicas, strict=True)))
    return found


@pytest.mark.parametrize("limit_s", [0.0, 0.3, 0.7, 2.0])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(("last", "num_workers"), [(1, 1), (1, 4), (4, 1), (4, 4), (5, 3)])
def test_outlines_that_may_be_faster_are_listed(last: int, num_workers: int, full: bool, limit_s: float) -> None:
    def alone_s(stage: SearchStage) -> float:
        others = (stage.start > 0) + (stage.stop < last)
        assert stage.replicas + others <= num_workers  # of no other stages is the bound needed, which takes long
        return random.Random(str(stage)).random()

    def fits(stage: SearchStage, behind: int) -> bool:
        return not full or random.Random(f"{stage} {behind}").random() < 0.8

    number, outlines = Outlines(last, num_workers, alone_s, fits).below(limit_s)
    wanted = set()
    for stages in every(last, num_workers):
        behind = [sum(stage.replicas for stage in stages[index + 1 :]) for index in range(len(stages))]
        if all(alone_s(stage) < limit_s and fits(stage, after) for stage, after in zip(stages, behind, strict=True)):
            wanted.add(stages)
    listed = list(outlines)
    assert len(listed) == len(set(listed)) == number
    assert set(listed) == wanted
