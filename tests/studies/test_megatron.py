"""Megatron-LM's tables: the quickest rows equal the current planner's, published values and ratios the file's."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from pipebench.planner import estimates, planner
from reports.studies import markdown
from reports.studies.megatron import (
    GATHERED_BYTES_PER_S,
    LARGE,
    LARGER,
    MOST_WORKERS,
    SENT_BYTES,
    compared,
    flops,
    parameters,
    planned,
    scaled,
)
from tests.studies.again import check_rows

REPORTS = Path(__file__).parents[2] / "reports"
PUBLISHED = yaml.safe_load((REPORTS / "published" / "sharding.yaml").read_text())["megatron"]


def rows(first: str) -> Iterator[list[str]]:
    """Yield the cells of the table whose first heading is this."""
    table = (REPORTS / "megatron.md").read_text().split(f"\n| {first} |", 1)[1]
    for line in table.split("\n\n")[0].splitlines()[2:]:
        yield [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]


def is_ratio(ratio: str, computed: str, published: str) -> bool:
    """Return whether a ratio is that of two rates, all of them rounded."""
    rate = float(published)
    return abs(float(ratio) - float(computed) / rate) <= 0.5 / rate + 0.0051


def test_every_row_of_weak_scaling_has_its_published_rate() -> None:
    published = {str(row["billions"]): row["tflops"] for row in PUBLISHED["weak_scaling"]}
    assert len(published) == 10
    found = list(rows("billions of parameters"))
    assert {row[0] for row in found} == {*published}
    for billions, _, _, _, computed, rate, ratio in found:
        assert int(rate) == published[billions]
        assert is_ratio(ratio, computed, rate)
        assert abs(float(ratio) - 1) <= 0.2, "the page says that the goal is met on all rows"


def test_every_cell_of_zero_3_and_slices_has_its_published_rate() -> None:
    found = list(rows("GPUs"))
    assert len(found) == 12
    for shape, name in ((LARGE, "against_zero3"), (LARGER, "against_zero3_larger")):
        for way, key in (("ZeRO-3", "zero3"), ("PTD", "ptd")):
            own = [row for row in found if row[2] == way and row[1] == f"{parameters(shape) / 1e9:.1f}"]
            expected = [(row["gpus"], row["microbatch"], row["tflops"]) for row in PUBLISHED[name][key]]
            assert [(int(row[0]), int(row[3]), int(row[6])) for row in own] == expected
            for row in (each for each in own if each[5] != "-"):
                assert is_ratio(row[7], row[5], row[6])
                assert (abs(float(row[7]) - 1) <= 0.2) is (way == "PTD"), "as the page says"
                if way == "ZeRO-3":
                    assert is_ratio(row[9], row[8], row[6])
                    assert abs(float(row[9]) - 1) <= 0.145, "as the page says"


def test_zero_3_s_exchanges_at_the_measured_rate_take_less_than_its_published_updates() -> None:
    """Otherwise no time would be left for computing."""
    for shape, name in ((LARGE, "against_zero3"), (LARGER, "against_zero3_larger")):
        exchange_s = SENT_BYTES * parameters(shape) / GATHERED_BYTES_PER_S
        for row in PUBLISHED[name]["zero3"]:
            batch = row.get("batch", shape["batch"])
            update_s = flops(shape, batch) / row["gpus"] / row["tflops"] / 1e12
            tokens_days = 300e9 / (batch * 2048) * update_s / 86_400
            assert tokens_days == pytest.approx(row["days_for_300B_tokens"], rel=0.03)
            assert 0.4 * update_s < exchange_s < update_s


def test_a_quick_row_of_weak_scaling_is_reproduced() -> None:
    """Of the smallest model, with the fewest passes per update."""
    check_rows(
        [markdown.row(scaled(PUBLISHED["weak_scaling"][0], 4))], "megatron.md", "python -m reports.studies.megatron"
    )


@pytest.mark.slow
def test_a_row_of_zero_3_and_a_cell_of_slices_and_stages_are_reproduced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Profiles of models as large take longer than their plans; as the script does, 384 workers are simulated."""
    for module in (estimates, planner):
        monkeypatch.setattr(module, "MOST_SIMULATED", MOST_WORKERS)
    row = markdown.row(next(compared(LARGE, PUBLISHED["against_zero3"])))
    check_rows([row], "megatron.md", "python -m reports.studies.megatron zero3")
    published = {key: PUBLISHED["split"][key] for key in ("heads", "hidden", "layers", "gpus")}
    rate, _ = planned({**published, "batch": 32, "tensor": 4, "pipeline": 16}, 1)
    (cells,) = (cells for cells in rows("tensor, pipeline") if cells[0] == "4, 16")
    assert cells[1] == f"{rate:.0f}", "reports/megatron.md is old: see `python -m reports.studies.megatron split`"
