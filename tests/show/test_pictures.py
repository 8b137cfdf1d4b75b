"""Timelines as images and text, and accuracy over time: the content of pictures, not their style."""

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backend_bases import RendererBase

from pipebench.schedule.operations import ACTIVATION, GRADIENT
from pipebench.schedule.syncs import ALL_REDUCE
from pipebench.show.inline import InlineFigure
from pipebench.show.pictures import metric_figure, natural_unit_s, readable_end_s, text_picture, timeline_figure
from pipebench.simulate.timeline import EVALUATE, Span, Timeline, Transfer
from pipebench.train.result import MISSED, REACHED, Point, RunResult

RESULT = RunResult(
    name="pipedream",
    mode="pipedream",
    plan="straight",
    engine="virtual",
    clock="virtual",
    timing="analytic",
    seed=0,
    outcome=REACHED,
    sentence="",
    metrics={"time_to_accuracy_s": 2.0},
    points=tuple(Point(i, float(i), {"top1": 0.3 * i}) for i in (1, 2, 3)),
)


def parse(rows: dict[str, str], unit_s: float = 1e-3) -> Timeline:
    """Make a timeline from its drawing: one cell of one unit per word, equal neighbours being one span."""
    kinds = {"F": "forward", "B": "backward", "U": "update", ".": "wait"}
    spans: list[Span] = []
    for worker, cells in enumerate(row.split() for row in rows.values()):
        start = 0
        for end in range(1, len(cells) + 1):
            if end == len(cells) or cells[end] != cells[start]:
                label = cells[start]
                minibatch = int(label[1:]) if label != "." else -1
                spans.append(Span(worker, kinds[label[0]], label, start * unit_s, end * unit_s, minibatch))
                start = end
    spans.sort(key=lambda span: span.start_s)
    transfers = (
        Transfer(ACTIVATION, "F0", (0,), (1,), "server", 100, unit_s, 1.5 * unit_s),
        Transfer(GRADIENT, "B0", (1,), (0,), "server", 100, 3 * unit_s, 3.5 * unit_s),
        Transfer(ALL_REDUCE, "R0", (0, 1), (0, 1), "server", 100, 4 * unit_s, 5 * unit_s),
    )
    return Timeline(tuple(rows), tuple(spans), transfers, truncated=False)


TWO_STAGES = {
    "stage 0": "F0 F1 .  .  B0 B0 F2 .  B1 B1 .  .  B2 B2",
    "stage 1": ".  .  F0 B0 .  F1 B1 .  .  F2 B2 .  .  . ",
}


def bars(timeline: Timeline) -> dict[str, Any]:
    return {str(bar.get_label()): bar for bar in timeline_figure(timeline).axes[0].collections}


def test_every_worker_has_bars_of_every_kind_at_their_times() -> None:
    drawn = bars(parse(TWO_STAGES))
    for worker in (0, 1):
        for kind in ("forward", "backward", "wait", "all-reduce"):
            assert f"{kind} {worker}" in drawn
    assert "activation 0" in drawn
    assert "gradient 1" in drawn
    edges = [path.get_extents() for path in drawn["backward 0"].get_paths()]
    assert [(edge.x0, edge.x1) for edge in edges] == [pytest.approx(pair) for pair in [(4, 6), (8, 10), (12, 14)]]


def test_rows_go_down_and_strips_lie_below_their_boxes() -> None:
    timeline = parse(TWO_STAGES)
    drawn, axes = bars(timeline), timeline_figure(timeline).axes[0]
    bottom, top = axes.get_ylim()
    assert bottom > top
    for worker in (0, 1):
        box = drawn[f"forward {worker}"].get_paths()[0].get_extents()
        strip = drawn[f"all-reduce {worker}"].get_paths()[0].get_extents()
        assert worker - 0.5 < box.y0 < box.y1 < strip.y0 < strip.y1 < worker + 0.5
    assert [label.get_text() for label in axes.get_yticklabels()] == ["stage 0", "stage 1"]


def test_boxes_have_minibatch_numbers_and_the_axis_its_unit() -> None:
    axes = timeline_figure(parse(TWO_STAGES)).axes[0]
    assert sorted(text.get_text() for text in axes.texts) == sorted(["0", "1", "2"] * 4)
    assert "[ms]" in axes.get_xlabel()
    assert "goes on" not in axes.get_xlabel()
    assert "[us]" in timeline_figure(parse(TWO_STAGES, unit_s=1e-8)).axes[0].get_xlabel()


def test_a_long_timeline_shows_its_first_part() -> None:
    long = parse({"stage 0": " ".join(f"F{i} B{i}" for i in range(500)), "stage 1": "."})
    figure = timeline_figure(long)
    assert 0.01 < readable_end_s(long) < 0.1
    assert figure.axes[0].get_xlim()[1] == pytest.approx(readable_end_s(long) * 1e3)
    assert "goes on" in figure.axes[0].get_xlabel()


def test_the_picture_never_ends_before_the_pipeline_is_full() -> None:
    filling = parse({"stage 0": " ".join(f"F{i}" for i in range(200)) + " B0", "stage 1": "."})
    assert readable_end_s(filling) == pytest.approx(0.201)


@pytest.mark.usefixtures("rendered")
def test_the_timeline_file_is_a_png_of_a_readable_size_that_is_drawn_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, draw = [], InlineFigure.draw

    def counted(figure: InlineFigure, renderer: RendererBase) -> None:
        drawn.append(figure)
        draw(figure, renderer)

    monkeypatch.setattr(InlineFigure, "draw", counted)
    timeline_figure(parse(TWO_STAGES)).write(tmp_path / "timeline.png")
    content = (tmp_path / "timeline.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", content[16:24])
    assert width == 14 * 110
    assert 200 <= height <= 600
    assert len(drawn) == 1


@pytest.mark.parametrize("spans", [(), (Span(0, "update", "U0", 0.0, 0.0, -1),)])
def test_an_empty_timeline_is_drawn(spans: tuple[Span, ...], tmp_path: Path) -> None:
    timeline = Timeline(("stage 0",), spans, (), truncated=False)
    timeline_figure(timeline).write(tmp_path / "timeline.png")
    metric_figure([], "top1").write(tmp_path / "curves.png")
    assert "stage 0" in text_picture(timeline) or text_picture(timeline) == ""


def test_curves_are_against_the_clock_with_a_star_where_the_target_was_reached() -> None:
    missed = replace(RESULT, name="dp", outcome=MISSED, metrics={})
    axes = metric_figure([RESULT, missed], "top1").axes[0]
    curve, star, other = axes.lines
    assert np.asarray(curve.get_xdata()).tolist() == [1.0, 2.0, 3.0]
    assert (np.asarray(star.get_xdata()).tolist(), np.asarray(star.get_ydata()).tolist()) == ([2.0], [0.6])
    assert (curve.get_label(), other.get_label()) == ("pipedream (straight)", "dp (straight), missed")
    assert curve.get_color() != other.get_color()
    assert axes.get_xlabel() == "virtual time [s], evaluation included; star: target reached"


def test_curves_of_a_missing_metric(tmp_path: Path) -> None:
    metric_figure([RESULT], "bleu").write(tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 0


def test_the_text_picture_equals_the_drawn_schedule() -> None:
    picture = text_picture(parse(TWO_STAGES), unit_s=1e-3, width=80)
    assert [line.split()[2:] for line in picture.splitlines()] == [row.split() for row in TWO_STAGES.values()]
    assert picture.splitlines()[0].startswith("stage 0  F0 F1 .  .  B0 B0")


def test_forwards_of_an_evaluation_have_another_letter() -> None:
    drawn = parse({"stage 0": "F0 B0 F0 F1 F0 B0", "stage 1": ". . F0 F1 . ."})
    spans = [replace(span, kind=EVALUATE) if 2e-3 <= span.start_s < 4e-3 else span for span in drawn.spans]
    picture = text_picture(replace(drawn, spans=tuple(spans)), unit_s=1e-3, width=80)
    assert [line.split()[2:] for line in picture.splitlines()] == [
        ["F0", "B0", "E0", "E1", "F0", "B0"],
        [".", ".", "E0", "E1", ".", "."],
    ]


def test_the_text_picture_keeps_to_its_width_and_unit() -> None:
    picture = text_picture(parse(TWO_STAGES), unit_s=2e-3, width=24)
    assert all(len(line) <= 24 for line in picture.splitlines())
    assert picture.splitlines()[0] == "stage 0  F0 .  B0 F2 B1"


def test_labels_that_grow_keep_a_blank_between_them() -> None:
    counting = parse({"stage 0": " ".join(f"F{i}" for i in range(120)), "stage 1": "."})
    for width in range(12, 140):
        picture = text_picture(counting, unit_s=1e-3, width=width)
        cells = picture.splitlines()[0].removeprefix("stage 0").split()
        assert cells == [f"F{i}" for i in range(len(cells))]
        assert max(map(len, picture.splitlines())) <= width
    assert text_picture(counting, unit_s=1e-3, width=45).splitlines()[0].endswith("F8 F9")


def test_a_long_pipeline_has_no_rows_of_dots() -> None:
    """Sixteen stages had rows of dots: the lines ended before the last stage began."""
    fill = {f"stage {i}": " ".join([*["."] * i, *(f"F{k}" for k in range(30))]) for i in range(16)}
    lines = text_picture(parse(fill), unit_s=1e-3, width=40).splitlines()
    assert lines[0] == "from 15.0 ms on, when all stages work"
    assert [line.split()[2] for line in lines[1:]] == [f"F{15 - i}" for i in range(16)]
    alone = {f"stage {i}": " ".join([*["."] * i, "F0", *["."] * (30 - 2 * i), "B0"]) for i in range(16)}
    lines = text_picture(parse(alone), unit_s=1e-3, width=40).splitlines()
    assert len(lines) == 16, "one minibatch at a time: longer cells"
    assert all("F0" in line or "B0" in line for line in lines)
    assert max(map(len, lines)) <= 40


def test_the_natural_unit_is_the_short_forward() -> None:
    assert natural_unit_s(parse(TWO_STAGES)) == pytest.approx(1e-3)
