"""Moves in an engine: announced by the training loop, or decided by Algorithm 1 (vPipe) if stages balance."""

from dataclasses import replace
from typing import Any

from pipebench.engine.engine import Engine
from pipebench.engine.protocols import EngineExtension
from pipebench.engine.setup import Setup
from pipebench.extensions.moves.repartition_plan import Repartition, shape_problems
from pipebench.extensions.moves.segment import MovingSegment
from pipebench.extensions.moves.settings import MOVES, MoveSettings, settings_of
from pipebench.simulate.simulation import RunPart


class EngineMoves(EngineExtension):
    """The moves of an engine's segments; `setup` has the current cuts."""

    def __init__(self, setup: Setup) -> None:
        self._setup, self._settings = setup, settings_of(setup.pipeline)
        self._segment: MovingSegment | None = None  # the running one, or the next one if it has moves
        self._decisions: list[Repartition] = []

    @property
    def announced(self) -> bool:
        """Whether there are moves in the running segment, or in the next one."""
        return self._segment is not None

    def announce(self, move: Repartition) -> None:
        """Schedule a move of layers in the running segment, or in the next one.

        Every process announces the same moves, each before any of its workers has reached the move's first change.

        Raises:
            PlanError: the move is impossible, or too early.
        """
        self._segment = self._segment or MovingSegment(self._setup)
        self._segment.announce(move)

    def take_decisions(self) -> list[Repartition]:
        """Return Algorithm 1's decisions since the last call; their minibatches count from the previous drain."""
        taken, self._decisions = self._decisions, []
        return taken

    def segment(self) -> MovingSegment | None:
        """Return the segment that begins now, if layers may move in it."""
        if self._segment is None and self._setup.repartitions and not any(shape_problems(self._setup.pipeline)):
            self._segment = MovingSegment(self._setup)
        return self._segment

    def begin(self, part: RunPart) -> None:
        """Start a segment."""
        self._end_at = part.end_at

    def ended(self, setup: Setup) -> Setup:
        """Return the setup under the last cuts of the segment that has ended."""
        ended, self._segment = self._segment, None
        self._setup = setup if ended is None else ended.last
        return self._setup

    def decided(self, move: Repartition) -> None:
        """Handle a decision of Algorithm 1. Every stage of a process calls this; calls after the first do nothing."""
        if move in self._decisions:
            return
        self._decisions.append(move)
        if self._settings.live:
            self.announce(move)
        else:
            self._end_at(move.at)


def moves_of(engine: Engine) -> EngineMoves:
    """Return the moves of an engine."""
    found = engine.extensions[MOVES]
    assert isinstance(found, EngineMoves)
    return found


def moving(setup: Setup, **changes: Any) -> Setup:
    """Return a setup whose layers may move, with these `MoveSettings` changed."""
    known = setup.pipeline.extensions
    settings = replace(known.get(MOVES, MoveSettings()), **changes)
    return replace(setup, repartitions=True, pipeline=replace(setup.pipeline, extensions={**known, MOVES: settings}))
