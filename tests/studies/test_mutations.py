"""Mutations of single operators and numbers: their places and results, and that probes change nothing."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from reports.studies import mutants
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


def test_probes_report_executed_lines_and_change_no_result() -> None:
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


def test_a_study_resumes_after_its_last_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def judged(root: Path, drawn: Sequence[tuple[mutants.Mutant, object]], *_: object) -> list[mutants.Mutant]:
        for mutant, _change in drawn[:2]:
            asked.append(mutant.number)
            mutant.verdict = "caught" if mutant.number % 2 else "survived"
        return [mutant for mutant, _change in drawn[:2]]

    monkeypatch.setattr(mutants, "judged", judged)
    for found in (["survived", "caught", "", ""], ["survived", "caught", "survived", "caught"]):
        drawn = [(mutants.Mutant(number, "a.py", 1, "a -> b"), SOURCE) for number in range(4)]
        mutants.judge_all(tmp_path, drawn, mutants.Ran(), tmp_path, tmp_path / "verdicts")  # type: ignore[arg-type]
        assert [mutant.verdict for mutant, _ in drawn] == found
    assert asked == [0, 1, 2, 3]
