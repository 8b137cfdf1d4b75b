"""Draws schedules as text, for tests that compare pictures."""

from collections.abc import Sequence
from typing import Any

from pipebench.schedule.pipeline import Pipeline
from pipebench.simulate.drawing import blocks, draw_cells


def draw(
    pipeline: Pipeline,
    num_minibatches: int,
    forward: Sequence[int],
    backward: Sequence[int],
    *,
    width: int | None = None,
    since: int = 0,
    **how: Any,
) -> str:
    """Return the first block of `draw_cells` as text, `.` for idle, without the first `since` units of time."""
    cells = draw_cells(pipeline, num_minibatches, forward, backward, **how)
    return blocks(pipeline, [row[since:] for row in cells], width)[0]
