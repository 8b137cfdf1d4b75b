"""Rates over time while layers move, as a picture."""

from pathlib import Path

import pytest

from pipebench.extensions.moves.record import MOVED, RATE, SENT, moves_figure, until_settled_s
from pipebench.schedule.repartitions import RepartitionRecord
from pipebench.train.result import Point

MOVES = [
    RepartitionRecord(10, ("c",), was=("b",), live=True, clock_s=2.0),
    RepartitionRecord(30, ("d",), live=True, clock_s=5.0),
]


def point(samples: int, clock_s: float, moved: float) -> Point:
    return Point(samples, clock_s, {RATE: 8.0, SENT: 3e6, MOVED: moved})


def test_the_picture_ends_soon_after_moved_layers_have_arrived(tmp_path: Path) -> None:
    points = [point(8, 1.0, 0.0), point(16, 3.0, 2e6), point(24, 6.0, 4e6), point(9_000, 900.0, 0.0)]
    assert until_settled_s(points, MOVES) == pytest.approx(9.0)
    assert until_settled_s(points[:3], MOVES) == pytest.approx(6.0), "no longer than the run"
    moves_figure(points, MOVES).write(tmp_path / "moves.png")
    assert (tmp_path / "moves.png").read_bytes().startswith(b"\x89PNG")
