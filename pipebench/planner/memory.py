"""What a replica of a stage keeps in memory, and the fewest replicas with which it fits.

Paper: PipeDream (SOSP'19) section 3.3. A replica with d minibatches in flight keeps d weight versions if the mode
stashes them (one otherwise, two in PipeDream-2BW), one gradient, the optimizer's state, what d forwards keep for
their backward, what one backward computes again, and room for two transfers each way. In mixed precision it keeps the
masters besides, and the gradient, for the step, in their type. Its d is 1 + ceil(R / m): m replicas, R workers in the
stages after it (1F1B-RR at NOAM); beyond NOAM R grows by what the input stage admits more, for every stage but the
last.

So bytes are a line in d. Where layers swap, they are the lower one of two: nothing leaves in time, or all does but for
what is on its way (`activations.on_device`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipebench.planner.activations import on_device
from pipebench.planner.cost_models import StageGrid, UnitWork
from pipebench.planner.states import Floats, States
from pipebench.schedule.orders import ALL_FORWARDS
from pipebench.schedule.pipeline import Pipeline, chain
from pipebench.schedule.programs import most_in_flight


class MemoryLine(NamedTuple):
    """What stages keep: the lowest of some lines in the units in flight; arrays are [line, start, stop].

    Attributes:
        constant: bytes whatever is in flight.
        each: bytes for each unit in flight.
    """

    constant: Floats
    each: Floats

    def num_bytes(self, in_flight: int) -> Floats:
        """Return the bytes with so many units in flight, [start, stop]."""
        lowest: Floats = (self.constant + in_flight * self.each).min(axis=0)
        return lowest


@dataclass(frozen=True)
class MemoryRule:
    """How a mode fills memory.

    Attributes:
        limit_bytes: memory of a device.
        versions: weight versions; None: every minibatch in flight keeps the one it ran forward with.
        state_bytes_per_byte: optimizer state per byte of what it steps on.
        in_flight: minibatches (or microbatches) in flight in every stage; None for 1F1B's 1 + ceil(R / m).
        depth_at_most: a limit on what 1F1B has in flight, for straight plans with a depth below NOAM.
        beyond: minibatches that all replicas of the input stage admit beyond NOAM.
        masters: whether the optimizer steps on masters, beside the versions.
    """

    limit_bytes: float
    versions: int | None = None
    state_bytes_per_byte: float = 0.0
    in_flight: int | None = None
    depth_at_most: int | None = None
    beyond: int = 0
    masters: bool = False

    def num_bytes(self, states: States, start: int, stop: int, in_flight: int) -> float:
        """Return the bytes that a replica of the stage between two states keeps at most."""
        return float(self.parts(StageGrid(UnitWork(states), np.array([start]), stop)).num_bytes(in_flight)[0, 0])

    def beside_activations(self, states: States, start: int, stop: int) -> tuple[float, float]:
        """Return what the stage between two states keeps but for activations: in any case, and per unit in flight."""
        grid = StageGrid(UnitWork(states), np.array([start]), stop)
        constant, each = self._beside(grid)
        return float(constant[0, 0]), float(each[0, 0])

    def depth(self, m: int, after: int) -> int:
        """Return the minibatches in flight of a stage with m replicas and `after` workers behind it."""
        depth = 1 + -(-(after + self.beyond) // m) if after else 1
        return self.in_flight or min(depth, self.depth_at_most or depth)

    def least(self, parts: MemoryLine, after: Floats) -> Floats:
        """Return the fewest replicas with which the stages of a grid of one start fit, or infinity [stop].

        Args:
            parts: what `parts` says of the grid.
            after: workers behind each of them [stop].
        """
        constant, each = (part[:, 0] for part in parts)
        with np.errstate(all="ignore"):
            room = np.floor((self.limit_bytes - constant) / each)
            room = np.where(each > 0, room, np.where(constant <= self.limit_bytes, np.inf, 0.0)).max(axis=0)
            if self.in_flight is not None:
                return np.where(room >= self.in_flight, 1.0, np.inf)
            if self.depth_at_most is not None:
                room = np.where(room >= self.depth_at_most, np.inf, room)
            needed = np.maximum(np.ceil((after + self.beyond) / (room - 1)), 1.0)
        return np.where(room >= 1, np.where(after == 0, 1.0, np.where(room > 1, needed, np.inf)), np.inf)

    def fits(self, grid: StageGrid, m: int, after: int) -> NDArray[np.bool_]:
        """Return whether a grid's stages on m replicas, with `after` workers behind them, fit [start, stop]."""
        return self.parts(grid).num_bytes(self.depth(m, after)) <= self.limit_bytes

    def fit_all(self, states: States, stages: Sequence[tuple[int, int, int]], idle: int = 0) -> bool:
        """Return whether every replica of a plan fits.

        Args:
            states: the model.
            stages: start, stop and replicas of each.
            idle: workers that count as behind the last stage.
        """
        after = idle
        for start, stop, replicas in reversed(stages):
            if self.num_bytes(states, start, stop, self.depth(replicas, after)) > self.limit_bytes:
                return False
            after += replicas
        return True

    def parts(self, grid: StageGrid) -> MemoryLine:
        """Return what the stages of a grid keep however many minibatches are in flight, and of each."""
        states, unit = grid.work.states, grid.unit
        constant, stashed = self._beside(grid)
        constant = constant + grid.sums(states.recomputed_bytes)
        if states.activations is None or unit is None:
            resumed, _ = grid.cuts(states.sent_bytes * states.resumes + states.parted_bytes)
            return MemoryLine(constant[None], (stashed + grid.sums(states.saved_bytes) + resumed)[None])
        lines = on_device(unit.swapped_bytes, unit.forward_s, states.activations.pcie_bytes_per_s)
        once, each = (np.stack(parts) for parts in zip(*lines, strict=True))
        return MemoryLine(constant + once, stashed + unit.stays_bytes + each)

    def _beside(self, grid: StageGrid) -> tuple[Floats, Floats]:
        """Return the same without activations."""
        states = grid.work.states
        weights = grid.sums(states.parameter_bytes)
        once = grid.sums(states.stepped_bytes) * (1 + self.state_bytes_per_byte + self.masters)
        before, after = grid.cuts(states.sent_bytes)
        stashed = weights if self.versions is None else 0.0 * weights
        return once + weights * (self.versions or 0) + 2 * (before + after), stashed


def in_flight_interleaved(order: str, positions: int, chunks: int, num_units: int) -> list[int]:
    """Return the most microbatches in flight of every stage where workers have several: read off the schedule.

    A worker's stages are not at their most at the same time, so that its memory is a little less than their sum.

    Args:
        order: the order of work, a name in `schedule.orders.ORDERS`.
        positions: workers that a microbatch passes.
        chunks: stages per worker.
        num_units: microbatches per update.
    """
    num_stages = positions * chunks
    if order == ALL_FORWARDS:
        return [num_units] * num_stages
    pipeline = Pipeline((1,) * num_stages, chain(num_stages), order, True, positions, num_units, chunks=chunks)
    return list(most_in_flight(pipeline))
