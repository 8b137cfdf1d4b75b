import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipebench.planner.cost_models import StageGrid
from pipebench.planner.memory import MemoryRule
from pipebench.planner.state_graph import prefixes
from pipebench.profile.model import LayerProfile
from pipebench.schedule.modes import KEEP, RECOMPUTE
from tests.oracles import planning
from tests.planner.problems import as_set, cases, graphs


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_replica_keeps_the_formula_s_bytes_and_the_fewest_that_fit_are_found(data: st.DataObject) -> None:
    case = data.draw(cases("sosp19").filter(lambda case: case.memory is not None))
    memory, rule, last = case.memory, case.search.memory, len(case.states) - 1
    assert memory is not None
    assert rule is not None
    for start in range(last):
        behind = np.array(
            [0.0 if stop == last else data.draw(st.integers(0, 40)) for stop in range(start + 1, last + 1)]
        )
        grid = StageGrid(case.work, np.array([start]), start + 1)
        least = memory.least(memory.parts(grid), behind, 41)
        for stop in np.flatnonzero(case.states.inside[start]):
            before, after = case.members(start), case.members(int(stop))
            for in_flight, m in ((1, 1), (2, 1), (5, 1), (1, 2), (2, 4)):
                expected = case.search.given.num_bytes(before, after, in_flight, rule, m)
                assert memory.num_bytes(case.states, start, int(stop), in_flight, m) == expected
            workers = int(behind[stop - start - 1])
            fitting = [m for m in range(1, 42) if case.search.given.fits(before, after, m, Fraction(workers), rule)]
            found = least[stop - start - 1]
            assert (found if found < 42 else np.inf) == min(fitting, default=np.inf)
            for m in (1, 2, 7):
                fits = memory.fits(memory.parts(grid), m, workers)[0, stop - start - 1]
                assert fits == case.search.given.fits(before, after, m, Fraction(workers), rule)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_recomputed_activations_are_kept_once_and_their_inputs_per_minibatch(data: st.DataObject) -> None:
    rows = data.draw(graphs())
    again = data.draw(st.one_of(st.just({*range(len(rows) - 1)}), st.sets(st.integers(0, len(rows) - 2))))
    whole = prefixes(rows)
    states = whole.recomputing([RECOMPUTE if index in again else KEEP for index in range(len(rows) - 1)])
    given, last = planning.Given(rows, "sosp19"), len(states) - 1
    expected = planning.Memory(0.0, None, frozenset(again), 2, None)
    for start, stop in itertools.combinations(range(last + 1), 2):
        before, after = as_set(states.members[start]), as_set(states.members[stop])
        num_bytes = MemoryRule(0.0, state_bytes_per_byte=2.0).num_bytes(states, start, stop, 3)
        assert num_bytes == given.num_bytes(before, after, 3, expected)
        layers = [*(after - before), *([len(rows) - 1] if stop == last else [])]
        repeated = again | ({len(rows) - 1} if len(rows) - 2 in again else set())
        seconds = sum(rows[index].forward_s for index in layers if index in repeated)
        added = states.backward_s - whole.backward_s
        assert added[stop] - added[start] == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (MemoryRule(0), 3 * 100 + 100 + 3 * 30 + 2 * (7 + 5)),
        (MemoryRule(0, state_bytes_per_byte=2.0), 3 * 100 + 100 + 200 + 3 * 30 + 2 * (7 + 5)),
        (MemoryRule(0, versions=1), 100 + 100 + 3 * 30 + 2 * (7 + 5)),
        (MemoryRule(0, versions=2), 2 * 100 + 100 + 3 * 30 + 2 * (7 + 5)),
    ],
)
def test_three_minibatches_in_flight(rule: MemoryRule, expected: int) -> None:
    """Weights 100, kept for the backward 30, in 7, out 5."""
    rows = (
        LayerProfile("a", "Linear", 1, 1, 7, 7),
        LayerProfile("b", "Linear", 1, 1, 5, 5, (0,), parameter_sizes={"w": 100}, saved_bytes=30),
        LayerProfile("c", "Linear", 1, 1, 1, 1, (1,)),
        LayerProfile("loss", "loss", 0, 0, 0, 0, (2,)),
    )
    assert rule.num_bytes(prefixes(rows), 1, 2, 3) == expected


@pytest.mark.parametrize(
    ("m", "after", "expected"), [(1, 0, 1), (1, 3, 4), (2, 3, 3), (15, 1, 2), (4, 4, 2), (4, 5, 3)]
)
def test_minibatches_in_flight(m: int, after: int, expected: int) -> None:
    assert MemoryRule(0).depth(m, after) == expected
    assert MemoryRule(0, in_flight=2).depth(m, after) == 2
    assert MemoryRule(0, depth_at_most=2).depth(m, after) == min(2, expected)
