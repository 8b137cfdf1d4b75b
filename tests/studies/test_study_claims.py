"""Claims on studies: the numbers of a page that they read, and refusals."""

from pathlib import Path

import pytest

from pipebench.errors import RecipeError
from reports.studies.study_claims import cells_of, judge, read_study_claim

PAGE = """# A study

## fast: of two

| way | took (range) | seeds |
| --- | --- | --- |
| stashing | 254 ms (215 ms to 293 ms) | 3 of 3 |
| vertical | 1.2 s (1.0 s to 1.3 s) | missed |

## slow: of two

| way | took (range) | saved |
| --- | --- | --- |
| stashing | 1,254 us | 95% |
| stashing | 7 s | 1% |
"""
COLUMNS = {"took": ("took (range)", 0), "most": ("took (range)", 2)}
CLAIM = {"page": "page.md", "columns": {"took": "took (range)"}, "text": "Vertical sync costs little"}


def test_numbers_are_read_with_units_and_from_the_first_row_of_a_name() -> None:
    found = cells_of(PAGE, "", COLUMNS)
    assert found["took"] == pytest.approx({"stashing": 0.254, "vertical": 1.2})
    assert found["most"] == pytest.approx({"stashing": 0.293, "vertical": 1.3})
    slow = cells_of(PAGE, "slow", {"took": ("took (range)", 0), "saved": ("saved", 0)})
    assert slow == {"took": {"stashing": pytest.approx(1254e-6)}, "saved": {"stashing": pytest.approx(0.95)}}
    assert cells_of(PAGE, "fast", {"seeds": ("seeds", 1)}) == {"seeds": {"stashing": 3.0}}  # missed is no number


@pytest.mark.parametrize(
    ("given", "answer", "number"),
    [
        ({"holds": 'took["vertical"] <= 5 * took["stashing"]', "tolerance": "five times"}, "yes", None),
        ({"value": 'took["vertical"] / took["stashing"]', "unit": "x", "published": 1, "within": 0.2}, "no", 4.724),
        (
            {"value": "max(took)", "unit": "s", "published": 8, "holds": "max(took) < 8", "tolerance": "none"},
            "yes",
            1.2,
        ),
    ],
)
def test_a_claim_is_judged_on_the_page(tmp_path: Path, given: dict[str, object], answer: str, number: float) -> None:
    (tmp_path / "page.md").write_text(PAGE)
    claim = read_study_claim(CLAIM | given, "source.entry", "coverage.yaml", tmp_path)
    found, value = judge(claim, tmp_path)
    assert found.answer == answer
    assert value == (None if number is None else pytest.approx(number, rel=1e-3))
    assert claim.is_bound == ("holds" in given and "value" in given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"holds": 'took["vertcal"] < 1'}, "no row is named 'vertcal'"),
        ({"columns": {"took": "seconds"}, "holds": "max(took) < 1"}, "no table has a column 'seconds'"),
        ({"page": "pages.md", "holds": "max(took) < 1"}, "pages.md"),
        ({"value": "max(took)", "unit": "s", "published": 1}, "needed is holds, or value with published and within"),
        ({"value": "max(took)", "unit": "s", "within": 0.1}, "'published'"),
        ({"hold": "max(took) < 1"}, "unknown key, allowed here are page, section"),
    ],
)
def test_faults_are_reported_with_their_key(tmp_path: Path, given: dict[str, object], message: str) -> None:
    (tmp_path / "page.md").write_text(PAGE)
    with pytest.raises(RecipeError, match=r"coverage\.yaml.*source\.entry") as caught:
        read_study_claim(CLAIM | given, "source.entry", "coverage.yaml", tmp_path)
    assert message in str(caught.value)
