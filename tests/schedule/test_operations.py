"""The table of operations: every reader finds what it needs of every row."""

import string

from pipebench.schedule.operations import COMPUTE, COPY, MOVE, OPERATIONS, RECEIVE, ROUND, SEND, UNIT, WAIT, Op


def test_every_operation_has_a_row_and_letters_of_its_own() -> None:
    assert [*OPERATIONS] == [*Op]
    assert len({row.letters for row in OPERATIONS.values()}) == len(Op)


def test_what_can_be_drawn_or_labelled_says_how() -> None:
    for op, row in OPERATIONS.items():
        if row.role == COMPUTE:
            assert row.kind, op
        if row.role in (RECEIVE, COPY):
            assert row.kind, op
        if row.role in (COMPUTE, SEND, RECEIVE, WAIT):
            assert row.label, op


def test_descriptions_name_only_what_there_is_to_name() -> None:
    known = {UNIT: {"unit", "peer"}, MOVE: {"unit", "peer"}, ROUND: {"round", "others"}}
    for op, row in OPERATIONS.items():
        named = {name for _, name, _, _ in string.Formatter().parse(row.description) if name}
        assert named <= known[row.counts], op
