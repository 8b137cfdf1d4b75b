"""The page of Megatron-LM's tables: published values and ratios are those of the file of published values."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

REPORTS = Path(__file__).parents[2] / "reports"
PUBLISHED = yaml.safe_load((REPORTS / "published" / "sharding.yaml").read_text())["megatron"]


def rows(first: str) -> Iterator[list[str]]:
    """Yield the cells of the table whose first heading is this."""
    _, table = (REPORTS / "megatron.md").read_text().split(f"| {first} |")
    for line in table.split("\n\n")[0].splitlines()[2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


def ratio(computed: str, published: str) -> float:
    return float(computed) / float(published)


def test_every_row_of_weak_scaling_has_its_published_rate() -> None:
    published = {str(row["billions"]): row["tflops"] for row in PUBLISHED["weak_scaling"]}
    found = list(rows("billions of parameters"))
    assert {row[0] for row in found} == {*published}
    for billions, _, _, _, computed, rate, told in found:
        assert int(rate) == published[billions]
        assert float(told) == pytest.approx(ratio(computed, rate), abs=0.011)
        assert abs(float(told) - 1) <= 0.2, "the page says that the goal is met on all rows"


def test_every_row_of_zero_3_and_slices_has_its_published_rate() -> None:
    found = list(rows("GPUs"))
    for way, name in (("ZeRO-3", "zero3"), ("PTD", "ptd")):
        own = [row for row in found if row[1] == way]
        expected = [(row["gpus"], row["microbatch"], row["tflops"]) for row in PUBLISHED["against_zero3"][name]]
        assert [(int(row[0]), int(row[2]), int(row[5])) for row in own] == expected
        for row in own:
            assert float(row[6]) == pytest.approx(ratio(row[4], row[5]), abs=0.011)
            assert (abs(float(row[6]) - 1) <= 0.2) is (way == "PTD"), "as the page says"
