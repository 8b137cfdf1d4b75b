"""Evolutionary architecture search as the papers describe it: a loop over plain lists; shares no code with pipebench.

Real et al. (AAAI'19), algorithm 1, which removes the oldest individual; So et al. (ICML'19), which removes the worst of
a tournament, with the hurdles of section 3.2.
"""

import itertools
from collections.abc import Callable

from tests.oracles.draws import mixed, of_name


def _stream(seed: int, name: str, number: int) -> Callable[[list[int]], int]:
    """Return a function that draws one of some numbers, from a stream of random numbers of its own."""
    calls = itertools.count(1)
    return lambda among: among[mixed(seed, of_name(name), number, next(calls)) % len(among)]


def _grow(choose: Callable[[list[int]], int], num_cells: int, fewest: int) -> set[int]:
    """Return each cell with probability 1/2, and others until there are `fewest`."""
    cells = {cell for cell in range(num_cells) if choose([0, 1]) == 1}
    while len(cells) < fewest:
        cells.add(choose([c for c in range(num_cells) if c not in cells]))
    return cells


def _mutate(
    parent: frozenset[int], choose: Callable[[list[int]], int], num_cells: int, num_mutations: int, fewest: int
) -> set[int]:
    """Return a parent's cells after `num_mutations`, each of which adds or removes one cell that hasn't changed yet."""
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
    """Return architecture, parent and scores of every individual that is trained; larger scores are better.

    Args:
        fitness: the score of (individual's number, its cells, number of its training period from 1).
        num_cells: cells that architectures may have.
        first: cells of the first individual.
        population_size: number of living individuals.
        sample_size: of tournaments.
        num_mutations: per child.
        fewest: cells of an architecture.
        remove_oldest: whether the oldest dies, else the worst of a tournament.
        max_hurdles: most hurdles that are set; an individual that clears one trains for another period.
        seed: of the random numbers.
        num_periods: training periods of all individuals together.
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
