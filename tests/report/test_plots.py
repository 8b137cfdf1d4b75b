"""Plots show the values of cells and results: read back from the figures."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.lines import Line2D
from matplotlib.patches import StepPatch
from matplotlib.text import Annotation
from PIL import Image

from pipebench.report.definition import Picture, Published, ReferenceLine, RunReference
from pipebench.report.evaluated import Evaluated, TableCell
from pipebench.report.plot_bars import bars_figure
from pipebench.report.plot_curves import curves_figure
from pipebench.report.plot_lines import lines_figure
from pipebench.report.plot_phases import phases_figure
from pipebench.report.plot_scatter import scatter_figure
from pipebench.report.plot_stages import stages_figure
from pipebench.report.plots import draw_plots
from pipebench.report.render import render
from pipebench.show.pictures import CURVE_COLOURS
from pipebench.train.result import Point, RunResult
from tests.report.made import IDEAL, PICTURES, REPORT, SPEEDUP, cells, evaluated
from tests.results import DP

BARS, SCATTER, LINES, CURVES, STAGES, _ = PICTURES
SPEEDUPS = {(cell.row, cell.column): cell.value for cell in cells() if cell.measure == "speedup"}
PUBLISHED = [5.28, 2.34, 1.0, 4.25]


def only(axes: list[Axes]) -> Axes:
    (found,) = axes
    return found


def xs(line: Line2D) -> list[float]:
    return [float(x) for x in np.asarray(line.get_xdata())]


def ys(line: Line2D) -> list[float]:
    return [float(y) for y in np.asarray(line.get_ydata())]


def labelled(axes: Axes) -> dict[str, list[tuple[float, float]]]:
    named = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
    return {str(line.get_label()): list(zip(xs(line), ys(line), strict=True)) for line in named}


def test_bars_are_as_long_as_the_values() -> None:
    figure = bars_figure(evaluated(), BARS)
    assert figure is not None
    axes = only(figure.axes)
    widths = {container.get_label(): [bar.get_width() for bar in container] for container in axes.containers}
    assert widths == {
        "published": PUBLISHED,
        "ideal hardware": [SPEEDUPS[row.name, "ideal"] for row in REPORT.rows],
        "clusters of 2019": [SPEEDUPS[row.name, "calibrated"] for row in REPORT.rows],
    }
    fills = [to_hex(container[0].get_facecolor()) for container in axes.containers]
    assert fills == ["#ffffff", CURVE_COLOURS[0].lower(), CURVE_COLOURS[1].lower()]
    assert [label.get_text() for label in axes.get_yticklabels()] == [row.title for row in REPORT.rows]
    middles = [bar.get_y() + bar.get_height() / 2 for container in axes.containers for bar in container]
    assert len({round(middle, 6) for middle in middles}) == 12  # no bar hides another
    assert {"5.28x", "2.66x", "5.22x *"} <= {text.get_text() for text in axes.texts}
    assert figure.get_supxlabel() == "= by construction   * fitted on   ? a hypothesis"


@pytest.mark.parametrize(("memory_bytes", "shares"), [(5.0, True), (500.0, False)])
def test_panels_of_one_unit_share_a_scale_on_which_all_have_bars(memory_bytes: float, shares: bool) -> None:
    """Bytes per sample beside a worker's memory were an empty panel."""
    sent, memory = (replace(REPORT.measures[0], name=name, unit="bytes") for name in ("sent", "memory"))
    cells = [TableCell("vgg", each.name, "ideal", value) for each, value in ((sent, 2.0), (memory, memory_bytes))]
    report = replace(REPORT, measures=(sent, memory), columns=REPORT.columns[:1], rows=REPORT.rows[:1])
    figure = bars_figure(Evaluated(report, tuple(cells)), replace(BARS, measures=("sent", "memory")))
    assert figure is not None
    ends = [float(axes.get_xlim()[1]) for axes in figure.axes]
    assert (ends[0] == ends[1]) is shares


def test_bounds_are_dotted_and_seeds_have_their_range() -> None:
    rows = (replace(REPORT.rows[0], published={"speedup": Published(2.0, "at_least")}),)
    made = Evaluated(replace(REPORT, rows=rows), (TableCell("vgg", "speedup", "ideal", 3.0, 2.5, 3.5),))
    figure = bars_figure(made, BARS)
    assert figure is not None
    axes = only(figure.axes)
    assert axes.containers[0][0].get_linestyle() == ":"
    assert [xs(line)[0] for line in axes.lines] == [2.5]
    assert [xs(line)[1] for line in axes.lines] == [3.5]


def test_scatter_sets_reproduced_against_published() -> None:
    figure = scatter_figure(evaluated(), SCATTER)
    assert figure is not None
    axes = only(figure.axes)
    legend = axes.get_legend()
    assert legend is not None
    assert "within a factor of 1.2" in [text.get_text() for text in legend.get_texts()], "the band had no name"
    points = labelled(axes)
    for column, title in (("ideal", "ideal hardware"), ("calibrated", "clusters of 2019")):
        wanted = [(given, SPEEDUPS[row.name, column]) for row, given in zip(REPORT.rows, PUBLISHED, strict=True)]
        assert points[title] == wanted
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert axes.get_xlim() == axes.get_ylim()


def test_names_in_a_scatter_do_not_overlap() -> None:
    """Of forty rows that are nearly the same some names are left out, and the others don't overlap."""
    rows = tuple(replace(REPORT.rows[0], name=f"r{n}", title=f"a row with number {n}") for n in range(40))
    values = [2 * (1 + 0.02 * math.sin(7 * n)) for n in range(40)]
    made = tuple(
        TableCell(row.name, "speedup", "ideal", value, published=Published(2 + 0.03 * math.cos(5 * n)))
        for n, (row, value) in enumerate(zip(rows, values, strict=True))
    )
    figure = scatter_figure(Evaluated(replace(REPORT, rows=rows, columns=REPORT.columns[:1]), made), SCATTER)
    assert figure is not None
    boxes = [text.get_window_extent() for text in only(figure.axes).texts]
    assert 3 < len(boxes) < 40
    assert not [(a, b) for a in boxes for b in boxes if a is not b and a.overlaps(b)]


def test_equal_points_of_a_scatter_have_one_label_that_equality_s_line_does_not_cross() -> None:
    """Rows with equal values stand below one another; a label goes to the line's free side."""
    rows = tuple(replace(REPORT.rows[0], name=f"r{n}", title=f"row {n}, a model on a cluster") for n in range(4))
    values = [2.0, 2.0, 2.0, 6.0]
    made = tuple(
        TableCell(row.name, "speedup", "ideal", value, published=Published(2.2 if value == 2 else 3.0))
        for row, value in zip(rows, values, strict=True)
    )
    figure = scatter_figure(Evaluated(replace(REPORT, rows=rows, columns=REPORT.columns[:1]), made), SCATTER)
    assert figure is not None
    axes = only(figure.axes)
    texts = {text.get_text(): text for text in axes.texts}
    assert {*texts} == {"\n".join(row.title for row in rows[:3]), rows[3].title}
    frame = axes.get_window_extent()
    for text in texts.values():  # the diagonal of the frame goes by on one side of every corner
        box = text.get_window_extent()
        above = [y - frame.y0 > x - frame.x0 for x in (box.x0, box.x1) for y in (box.y0, box.y1)]
        assert len({*above}) == 1, text.get_text()


def test_lines_have_the_key_as_their_axis() -> None:
    figure = lines_figure(evaluated(), LINES)
    assert figure is not None
    axes = only(figure.axes)
    ideal = [SPEEDUPS[row.name, "ideal"] for row in REPORT.rows]
    assert labelled(axes)["ideal hardware"] == list(zip([1.0, 2.0, 3.0, 4.0], ideal, strict=True))
    published = [line for line in axes.lines if line.get_label() == "published"]
    assert [(xs(line)[0], ys(line)[0]) for line in published] == [*enumerate(PUBLISHED, 1)]


def test_lines_have_a_panel_per_group_and_texts_stand_one_after_the_other() -> None:
    rows = tuple(
        replace(row, at={"precision": precision, "model": model})
        for row, precision, model in zip(REPORT.rows, ("fp32", "fp16") * 2, "AABB", strict=True)
    )
    figure = lines_figure(replace(evaluated(), report=replace(REPORT, rows=rows)), replace(LINES, x="precision"))
    assert figure is not None
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["A", "B"]
    for axes in figure.axes:
        assert [label.get_text() for label in axes.get_xticklabels()] == ["fp32", "fp16"]
        assert [x for x, _ in labelled(axes)["ideal hardware"]] == [0.0, 1.0]


def test_curves_are_over_epochs_and_over_time_with_stars_at_reached_targets() -> None:
    figure = curves_figure(evaluated(), CURVES)
    assert figure is not None
    for axes, per_epoch in zip(figure.axes, (1.0, 1.8), strict=True):
        curve = labelled(axes)["dp (4), 2 of 2 seeds reached"]
        assert [x for x, _ in curve] == pytest.approx([per_epoch * n for n in range(1, 7)])
        assert [y for _, y in curve] == pytest.approx([1 - math.exp(-0.8 * n) for n in range(1, 7)])
        stars = [line for line in axes.lines if line.get_marker() == "*"]
        # 1 - exp(-0.8 n) and 1 - exp(-0.6 n) are 0.9 after 2.9 and 3.8 epochs.
        assert [xs(line)[0] for line in stars] == pytest.approx([3 * per_epoch] * 2 + [4 * per_epoch] * 2)
        targets = [line for line in axes.lines if line.get_linestyle() == ":"]
        assert [ys(line)[0] for line in targets] == [0.9]


def test_columns_with_different_results_have_different_curves() -> None:
    made = evaluated()
    slower = tuple(
        replace(run, points=tuple(replace(point, clock_s=3 * point.clock_s) for point in run.points))
        for run in made.results["vgg", "dp", "calibrated"]
    )
    figure = curves_figure(replace(made, results={**made.results, ("vgg", "dp", "calibrated"): slower}), CURVES)
    assert figure is not None
    assert [*labelled(figure.axes[1])] == [
        "dp (4), 2 of 2 seeds reached",
        "dp (4), clusters of 2019, 2 of 2 seeds reached",
        "pipedream (4), 2 of 2 seeds reached",
    ]


def searched(rates: Sequence[float], layers: Sequence[int], bound: float) -> tuple[RunResult, ...]:
    points = tuple(
        Point(0, 10.0 * n, {"throughput_samples_per_s": rate, "active_layers": count, "most_samples_per_s": bound})
        for n, (rate, count) in enumerate(zip(rates, layers, strict=True), 1)
    )
    return (replace(DP, points=points),)


def test_phases_are_steps_a_panel_per_row_with_lines_where_layers_change() -> None:
    column, layers = IDEAL.name, (5, 7, 7)
    results = {
        ("vgg", "plain", column): searched((30.0, 20.0, 10.0), layers, 50.0),
        ("vgg", "moved", column): searched((40.0, 40.0, 35.0), layers, 55.0),
        ("gnmt", "moved", column): searched((50.0, 50.0, 50.0), layers, 60.0),
    }
    rows = tuple(
        replace(row, runs={run: RunReference(()) for name, run, _ in results if name == row.name})
        for row in REPORT.rows
    )
    report = replace(REPORT, rows=rows, columns=(IDEAL,))
    picture = Picture("phases", runs=("plain", "moved"), metric="throughput_samples_per_s", bound="most_samples_per_s")
    picture = replace(picture, line=ReferenceLine(70.0, "published"))
    figure = phases_figure(replace(evaluated(), report=report, results=results), picture)
    assert figure is not None
    first, second = figure.axes
    assert all(labelled(axes)["published"][0][1] == 70.0 < axes.get_ylim()[1] for axes in figure.axes)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["VGG-16, 4x4 (A)", "GNMT-16 | 4x4 (A)"]
    steps = {str(patch.get_label()): patch for patch in first.patches if isinstance(patch, StepPatch)}
    assert [*steps] == ["plain", "moved", "most"]
    values, edges, _ = steps["plain"].get_data()
    assert ([*values], [*edges]) == ([30.0, 20.0, 10.0], [0.0, 10.0, 20.0, 30.0])
    assert [*steps["most"].get_data()[0]] == [55.0] * 3, "the highest of the row"
    assert to_hex(steps["most"].get_edgecolor()) == "#000000"
    changes = [line for line in first.lines if line.get_label() != "published"]
    assert [xs(line)[0] for line in changes] == [10.0], "after 20 s the pace changes, the layers don't"
    assert first.get_ylim() == second.get_ylim()
    assert first.get_ylim()[1] >= 70.0
    few = phases_figure(
        replace(evaluated(), report=report, results=results), replace(picture, line=ReferenceLine(1.0, "published"))
    )
    assert few is not None
    assert few.axes[0].get_ylim()[1] >= 50.0, "the last panel has the most"


def test_files_are_small_and_have_different_names(tmp_path: Path) -> None:
    twice = replace(evaluated(), report=replace(REPORT, pictures=(*PICTURES, replace(LINES, x="model"))))
    drawn = draw_plots(twice, tmp_path)
    assert {image.name for image in drawn.values()} == {
        "bars-speedup", "scatter-speedup", "lines-speedup", "curves-top1-vgg", "stages-forward_s-vgg",
        "lines-speedup-2",
    }  # fmt: skip
    for image in drawn.values():
        path = tmp_path / f"{image.name}.png"
        assert path.stat().st_size < 30_000
        with Image.open(path) as picture:
            assert picture.info.keys() <= {"dpi"}


def test_pictures_without_values_are_not_drawn(tmp_path: Path) -> None:
    rows = tuple(replace(row, published={}, at={}) for row in REPORT.rows)
    empty = Evaluated(replace(REPORT, rows=rows), ())
    assert draw_plots(empty, tmp_path) == {}
    assert not [*tmp_path.iterdir()]


def test_a_curve_that_no_run_has_is_reported_on_the_page(tmp_path: Path) -> None:
    unknown = replace(PICTURES[3], metric="top5")
    made = render(replace(evaluated(), report=replace(REPORT, pictures=(unknown,))), tmp_path)
    sentence = "No picture of VGG-16, 4x4 (A): top5 as it was trained: nothing has a value for it."
    assert made.undrawn == (sentence,)
    assert f"## Pictures\n\n{sentence}\n" in (tmp_path / "report.md").read_text()
    everywhere = replace(PICTURES[3], metric="top5", row="")  # it was `No picture of : top5`
    made = render(replace(evaluated(), report=replace(REPORT, pictures=(everywhere,))), tmp_path)
    assert made.undrawn == ("No picture of top5 as it was trained: nothing has a value for it.",)


def test_a_bound_is_drawn_across_every_bar_of_its_cell() -> None:
    bound = {(row, column): value * 2 for (row, column), value in SPEEDUPS.items() if isinstance(value, float)}
    made = evaluated()
    memories = [TableCell(row, "memory", column, value) for (row, column), value in bound.items()]
    others = tuple(cell for cell in made.cells if cell.measure != "memory")
    figure = bars_figure(replace(made, cells=(*others, *memories)), replace(BARS, bound="memory"))
    assert figure is not None
    axes = only(figure.axes)
    crossed = {round(bar.get_y() + bar.get_height() / 2, 6): container.get_label() for container in axes.containers
               for bar in container}  # fmt: skip
    lines = [line for line in axes.lines if line.get_label() == "peak memory"]
    assert sorted(xs(line)[0] for line in lines) == sorted(bound.values())
    for line in lines:
        assert xs(line)[0] == xs(line)[1]
        assert crossed[round(sum(ys(line)) / 2, 6)] in ("ideal hardware", "clusters of 2019")
    assert axes.get_xlim()[1] > max(bound.values())


def test_a_bound_that_columns_share_is_one_line() -> None:
    made = evaluated()
    cells = [TableCell(row.name, "memory", column.name, 3.0 + row_index) for row_index, row in enumerate(REPORT.rows)
             for column in REPORT.columns]  # fmt: skip
    others = tuple(cell for cell in made.cells if cell.measure != "memory")
    figure = lines_figure(replace(made, cells=(*others, *cells)), replace(LINES, bound="memory"))
    assert figure is not None
    drawn = [line for axes in figure.axes for line in axes.lines if line.get_label() == "peak memory"]
    assert [ys(line) for line in drawn] == [[3.0, 4.0, 5.0, 6.0]]


def test_stages_are_drawn_side_by_side_per_run() -> None:
    figure = stages_figure(evaluated(), STAGES)
    assert figure is not None
    axes = only(figure.axes)
    heights = {container.get_label(): [bar.get_height() for bar in container] for container in axes.containers}
    results = evaluated().results
    wanted = {run: [row["forward_s"] for row in results["vgg", run, "ideal"][0].stages] for run in STAGES.runs}
    assert heights == wanted
    assert all(wanted.values())
    lefts = [bar.get_x() for container in axes.containers for bar in container]
    assert len({round(left, 6) for left in lefts}) == len(lefts)  # no bar hides another


def test_runs_and_the_axis_have_the_report_s_names() -> None:
    picture = replace(STAGES, words=(("dp", "data parallelism"),), title="a forward")
    figure = stages_figure(evaluated(), picture)
    assert figure is not None
    axes = only(figure.axes)
    assert [container.get_label() for container in axes.containers] == ["data parallelism", "pipedream"]
    assert (axes.get_ylabel(), axes.get_title(loc="left")) == ("a forward", "VGG-16, 4x4 (A)")


def test_runs_without_stages_are_left_out() -> None:
    assert stages_figure(evaluated(), replace(STAGES, runs=("nothing",))) is None


def test_panels_of_one_unit_have_one_scale() -> None:
    twice, other = replace(SPEEDUP, name="twice"), replace(SPEEDUP, name="memory", unit="bytes")
    made = [TableCell(row.name, "twice", "ideal", 20.0) for row in REPORT.rows]
    made += [TableCell(row.name, "memory", "ideal", 1e9) for row in REPORT.rows]
    report = replace(REPORT, measures=(SPEEDUP, twice, other))
    figure = bars_figure(
        Evaluated(report, (*evaluated().cells, *made)), replace(BARS, measures=("speedup", "twice", "memory"))
    )
    assert figure is not None
    first, second, third = (axes.get_xlim()[1] for axes in figure.axes)
    assert first == second > 20.0
    assert third > 1e9


def test_no_scale_of_shares_goes_beyond_the_whole() -> None:
    shares = replace(SPEEDUP, name="share", unit="share", title="share")
    made = tuple(TableCell(row.name, "share", "ideal", 0.96) for row in REPORT.rows)
    figure = bars_figure(
        Evaluated(replace(REPORT, measures=(shares,)), made), replace(BARS, measures=("share",), bound="")
    )
    assert figure is not None
    assert max(only(figure.axes).get_xticks()) == 1.0


def test_no_line_hides_another_of_the_same_values() -> None:
    figure = lines_figure(evaluated(), LINES)
    assert figure is not None
    for axes in figure.axes:
        widths = [
            line.get_linewidth() for line in axes.lines if line.get_label() in {"ideal hardware", "clusters of 2019"}
        ]
        assert len(widths) == 2
        assert widths[0] > widths[1]


def test_no_bound_touches_a_value() -> None:
    """Values stand after their bars but where the line would touch them: then inside, or after the line of short bars.

    A value after the line of a long bar looked like the bound's.
    """
    row = REPORT.rows[0]
    values = {f"r{n}": 0.05 * n for n in range(1, 20)}
    report = replace(
        REPORT,
        rows=tuple(replace(row, name=name, title=name, published={}) for name in values),
        columns=REPORT.columns[:1],
    )
    cells = [TableCell(name, "speedup", "ideal", value) for name, value in values.items()]
    limits = {name: 0.06 if value < 0.06 else 1.0 for name, value in values.items()}
    bounds = [TableCell(name, "memory", "ideal", limit) for name, limit in limits.items()]
    figure = bars_figure(Evaluated(report, (*cells, *bounds)), replace(BARS, bound="memory"))
    assert figure is not None
    axes = only(figure.axes)
    figure.draw_without_rendering()
    boxes = [text.get_window_extent().padded(1, 0) for text in axes.texts]
    assert len(boxes) == len(axes.lines) == len(values)
    assert not [(box, line) for box in boxes for line in axes.lines if line.get_window_extent().overlaps(box)]
    ends = [axes.transData.transform((value, 0))[0] for value in values.values()]
    inside = [box.x1 < end for box, end in zip(boxes, ends, strict=True)]
    assert inside == sorted(inside)  # of long bars only
    assert [text.get_color() == "white" for text in axes.texts] == inside
    places = [text.xy[0] for text in axes.texts if isinstance(text, Annotation)]
    assert places == [limits["r1"], *list(values.values())[1:]]


@pytest.mark.parametrize("picture", [LINES, STAGES, replace(BARS, measures=("speedup",))], ids=lambda p: p.kind)
def test_a_reference_line_is_in_the_picture_and_its_legend(picture: Picture) -> None:
    most = 40.0
    given = replace(picture, line=ReferenceLine(most, "a device's memory"))
    figure = {"lines": lines_figure, "stages": stages_figure, "bars": bars_figure}[picture.kind](evaluated(), given)
    assert figure is not None
    axes = only(figure.axes)
    (line,) = (each for each in axes.lines if each.get_label() == "a device's memory")
    at, (_, end) = (xs(line), axes.get_xlim()) if picture.kind == "bars" else (ys(line), axes.get_ylim())
    assert at == [most, most]
    assert end > most
    assert "a device's memory" in [text.get_text() for legend in figure.legends for text in legend.get_texts()]
