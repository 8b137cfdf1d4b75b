"""Evolution, told again as the papers write it down: a loop, plain lists, its own random numbers.

Real et al. (AAAI'19), algorithm 1, with removal of the oldest; So et al. (ICML'19) with that of the worst of a
tournament, and section 3.2's hurdles. Shares no code with pipebench.
"""

import hashlib
from collections.abc import Callable

_M = 2**64 - 1


def _splitmix(*words: int) -> int:
    state = 0
    for word in words:
        state = (state + 0x9E3779B97F4A7C15 + word) % 2**64
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            state = (state ^ state >> shift) * factor & _M
        state ^= state >> 31
    return state >> 1


def _stream(seed: int, name: str, number: int) -> Callable[[list[int]], int]:
    key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1
    calls = [0]

    def choose(among: list[int]) -> int:
        calls[0] += 1
        return among[_splitmix(seed, key, number, calls[0]) % len(among)]

    return choose


def _grow(choose: Callable[[list[int]], int], num_cells: int, fewest: int) -> set[int]:
    """Return cells by tossing a coin for each, and more until there are enough."""
    cells = {cell for cell in range(num_cells) if choose([0, 1]) == 1}
    while len(cells) < fewest:
        cells.add(choose([c for c in range(num_cells) if c not in cells]))
    return cells


def _mutate(
    parent: frozenset[int], choose: Callable[[list[int]], int], num_cells: int, num_mutations: int, fewest: int
) -> set[int]:
    """Return a parent's cells with so many of them, or of the others, the other way round."""
    cells, touched = set(parent), set()
    for _ in range(num_mutations):
        allowed = [c for c in range(num_cells) if c not in touched and (c not in cells or len(cells) > fewest)]
        if allowed:
            cell = choose(allowed)
            touched.add(cell)
            cells.symmetric_difference_update({cell})
    return cells


def evolve(
    fitness: Callable[[int, frozenset[int], int], float],
    *,
    num_cells: int,
    first: set[int],
    population_size: int,
    sample_size: int,
    num_mutations: int,
    fewest: int,
    remove_oldest: bool,
    max_hurdles: int,
    seed: int,
    num_periods: int,
) -> list[tuple[frozenset[int], int | None, list[float]]]:
    """Return architecture, parent and scores of everybody trained in so many periods; larger scores are better.

    `fitness(number, cells, period)` is what the score of an individual is after its period of that number, from 1.
    """
    history: list[tuple[frozenset[int], int | None, list[float]]] = []
    alive: list[int] = []
    hurdles: list[float] = []
    cells, parent = set(first), None
    while num_periods > 0:
        me = len(history)
        scores: list[float] = []
        history.append((frozenset(cells), parent, scores))
        while num_periods > 0:
            num_periods -= 1
            scores.append(fitness(me, frozenset(cells), len(scores) + 1))
            if len(scores) > len(hurdles) or scores[-1] <= hurdles[len(scores) - 1]:
                break
        else:
            break
        alive.append(me)
        if len(alive) == population_size + 1:
            if remove_oldest:
                alive.pop(0)
            else:
                choose = _stream(seed, "search death", me + 1)
                sample = [choose(alive) for _ in range(sample_size)]
                alive.remove(min(sample, key=lambda n: (history[n][2][-1], n)))
        if (me + 1) % population_size == 0 and len(hurdles) < max_hurdles:
            longest = [history[n][2][-1] for n in alive if len(history[n][2]) == len(hurdles) + 1]
            if longest:
                hurdles.append(sum(longest) / len(longest))
        choose = _stream(seed, "search cells", me + 1)
        if me + 1 < population_size:
            parent, cells = None, _grow(choose, num_cells, fewest)
            continue
        pick = _stream(seed, "search parent", me + 1)
        sample = [pick(alive) for _ in range(sample_size)]
        parent = max(sample, key=lambda n: (history[n][2][-1], -n))
        cells = _mutate(history[parent][0], choose, num_cells, num_mutations, fewest)
    return history
