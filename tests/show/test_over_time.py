"""Pictures of memory and occupancy over time, for few workers and for many."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from pipebench.cli.outputs import is_picture_by
from pipebench.show import memory_picture, occupancy_picture
from pipebench.show.memory_picture import COLOURS, memory_figure, peaks_figure
from pipebench.show.occupancy_picture import occupancy_figure
from pipebench.show.over_time import MOST_ROWS
from pipebench.simulate.kinds import ACTIVATIONS, KINDS, RECEIVED, WEIGHTS
from pipebench.simulate.memory_meter import Curve, MemoryPeak, MemoryTimeline
from pipebench.simulate.occupancy import STATES, Occupancy


def memory(num_workers: int, limit_bytes: int | None = None, *, overflow: bool = False) -> MemoryTimeline:
    """Return workers that keep 1 MB of weights, and for one of ten seconds 4 MB of activations besides, in turn."""
    curves, peaks = [], []
    for worker in range(num_workers):
        num_bytes = np.zeros((len(KINDS), 4), dtype=np.int64)
        num_bytes[KINDS.index(WEIGHTS)] = 1_000_000
        num_bytes[KINDS.index(ACTIVATIONS), 1] = 4_000_000 + worker
        curves.append(Curve(np.array([0.0, worker % 9, worker % 9 + 1.0, 10.0]), num_bytes, num_bytes[0] * 0))
        peaks.append(
            MemoryPeak(worker, worker % 9, f"{worker}F0@0", {WEIGHTS: 1_000_000, ACTIVATIONS: 4_000_000 + worker})
        )
    names = tuple(f"stage {worker}" for worker in range(num_workers))
    hosts = (0,) * num_workers
    return MemoryTimeline(names, tuple(curves), tuple(peaks), hosts, limit_bytes, peaks[2] if overflow else None, 10.0)


def occupancy(num_workers: int) -> Occupancy:
    shares = np.zeros((num_workers, len(STATES), 5))
    shares[:, 0], shares[:, 1], shares[:, 2] = 0.5, 0.25, 0.25
    return Occupancy(tuple(f"stage {worker}" for worker in range(num_workers)), shares, 2.0)


def texts(figure: Figure) -> str:
    figure.canvas.draw()
    every = [axes.get_title(loc) for axes in figure.axes for loc in ("left", "right")]
    every += [axes.get_ylabel() for axes in figure.axes] + [axes.get_xlabel() for axes in figure.axes]
    every += [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    return "\n".join(every)


def test_every_kind_has_a_unique_colour() -> None:
    assert tuple(COLOURS) == KINDS
    assert len({*COLOURS.values()}) == len(KINDS)


def test_a_row_per_worker_has_its_memory_over_time() -> None:
    figure = memory_figure(memory(3))
    assert len(figure.axes) == 3
    said = texts(figure)
    assert "simulated: 5.00 MB at most on a worker" in said
    assert "stage 2" in said
    assert "in 2F0@0" in said
    assert "activations" in said
    assert "gradients" not in said  # there are none
    assert [len(axes.collections) for axes in figure.axes] == [2, 2, 2]
    weights, activations = (np.asarray(each.get_paths()[0].vertices) for each in figure.axes[2].collections)
    assert weights[:, 1].max() == 1.0
    assert activations[:, 1].max() == pytest.approx(5.0)
    above = activations[activations[:, 1] > 1.5]
    assert above[:, 0].min() == pytest.approx(2.0, abs=0.02)
    assert above[:, 0].max() == pytest.approx(3.0, abs=0.03)


def test_memory_on_the_host_is_a_dotted_line() -> None:
    """3 MB of worker 1's for the second second of ten, and nothing of the others."""
    found = memory(3)
    curves = [*found.curves]
    curves[1] = replace(curves[1], host_bytes=np.array([0, 3_000_000, 0, 0]))
    figure = memory_figure(replace(found, curves=tuple(curves), host_peaks=(0, 3_000_000, 0)))
    assert [len(axes.lines) for axes in figure.axes] == [0, 1, 0]
    (line,) = figure.axes[1].lines
    assert line.get_linestyle() == ":"
    points = np.column_stack([np.asarray(line.get_xdata()), np.asarray(line.get_ydata())]).tolist()
    assert points == [[0.0, 0.0], [1.0, 3.0], [2.0, 0.0], [10.0, 0.0], [10.0, 0.0]]
    assert texts(figure).count("dotted: on its host, 3.00 MB at most") == 1


@pytest.mark.parametrize(("limit_bytes", "is_drawn"), [(4_500_000, True), (12_000_000, True), (16_000_000_000, False)])
def test_a_device_s_limit_is_a_line_unless_it_is_far_above(limit_bytes: int, is_drawn: bool) -> None:
    figure = memory_figure(memory(3, limit_bytes))
    lines = [line for axes in figure.axes for line in axes.lines]
    assert len(lines) == 3 * is_drawn
    assert all(np.asarray(line.get_ydata())[0] == limit_bytes / 1e6 for line in lines)
    assert ("dashed" in texts(figure)) == is_drawn


def test_out_of_memory_is_marked_with_worker_and_time() -> None:
    figure = memory_figure(memory(3, 4_500_000, overflow=True))
    marks = [[line for line in axes.lines if line.get_marker() == "X"] for axes in figure.axes]
    assert [len(each) for each in marks] == [0, 0, 1]
    assert np.asarray(marks[2][0].get_xdata())[0] == 2.0
    assert "out of memory at the X" in texts(figure)


def test_many_workers_are_a_map_below_the_fullest() -> None:
    count = 3 * MOST_ROWS
    found = memory(count)
    figure = memory_figure(found)
    image = np.asarray(figure.axes[1].images[0].get_array())
    assert image.shape[0] == count
    assert figure.axes[0].get_ylabel() == f"stage {count - 1}" == found.worker_names[found.fullest.worker]
    for worker in (0, 7, count - 1):
        full = np.flatnonzero(image[worker] > 4.5) / image.shape[1] * 10
        assert full.min() == pytest.approx(worker % 9, abs=0.02)
        assert full.max() == pytest.approx(worker % 9 + 1, abs=0.03)


def test_peaks_before_during_and_after_moves_are_drawn(tmp_path: Path) -> None:
    first, last = memory(3, 6_000_000), memory(3)
    more = [replace(peak, by_kind={**peak.by_kind, RECEIVED: 500_000}) for peak in first.peaks]
    parts = {"first cuts": first.peaks, "while layers move": more, "last cuts": last.peaks}
    figure = peaks_figure(parts, first)
    bars = [[bar for bar in axes.patches if isinstance(bar, Rectangle)] for axes in figure.axes]
    tops = [max(bar.get_y() + bar.get_height() for bar in row) for row in bars]
    assert tops == pytest.approx([5.000002, 5.500002, 5.000002])
    assert [len(axes.lines) for axes in figure.axes] == [1, 1, 1], "what a device has"
    said = texts(figure)
    assert "while layers move: 5.50 MB at most, on stage 2, in 2F0@0" in said
    assert "received" in said
    assert "gradients" not in said  # there are none
    assert not peaks_figure(parts, last).axes[0].lines
    peaks_figure(parts, first).write(tmp_path / "memory.png")
    assert is_picture_by(memory_picture.MADE_BY, tmp_path / "memory.png")


def test_occupancy_of_few_and_of_many() -> None:
    few, many = occupancy_figure(occupancy(2)), occupancy_figure(occupancy(3 * MOST_ROWS))
    assert len(few.axes) == 2
    assert "computes 50.0%, waits for bytes 25.0%, for others 25.0%" in texts(few)
    image = np.asarray(many.axes[1].images[0].get_array())
    assert image.shape == (3 * MOST_ROWS, 5)
    assert "mean of 36" in texts(many)


def test_the_files_have_titles_in_their_metadata(tmp_path: Path) -> None:
    memory_figure(memory(2)).write(tmp_path / "memory.png")
    occupancy_figure(occupancy(2)).write(tmp_path / "occupancy.png")
    for picture, name in ((memory_picture, "memory"), (occupancy_picture, "occupancy")):
        assert is_picture_by(picture.MADE_BY, tmp_path / f"{name}.png")
        assert not is_picture_by(picture.MADE_BY, Path(__file__))
    assert not is_picture_by(memory_picture.MADE_BY, tmp_path / "occupancy.png")
