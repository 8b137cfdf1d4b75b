"""The schedules the papers print, cell by cell."""

import pathlib

import pytest
import yaml

from pipebench.schedule.pipeline import Pipeline, chain, noam
from pipebench.simulate.drawing import blocks, draw_cells
from tests.pictures import draw

PUBLISHED = pathlib.Path(__file__).parents[2] / "reports" / "published" / "pipeline_theory.yaml"

TWO_ONE = """\
stage 0 replica 0  F0  F0  F2  F2  B0  B0  .   .   F4  F4  B2  B2  F6  F6  B4  B4
stage 0 replica 1  F1  F1  F3  F3  .   .   B1  B1  F5  F5  B3  B3  F7  F7  B5  B5
stage 1            .   .   F0  B0  F1  B1  F2  B2  F3  B3  F4  B4  F5  B5  F6  B6"""

GPIPE = """\
stage 0  F0  F1  F2  F3  .   .   .   .   .   .   B3  B2  B1  B0
stage 1  .   F0  F1  F2  F3  .   .   .   .   B3  B2  B1  B0  .
stage 2  .   .   F0  F1  F2  F3  .   .   B3  B2  B1  B0  .   .
stage 3  .   .   .   F0  F1  F2  F3  B3  B2  B1  B0  .   .   ."""

FLUSH = """\
stage 0  F0  F1  F2  F3  .   .   .   B0  .   B1  .   B2  .   B3
stage 1  .   F0  F1  F2  .   .   B0  F3  B1  .   B2  .   B3  .
stage 2  .   .   F0  F1  .   B0  F2  B1  F3  B2  .   B3  .   .
stage 3  .   .   .   F0  B0  F1  B1  F2  B2  F3  B3  .   .   ."""


def straight(order: str, *, flushes: bool, depth: int = 4, microbatches: int = 1) -> Pipeline:
    return Pipeline((1, 1, 1, 1), chain(4), order, flushes, depth, microbatches)


@pytest.mark.parametrize(
    ("table", "pipeline", "num_minibatches", "backward"),
    [
        ("naive-schedule-n4", straight("1f1b", flushes=True, depth=1), 1, 1),
        ("gpipe-schedule-n4-m4", straight("all-forwards", flushes=True, microbatches=4), 1, 1),
        ("pd-flush-schedule-n4-m4", straight("1f1b", flushes=True, microbatches=4), 1, 1),
        ("pd-flush-schedule-n4-m8", straight("1f1b", flushes=True, microbatches=8), 1, 1),
        ("pd-async-schedule-n4", straight("1f1b", flushes=False), 12, 2),
    ],
)
def test_published_table(table: str, pipeline: Pipeline, num_minibatches: int, backward: int) -> None:
    entries = {entry["id"]: entry for entry in yaml.safe_load(PUBLISHED.read_text())["entries"]}
    for stage, row in enumerate(draw_cells(pipeline, num_minibatches, [1] * 4, [backward] * 4)):
        published = entries[table]["values"]["schedule"][f"GPU{stage}"]
        from_one = [cell and f"{cell[0]}{int(cell[1:]) + 1}" for cell in row]
        assert from_one[: len(published)] == published, f"stage {stage}"


def _first_columns(picture: str, columns: int) -> str:
    return "\n".join(line[: 19 + 4 * columns].rstrip() for line in picture.splitlines())


@pytest.mark.parametrize("width", [20, 40, 41, 80])
def test_a_drawing_may_be_cut_to_a_width_by_whole_cells(width: int) -> None:
    pipeline = straight("1f1b", flushes=False)
    whole = draw(pipeline, 12, [1] * 4, [2] * 4).splitlines()
    cut = draw(pipeline, 12, [1] * 4, [2] * 4, width=width).splitlines()
    assert max(map(len, cut)) <= width < max(map(len, whole))
    for short, line in zip(cut, whole, strict=True):
        assert line.startswith(short)
        assert line[len(short) : len(short) + 1] in ("", " ")
    assert max(map(len, cut)) > width - 6, "as much as fits: a cell and its blanks are five"


def test_two_one() -> None:
    """PipeDream figure 8: the first stage takes twice as long and is replicated twice."""
    pipeline = Pipeline((2, 1), chain(2), "1f1b", False, noam((2, 1)))
    assert _first_columns(draw(pipeline, 8, [2, 1], [2, 1]), 16) == TWO_ONE


@pytest.mark.parametrize(("order", "picture"), [("all-forwards", GPIPE), ("1f1b", FLUSH)])
def test_flushing_orders_of_four_microbatches(order: str, picture: str) -> None:
    pipeline = straight(order, flushes=True, microbatches=4)
    drawn = draw(pipeline, 1, [1] * 4, [1] * 4)
    assert drawn == picture


def test_noam_is_the_paper_s() -> None:
    assert [noam(r) for r in ((1, 1, 1, 1), (2, 1), (15, 1), (2, 1, 1), (16,), (3, 1, 1, 1))] == [4, 2, 2, 2, 1, 2]


@pytest.mark.parametrize("width", [40, 100, 1000])
def test_a_long_pipeline_s_picture_is_continued_until_every_worker_runs_backward(width: int) -> None:
    """Sixteen stages on a terminal had seven rows of dots."""
    pipeline = Pipeline((1,) * 16, chain(16), "1f1b", False, 16)
    cells = draw_cells(pipeline, 20, [1] * 16, [2] * 16)
    parts = [[line.split()[2:] for line in block.splitlines()] for block in blocks(pipeline, cells, width)]
    assert {len(part) for part in parts} == {16}
    together = [[cell for part in parts for cell in part[worker]] for worker in range(16)]
    assert all({"F0", "B0"} <= {*row} for row in together)
    assert "B0" in parts[-1][0], "and not much longer"
    shown = [[cell or "." for cell in row] for row in cells]
    assert all("".join(whole).startswith("".join(row)) for whole, row in zip(shown, together, strict=True))
