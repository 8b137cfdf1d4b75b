"""Algorithm 1's search: stages become balanced in few steps, each of which moves layers to a neighbour at most."""

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from pipebench.extensions.moves.rebalancing import (
    UNBALANCED,
    WORTHWHILE,
    RepartitionSearch,
    StageTimes,
    as_measured,
    one_step,
)
from pipebench.extensions.moves.repartition_plan import CutLayout
from pipebench.planner.stage_problem import StageProblem
from pipebench.profile.model import LayerProfile
from pipebench.schedule.modes import KEEP, RECOMPUTE, SWAP
from tests.in_turn import in_turn


def chain(seconds: Sequence[float], saved: Sequence[int] = ()) -> list[LayerProfile]:
    layers = [
        LayerProfile(
            f"l{i}", "linear", s / 3, 2 * s / 3, 8, 8, (i - 1,) if i else (), () if i else ("x",), {}, {},
            saved_bytes=saved[i] if saved else 0,
        )
        for i, s in enumerate(seconds)
    ]  # fmt: skip
    return [*layers, LayerProfile("loss", "loss", 0.0, 0.0, 8, 8, (len(layers) - 1,))]


def running(
    rows: Sequence[LayerProfile],
    starts: Sequence[int],
    stage_s: Sequence[float],
    *,
    limit: float = math.inf,
    held: Sequence[float] = (),
    memory: Sequence[str] = (),
    chooses: tuple[str, ...] = (),
    pcie: float | None = None,
) -> RepartitionSearch:
    """Return stages of a 1F1B pipeline that hold activations only, of p units on the first stage, one on the last."""
    num_layers, num_stages = len(rows) - 1, len(starts) + 1
    measured = [StageTimes(*each) for each in zip(stage_s, held or [0.0] * num_stages, strict=True)]

    def problem_of(stage: int, start: int, stop: int) -> StageProblem:
        return StageProblem(rows, start, stop, num_stages - stage, limit, pcie_bytes_per_s=pcie, chooses=chooses)

    layout = CutLayout(tuple(starts), tuple(memory) or (KEEP,) * num_layers)
    return RepartitionSearch(rows, layout, measured, problem_of)


def better_cuts(rows: Sequence[LayerProfile], starts: Sequence[int], stage_s: Sequence[float]) -> Any:
    """Return the best cuts, or None."""
    stages = running(rows, starts, stage_s)
    best = stages.best() if stages.is_needed else None
    return best and best.layout.starts


def stage_seconds(seconds: Sequence[float], starts: Sequence[int], slow: Sequence[float]) -> list[float]:
    ends = [0, *starts, len(seconds)]
    return [factor * sum(seconds[a:b]) for (a, b), factor in zip(itertools.pairwise(ends), slow, strict=True)]


def balanced(seconds: Sequence[float], starts: tuple[int, ...], slow: Sequence[float]) -> tuple[tuple[int, ...], int]:
    """Repeat the search as a run does; return the last cuts, and the number of moves."""
    rows, moves = chain(seconds), 0
    while (wanted := better_cuts(rows, starts, stage_seconds(seconds, starts, slow))) is not None:
        starts, moves = one_step(starts, wanted, len(seconds)), moves + 1
        assert moves < 40
    return starts, moves


def optimum(seconds: Sequence[float], num_stages: int) -> float:
    """Return the seconds of the slowest stage of the best cuts, by trying all."""
    places = itertools.combinations(range(1, len(seconds)), num_stages - 1)
    return min(max(stage_seconds(seconds, starts, [1.0] * num_stages)) for starts in places)


@pytest.mark.parametrize("seed", range(15))
def test_any_cuts_come_near_the_optimum_in_few_steps(seed: int) -> None:
    draw = random.Random(seed)
    seconds = [draw.uniform(0.5, 1.5) for _ in range(draw.randint(12, 24))]
    num_stages = draw.randint(2, 4)
    starts = tuple(sorted(draw.sample(range(1, len(seconds)), num_stages - 1)))
    ended, moves = balanced(seconds, starts, [1.0] * num_stages)
    slowest_s, best_s = max(stage_seconds(seconds, ended, [1.0] * num_stages)), optimum(seconds, num_stages)
    mean_s = sum(seconds) / num_stages
    assert slowest_s <= max((1 + UNBALANCED) * mean_s, 1.1 * best_s)
    assert moves <= 9, "vPipe's section 6.3 has 3 to 9"


def test_a_slow_device_gets_fewer_layers() -> None:
    seconds = [1.0] * 40
    ended, moves = balanced(seconds, (10, 20, 30), [1.0, 2.0, 1.0, 1.0])
    took = stage_seconds(seconds, ended, [1.0, 2.0, 1.0, 1.0])
    assert moves >= 1
    assert ended[1] - ended[0] in (5, 6)
    assert max(took) <= 12 < 20, "40 layers by speeds of 1, 1/2, 1 and 1 take 11.4 s on each"


def test_balanced_stages_stay() -> None:
    seconds = [1.0] * 12
    assert better_cuts(chain(seconds), (4, 8), [4.0, 4.0 * (1 + UNBALANCED), 4.0]) is None
    assert better_cuts(chain([1.0, 9.0, 1.0]), (1, 2), [1.0, 9.0, 1.0]) is None, "a layer isn't cut in two"


def test_little_gain_isn_t_worth_a_move() -> None:
    for little, worth in ((WORTHWHILE / 2, False), (4 * WORTHWHILE, True)):
        seconds = [10.0, 10.0 * little, 8.0]
        found = better_cuts(chain(seconds), (2,), stage_seconds(seconds, (2,), [1.0, 1.0]))
        assert found == ((1,) if worth else None)


def test_layers_take_their_share_of_their_stage_s_time() -> None:
    layout = CutLayout((2,), (KEEP,) * 3)

    def seconds(rows: Sequence[LayerProfile], stage_s: Sequence[float], layout: CutLayout = layout) -> list[float]:
        return [row.forward_s + row.backward_s for row in as_measured(rows, layout, stage_s)]

    assert seconds(chain([1.0, 3.0, 2.0]), [8.0, 1.0]) == pytest.approx([2.0, 6.0, 1.0, 0.0])
    assert seconds(chain([0.0, 0.0, 2.0]), [4.0, 1.0]) == pytest.approx([2.0, 2.0, 1.0, 0.0]), "equal shares of nothing"
    again = layout._replace(memory=(RECOMPUTE, KEEP, KEEP))  # a third of its time more
    assert seconds(chain([3.0, 3.0, 2.0]), [7.0, 2.0], again) == pytest.approx([3.0, 3.0, 2.0, 0.0])


@in_turn(*zip(range(200), strict=True))
def test_a_step_moves_no_layer_beyond_a_neighbour_and_leaves_no_stage_empty(seed: int) -> None:
    draw = random.Random(seed)
    num_layers, num_stages = draw.randint(6, 20), draw.randint(2, 5)
    places = range(1, num_layers)
    starts, wanted = (tuple(sorted(draw.sample(places, num_stages - 1))) for _ in range(2))
    made, steps = starts, 0
    while made != wanted:
        after = one_step(made, wanted, num_layers)
        assert after != made
        ends, now = [0, *made, num_layers], [0, *after, num_layers]
        assert list(now) == sorted({*now})
        for layer in range(num_layers):
            stages = [sum(layer >= start for start in each[1:-1]) for each in (ends, now)]
            assert abs(stages[0] - stages[1]) <= 1
        made, steps = after, steps + 1
    assert steps <= num_layers


@pytest.mark.parametrize("seed", range(15))
def test_cuts_fit_in_memory_and_are_near_the_best_that_do(seed: int) -> None:
    draw = random.Random(seed)
    seconds = [draw.uniform(0.5, 1.5) for _ in range(12)]
    kept = [draw.randint(1, 9) for _ in seconds]  # of every unit

    def needed(part: int, start: int, stop: int) -> int:
        return (3 - part) * sum(kept[start:stop])  # 3, 2 and 1 units in flight

    def most(starts: Sequence[int]) -> int:
        return max(needed(part, *layers) for part, layers in enumerate(itertools.pairwise([0, *starts, len(kept)])))

    def slowest_s(starts: Sequence[int]) -> float:
        return max(stage_seconds(seconds, starts, [1.0] * 3))

    places = [*itertools.combinations(range(1, len(seconds)), 2)]
    limit = sorted(map(most, places))[6]
    fit = [starts for starts in places if most(starts) <= limit]
    worst = max(fit, key=slowest_s)

    stages = running(chain(seconds, kept), worst, stage_seconds(seconds, worst, [1.0] * 3), limit=limit)
    found = stages.best()
    ended = worst if found is None else found.layout.starts
    assert ended in fit
    assert slowest_s(ended) <= 1.1 * min(map(slowest_s, fit))


WAYS = {"recompute": ((RECOMPUTE,), None), "swap": ((SWAP,), 1e3), "both": ((SWAP, RECOMPUTE), 20.0)}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(6))
def test_stages_that_do_not_fit_with_keep_fit_with_other_policies(seed: int, way: str) -> None:
    """All stages then fit, by sums over their layers, and no other cuts that fit are clearly faster."""
    draw = random.Random(seed)
    seconds, kept = [draw.uniform(0.5, 1.5) for _ in range(9)], [draw.randint(4, 9) for _ in range(9)]
    chooses, pcie = WAYS[way]
    starts = (1, 2, 3)  # nearly all in the last stage
    rows, stage_s = chain(seconds, kept), stage_seconds(seconds, (1, 2, 3), [1.0] * 4)
    limit = 0.6 * 4 * sum(kept) / 4
    stages = running(rows, starts, stage_s, limit=limit, chooses=chooses, pcie=pcie)
    best = stages.best()
    assert best is not None
    for stage, (start, stop) in enumerate(itertools.pairwise(best.layout.ends)):
        keeps = sum(kept[i] for i in range(start, stop) if best.layout.memory[i] == KEEP)
        assert (4 - stage) * keeps <= limit, "what is kept of every unit in flight"
    assert best.num_unfit == 0
    proposals = [stages.chosen(each) for each in itertools.combinations(range(1, 9), 3)]
    ideal_s = min(max(each.stage_s) for each in proposals if each.num_unfit == 0)
    assert max(best.stage_s) <= 1.2 * ideal_s


def test_a_stage_beyond_its_memory_is_repartitioned_though_balanced() -> None:
    """Stages are balanced exactly; the one that exceeds its memory recomputes, and no other does."""
    seconds, kept = [1.0] * 8, [2] * 8
    rows, stage_s = chain(seconds, kept), [4.0, 4.0]
    fits = running(rows, (4,), stage_s, held=[16.0, 8.0], limit=20.0, chooses=(RECOMPUTE,))
    assert fits.predicted_bytes == (16.0, 8.0)
    assert not fits.is_needed
    assert fits.next_step() is None
    over = running(rows, (4,), stage_s, held=[24.0, 8.0], limit=20.0, chooses=(RECOMPUTE,))
    assert over.is_needed
    step = over.next_step()
    assert step is not None
    assert over.now.num_unfit == 1
    again = over.chosen(step.starts)
    assert again.num_unfit == 0
    (start, stop), _ = itertools.pairwise(step.ends)
    held = 1.5 * 2 * sum(kept[i] for i in range(start, stop) if step.memory[i] == KEEP)  # as much more as was measured
    assert held <= 20.0
    assert {*step.memory[step.starts[0] :]} == {KEEP}


def test_given_policies_of_layers_are_kept() -> None:
    memory = [RECOMPUTE, KEEP] * 4
    stages = running(chain([1.0] * 8, [2] * 8), (2,), [8 / 3, 7.0], memory=memory)
    best = stages.best()
    assert best is not None
    assert best.layout.memory == tuple(memory)
    assert best.layout.starts == (4,)


def test_cuts_count_recomputation() -> None:
    """The first stage has little memory and must recompute, so it gets fewer layers than the second."""
    rows = chain([3.0] * 12, [4] * 12)
    stages = running(rows, (6,), [24.0, 18.0], limit=30.0, memory=[RECOMPUTE] * 6 + [KEEP] * 6, chooses=(RECOMPUTE,))
    best = stages.best()
    assert best is not None
    assert best.layout.starts == (5,)
    assert max(best.stage_s) < 24.0
