"""Moves as a table and as a picture."""

from pathlib import Path

from pipebench.extensions.moves.record import cuts_figure, cuts_markdown, cuts_over_time
from pipebench.schedule.repartitions import RepartitionRecord

LAYERS = ["a", "b", "c", "d", "e"]
MOVES = [
    RepartitionRecord(10, ("c", "d"), was=("b", "c"), why="to balance the stages", live=True),
    RepartitionRecord(30, ("b", "e"), {"a": "swap", "d": "recompute", "e": "swap"}, was=("c", "d"), stall_s=0.002),
]


def test_the_table_has_a_row_per_move() -> None:
    assert cuts_markdown(MOVES).splitlines()[2:] == [
        "| 10 | c, d | b, c | as before | to balance the stages | while training went on | 0 s |",
        "| 30 | b, e | c, d | 1 recompute, 2 swap | decided beforehand | at a drain | 2.00 ms |",
    ]


def test_cuts_hold_from_move_to_move() -> None:
    times, ends = cuts_over_time(MOVES, LAYERS, 50)
    assert times == [0, 10, 30, 50]
    assert ends == [[0, 1, 2, 5], [0, 2, 3, 5], [0, 1, 4, 5]]
    assert cuts_over_time(MOVES[:1], LAYERS, 0)[0] == [0, 10, 10], "a run that was stopped before"


def test_the_picture_is_one(tmp_path: Path) -> None:
    cuts_figure(MOVES, LAYERS, 50).write(tmp_path / "cuts.png")
    assert (tmp_path / "cuts.png").read_bytes().startswith(b"\x89PNG")
