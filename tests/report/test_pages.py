"""The comparison of pages reports a wrong word and a wrong number, and nothing else."""

import pytest

from tests.report.pages import differences

LINE = "| VGG-16, 4x4 (A) | 5.22x [5.10x to 5.30x] | 1,547 samples/s | 0.99 |"


@pytest.mark.parametrize(("old", "new"), [("5.22x", "5.23x"), ("1,547", "1,549"), ("0.99", "1.00"), ("5.30x", "5.32x")])
def test_numbers_may_differ_a_little(old: str, new: str) -> None:
    assert differences(f"a\n{LINE}", f"a\n{LINE.replace(old, new)}") == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("5.22x", "5.26x"), ("1,547", "1,560"), ("VGG-16", "VGG-19"), ("4x4", "2x8"), ("(A)", "(B)"),
        ("5.22x", "missed"), ("samples/s", "samples"), ("to 5.30x", ""),
    ],
)  # fmt: skip
def test_words_and_numbers_may_not_differ_more(old: str, new: str) -> None:
    assert len(differences(f"a\n{LINE}", f"a\n{LINE.replace(old, new)}")) == 1


def test_lines_may_not_be_missing() -> None:
    assert differences("a\nb", "a") == ["2 lines, then 1"]
