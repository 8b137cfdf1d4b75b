import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings

from pipebench.errors import PlanError
from pipebench.planner.state_graph import MAX_STATES, antichains, prefixes
from pipebench.planner.states import States
from pipebench.profile.model import LayerProfile
from tests.oracles import planning
from tests.planner.problems import as_set, chain, graphs


def _layer(name: str, *reads: int, kind: str = "Linear", is_input: bool = False) -> LayerProfile:
    return LayerProfile(name, kind, 1.0, 2.0, 4, 4, reads, is_input=is_input)


def _sets(states: States) -> list[list[int]]:
    return [sorted(as_set(members)) for members in states.members]


@settings(max_examples=60, deadline=None)
@given(rows=graphs())
def test_states_and_their_sums_are_the_oracles(rows: tuple[LayerProfile, ...]) -> None:
    for states, expected in ((antichains(rows), planning.grown(rows)), (prefixes(rows), planning.in_order(rows))):
        members = [as_set(each) for each in states.members]
        assert len(set(members)) == len(members)
        assert set(members) == expected
        assert members[0] == planning.EMPTY
        assert [len(each) for each in members] == sorted(len(each) for each in members)
        assert states.is_chain == all(a < b for a, b in itertools.pairwise(members))
        given_rows = planning.Given(rows, "overlap")
        assert members[-1] == given_rows.whole
        for index, state in enumerate(members):
            layers = given_rows.layers(planning.EMPTY, state)
            assert states.forward_s[index] == pytest.approx(sum(row.forward_s for row in layers))
            assert states.backward_s[index] == pytest.approx(sum(row.backward_s for row in layers))
            assert states.saved_bytes[index] == sum(row.saved_bytes for row in layers)
            assert states.parameter_bytes[index] == given_rows.weight_bytes(planning.EMPTY, state)
            assert states.num_loading[index] == sum(bool(row.inputs) for row in layers)
            assert states.sent_bytes[index] == given_rows.sent_bytes(state)
            assert states.returned_bytes[index] == given_rows.returned_bytes(state)
            if state not in (planning.EMPTY, given_rows.whole):
                carried = sum(rows[each].output_bytes for each in planning.augmented(rows, state))
                assert states.antichain_bytes[index] == carried
            for other, larger in enumerate(members):
                assert states.inside[index, other] == (state < larger)


@pytest.mark.parametrize("rule", [antichains, prefixes])
def test_a_profile_of_only_a_loss_has_nothing_to_plan(rule: Callable[[Sequence[LayerProfile]], States]) -> None:
    with pytest.raises(PlanError, match="the profile has no layer to plan"):
        rule((_layer("loss"),))


def test_a_chain_is_cut_everywhere_under_both_rules() -> None:
    rows = chain(300, seed=0)
    assert antichains(rows).members == prefixes(rows).members == tuple((1 << count) - 1 for count in range(301))


def test_states_grow_from_the_first_source_and_another_source_joins_its_first_reader() -> None:
    rows = (_layer("a"), _layer("b"), _layer("c", 0, 1), _layer("d", 0), _layer("loss", 2, 3))
    assert _sets(antichains(rows)) == [[], [0], [0, 3], [0, 1, 2], [0, 1, 2, 3]]
    assert _sets(prefixes(rows)) == [[], [0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]


def test_model_inputs_and_unread_items_are_no_layers() -> None:
    rows = (
        _layer("in", kind="Input", is_input=True),
        _layer("a", 0),
        _layer("item", 1, kind="__getitem__0"),
        _layer("unread", 1, kind="__getitem__1"),
        _layer("b", 2),
        _layer("loss", 4),
    )
    assert _sets(antichains(rows)) == _sets(prefixes(rows)) == [[], [1], [1, 2], [1, 2, 4]]


def test_a_layer_without_readers_still_has_a_place() -> None:
    rows = (_layer("a"), _layer("dead"), _layer("b", 0), _layer("loss", 2))
    assert _sets(antichains(rows)) == [[], [0], [0, 2], [0, 1, 2]]


def test_a_wide_graph_is_cut_along_its_order_of_execution() -> None:
    width = MAX_STATES.bit_length() + 1
    rows = (_layer("a"), *(_layer(f"b{i}", 0) for i in range(width)), _layer("loss", *range(1, width + 1)))
    assert antichains(rows).members == prefixes(rows).members


@pytest.mark.parametrize("cut", [prefixes, antichains])
def test_nothing_to_plan_is_an_error(cut: Callable[[tuple[LayerProfile, ...]], States]) -> None:
    with pytest.raises(PlanError, match="the profile has no layer to plan"):
        cut((_layer("in", kind="Input", is_input=True), _layer("loss", 0)))
