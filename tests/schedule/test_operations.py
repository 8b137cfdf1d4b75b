"""The table of operations: every reader finds what it needs of every row."""

import string

from pipebench.schedule.operations import COMPUTE, COPY, MOVE, OPERATIONS, RECEIVE, ROUND, SEND, UNIT, WAIT, Op


def test_every_operation_has_a_row_and_unique_letters() -> None:
    assert [*OPERATIONS] == [*Op]
    assert len({row.letters for row in OPERATIONS.values()}) == len(Op)


def test_operations_that_are_drawn_or_labelled_have_colour_and_label() -> None:
    for op, row in OPERATIONS.items():
        if row.role == COMPUTE:
            assert row.kind, op
        if row.role in (RECEIVE, COPY):
            assert row.kind, op
        if row.role in (COMPUTE, SEND, RECEIVE, WAIT):
            assert row.label, op


def test_descriptions_name_only_existing_fields() -> None:
    known = {UNIT: {"unit", "peer"}, MOVE: {"unit", "peer"}, ROUND: {"round", "others"}}
    for op, row in OPERATIONS.items():
        named = {name for _, name, _, _ in string.Formatter().parse(row.description) if name}
        assert named <= known[row.counts], op
