"""Changes of single operators and numbers: where they are, what they make, and that probes change nothing."""

from reports.studies.mutations import mutations, probed

SOURCE = b'''"""A module."""
LIMIT = 3


def inside(value: int, most: int = 4) -> bool:
    if value < 0 and not most:
        raise ValueError(f"{value + 1} is more than {most - 1}")
    return value * 2 in (LIMIT, most) or True
'''


def test_every_operator_and_number_of_a_function_is_changed_once() -> None:
    made = [each.applied(SOURCE).decode().splitlines() for each in mutations(SOURCE)]
    before = SOURCE.decode().splitlines()
    changed = [[line.strip() for line, old in zip(after, before, strict=True) if line != old] for after in made]
    assert all(len(lines) == 1 for lines in changed)
    assert sorted(line for (line,) in changed) == [
        "if value < (0 + 1) and not most:",
        "if value < 0 and  most:",
        "if value < 0 or not most:",
        "if value <= 0 and not most:",
        "return value * (2 + 1) in (LIMIT, most) or True",
        "return value * 2 in (LIMIT, most) and True",
        "return value * 2 in (LIMIT, most) or False",
        "return value * 2 not in (LIMIT, most) or True",
        "return value / 2 in (LIMIT, most) or True",
    ]


def test_probes_tell_what_runs_and_change_no_result() -> None:
    hits: list[int] = []
    names: dict[str, object] = {"hit": hits.append}
    exec(probed(SOURCE, enumerate(mutations(SOURCE)), "hit"), names)
    plain: dict[str, object] = {}
    exec(SOURCE, plain)
    for value in (0, 1, 2, 5):
        assert names["inside"](value) == plain["inside"](value)  # type: ignore[operator]
    assert {*hits} == {*range(len(mutations(SOURCE)))} - {
        index for index, each in enumerate(mutations(SOURCE)) if SOURCE[each.node_start : each.node_stop] == b"not most"
    }
