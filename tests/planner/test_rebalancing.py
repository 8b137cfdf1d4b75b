"""Algorithm 1's planner: stages become balanced in few steps, none of which moves a layer beyond a neighbour."""

import itertools
import random
from collections.abc import Sequence

import pytest

from pipebench.planner.rebalancing import UNBALANCED, WORTHWHILE, better_cuts, layer_seconds, one_step
from pipebench.profile.model import LayerProfile


def chain(seconds: Sequence[float]) -> list[LayerProfile]:
    layers = [
        LayerProfile(f"l{i}", "linear", s / 3, 2 * s / 3, 8, 8, (i - 1,) if i else (), () if i else ("x",), {}, {})
        for i, s in enumerate(seconds)
    ]
    return [*layers, LayerProfile("loss", "loss", 0.0, 0.0, 8, 8, (len(layers) - 1,))]


def stage_seconds(seconds: Sequence[float], starts: Sequence[int], slow: Sequence[float]) -> list[float]:
    ends = [0, *starts, len(seconds)]
    return [factor * sum(seconds[a:b]) for (a, b), factor in zip(itertools.pairwise(ends), slow, strict=True)]


def balanced(seconds: Sequence[float], starts: tuple[int, ...], slow: Sequence[float]) -> tuple[tuple[int, ...], int]:
    """Iterate as a run would; return the cuts at the end, and how many moves it took."""
    rows, moves = chain(seconds), 0
    while (wanted := better_cuts(rows, starts, stage_seconds(seconds, starts, slow))) is not None:
        starts, moves = one_step(starts, wanted, len(seconds)), moves + 1
        assert moves < 40
    return starts, moves


def optimum(seconds: Sequence[float], num_stages: int) -> float:
    """Return the seconds of the slowest stage of the best cuts, by trying all."""
    places = itertools.combinations(range(1, len(seconds)), num_stages - 1)
    return min(max(stage_seconds(seconds, starts, [1.0] * num_stages)) for starts in places)


@pytest.mark.parametrize("seed", range(30))
def test_from_any_cuts_it_comes_near_the_optimum_in_few_steps(seed: int) -> None:
    draw = random.Random(seed)
    seconds = [draw.uniform(0.5, 1.5) for _ in range(draw.randint(12, 24))]
    num_stages = draw.randint(2, 4)
    starts = tuple(sorted(draw.sample(range(1, len(seconds)), num_stages - 1)))
    ended, moves = balanced(seconds, starts, [1.0] * num_stages)
    slowest_s, best_s = max(stage_seconds(seconds, ended, [1.0] * num_stages)), optimum(seconds, num_stages)
    mean_s = sum(seconds) / num_stages
    assert slowest_s <= max((1 + UNBALANCED) * mean_s, 1.1 * best_s)
    assert moves <= 9, "vPipe's section 6.3 has 3 to 9"


def test_a_slow_device_gets_less_to_do() -> None:
    seconds = [1.0] * 40
    ended, moves = balanced(seconds, (10, 20, 30), [1.0, 2.0, 1.0, 1.0])
    took = stage_seconds(seconds, ended, [1.0, 2.0, 1.0, 1.0])
    assert moves >= 1
    assert ended[1] - ended[0] in (5, 6)
    assert max(took) <= 12 < 20, "40 layers by speeds of 1, 1/2, 1 and 1 take 11.4 s on each"


def test_what_is_balanced_stays() -> None:
    seconds = [1.0] * 12
    assert better_cuts(chain(seconds), (4, 8), [4.0, 4.0 * (1 + UNBALANCED), 4.0]) is None
    assert better_cuts(chain([1.0, 9.0, 1.0]), (1, 2), [1.0, 9.0, 1.0]) is None, "a layer isn't cut in two"


def test_little_gain_isn_t_worth_a_move() -> None:
    for little, worth in ((WORTHWHILE / 2, False), (4 * WORTHWHILE, True)):
        seconds = [10.0, 10.0 * little, 8.0]
        found = better_cuts(chain(seconds), (2,), stage_seconds(seconds, (2,), [1.0, 1.0]))
        assert found == ((1,) if worth else None)


def test_layers_take_their_share_of_what_their_stage_took() -> None:
    rows = chain([1.0, 3.0, 2.0])
    assert layer_seconds(rows, (2,), [8.0, 1.0]) == [2.0, 6.0, 1.0, 0.0]
    nothing = chain([0.0, 0.0, 2.0])
    assert layer_seconds(nothing, (2,), [4.0, 1.0]) == [2.0, 2.0, 1.0, 0.0], "a profile that says nothing: equal shares"


@pytest.mark.parametrize("seed", range(200))
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


@pytest.mark.parametrize("seed", range(30))
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

    def fits(part: int, start: int, stop: int) -> bool:
        return needed(part, start, stop) <= limit

    found = better_cuts(chain(seconds), worst, stage_seconds(seconds, worst, [1.0] * 3), None, fits)
    ended = worst if found is None else found
    assert ended in fit
    assert slowest_s(ended) <= 1.1 * min(map(slowest_s, fit))
