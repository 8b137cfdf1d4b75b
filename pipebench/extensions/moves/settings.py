"""Settings of moves: the extension's entry in `Pipeline.extensions`."""

from dataclasses import dataclass
from typing import Final

from pipebench.schedule.pipeline import Pipeline

MOVES: Final = "moves"  # the extension's name


@dataclass(frozen=True)
class MoveSettings:
    """How layers move."""

    balances: bool = False  # whether stages are measured, and layers move to balance them (Algorithm 1)
    live: bool = True  # whether layers move during training; else at drains
    chooses: tuple[str, ...] = ()  # policies besides keep that layers get when they move; none: they keep theirs


def settings_of(pipeline: Pipeline) -> MoveSettings:
    """Return a pipeline's settings; the defaults, if the extension is off."""
    found: MoveSettings = pipeline.extensions.get(MOVES, MoveSettings())
    return found
