"""Layers that move in lists and pictures, without a model."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from pipebench.extensions.moves.repartition_plan import CutLayout, RepartitionPlan
from pipebench.extensions.moves.settings import MOVES, MoveSettings
from pipebench.schedule.instructions import Instruction
from pipebench.schedule.operations import Op
from pipebench.schedule.pipeline import Pipeline
from pipebench.schedule.programs import programs
from pipebench.simulate.simulation import TimelineEvent


class FreeMoves:
    """Costs of moving layers in drawings: one unit of time per repeated forward, else nothing."""

    def update_s(self, stage: int, round_index: int) -> float:
        return 0.0

    def again_s(self, it: Instruction) -> float:
        return 1.0

    def num_bytes(self, it: Instruction) -> int:
        return 0


@dataclass(frozen=True)
class Shape:
    """A setup as far as lists read it."""

    pipeline: Pipeline


class Routes(RepartitionPlan):
    """A segment in which layers move, without a model: `under` returns the shape under a layout."""

    moving = FreeMoves()

    def __init__(self, pipeline: Pipeline, layout: CutLayout, under: Callable[[CutLayout], Pipeline]) -> None:
        super().__init__(pipeline, layout)
        self._under = under

    def at(self, layout: CutLayout) -> Shape:
        return Shape(self._under(layout))

    def mark(self, event: TimelineEvent) -> str:
        """Return the mark of passes under other cuts than the first."""
        op, stage, unit, *_ = event.instruction
        if op is Op.FORWARD_AGAIN:
            return ""
        moves = self.at_stage(stage)
        return "'" if any((block.at if op is Op.FORWARD else block.first) <= unit for block in moves) else ""


def moving(pipeline: Pipeline) -> Pipeline:
    return replace(pipeline, extensions={MOVES: MoveSettings()})


def moving_programs(pipeline: Pipeline, num_minibatches: int, routes: Routes) -> list[Iterator[Instruction]]:
    """Return every worker's list while layers move by `routes`."""
    return programs(moving(pipeline), num_minibatches, {MOVES: routes})
