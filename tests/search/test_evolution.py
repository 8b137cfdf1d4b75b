"""Evolution against an independent implementation, and its properties."""

import dataclasses
import itertools
import math

import pytest

from pipebench.extensions.search.recipe import OLDEST, WORST, SearchRecipe
from pipebench.extensions.search.strategy import Evolution
from tests.oracles.evolution import evolve

RULES = SearchRecipe(population=5, tournament=3, mutations=1, smallest=1, removes=OLDEST, hurdles=0)
ALL = frozenset(range(6))


def fitness(number: int, cells: frozenset[int], period: int) -> float:
    """Cells with even indices and longer training increase it, with some noise."""
    luck = math.sin(12.9898 * number + 78.233 * period) * 0.3
    return sum(1 if cell % 2 == 0 else -0.5 for cell in cells) + 0.2 * period + luck


def searched(
    rules: SearchRecipe, periods: int, sign: float = 1.0, *, first: frozenset[int] = ALL, seed: int = 7
) -> Evolution:
    evolution = Evolution(rules, len(ALL), first, larger_is_better=sign > 0, seed=seed)
    for _ in range(periods):
        it = evolution.current
        evolution.add_score(sign * fitness(it.number, it.cells, len(it.scores) + 1), 0)
    return evolution


@pytest.mark.parametrize("removes", [OLDEST, WORST])
@pytest.mark.parametrize(("population", "tournament"), [(1, 1), (4, 2), (5, 3), (3, 8)])
@pytest.mark.parametrize(("mutations", "smallest", "hurdles"), [(1, 0, 0), (2, 3, 1), (4, 1, 3), (9, 6, 2)])
def test_a_search_equals_the_papers_algorithm(
    removes: str, population: int, tournament: int, mutations: int, smallest: int, hurdles: int
) -> None:
    for seed, first in itertools.product((0, 3), (frozenset(range(6)), frozenset({1, 2, 5, 0, 3, 4}))):
        rules = dataclasses.replace(
            RULES, removes=removes, population=population, tournament=tournament, mutations=mutations,
            smallest=smallest, hurdles=hurdles,
        )  # fmt: skip
        found = searched(rules, 60, first=first, seed=seed).individuals
        expected = evolve(
            fitness, num_cells=6, first=set(first), population_size=population, sample_size=tournament,
            num_mutations=mutations, fewest=smallest, remove_oldest=removes == OLDEST, max_hurdles=hurdles,
            seed=seed, num_periods=60,
        )  # fmt: skip
        trained = [(each.cells, each.parent, [*each.scores]) for each in found if each.scores]
        assert trained == expected
        assert len(trained) > 15


def test_the_same_seed_searches_alike_and_another_one_does_not() -> None:
    a, again, other = (searched(RULES, 40, seed=seed).individuals for seed in (7, 7, 8))
    assert a == again
    assert [each.cells for each in a] != [each.cells for each in other]


def test_smaller_scores_can_be_better() -> None:
    larger = searched(RULES, 40)
    smaller = searched(RULES, 40, sign=-1.0)
    assert [each.cells for each in larger.individuals] == [each.cells for each in smaller.individuals]
    assert larger.best is not None
    assert smaller.best is not None
    assert larger.best.number == smaller.best.number


def test_evolution_finds_better_architectures_than_its_first_population_had() -> None:
    found = searched(RULES, 120)
    assert found.best is not None
    assert found.best.cells == {0, 2, 4}
    assert found.best.number >= RULES.population


def test_children_differ_from_their_parents_by_as_many_cells_as_mutate() -> None:
    for each in searched(dataclasses.replace(RULES, mutations=2), 50).individuals[RULES.population :]:
        parent = searched(dataclasses.replace(RULES, mutations=2), 50).individuals[each.parent or 0]
        assert each.cells ^ parent.cells == each.changed
        assert len(each.changed) == 2


def test_individuals_that_clear_a_hurdle_are_trained_further() -> None:
    found = searched(dataclasses.replace(RULES, hurdles=2), 200)
    assert len(found.hurdles) == 2
    assert {len(each.scores) for each in found.individuals[RULES.population : -1]} == {1, 2, 3}
    for each in found.individuals[2 * RULES.population : -1]:
        over = [score > hurdle for score, hurdle in zip(each.scores, found.hurdles, strict=False)]
        assert all(over[: len(each.scores) - 1])


def test_nothing_is_best_before_there_is_a_score() -> None:
    assert searched(RULES, 0).best is None
