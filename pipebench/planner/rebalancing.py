"""The planner's part of Algorithm 1: from what stages take, as measured, to better cuts, or to none.

Paper: vPipe (TPDS'21) section 4.2, Algorithm 1. Stages whose times differ are unbalanced; Algorithm 3 cuts anew, and
that goes on until stages are balanced or no better cuts are found.
Differs: the listing doesn't say when stages count as unbalanced: here the slowest takes `UNBALANCED` more than the
mean. A layer takes what its profile says, times what its stage takes by measurement over what the profile says of it.
"""

import itertools
from collections.abc import Collection, Sequence

from pipebench.planner.partition.consecutive import Line, repartition
from pipebench.planner.partition.graph import timed_graph
from pipebench.planner.partition.parts import TOLERANCE
from pipebench.profile.model import LayerProfile

UNBALANCED = 0.05  # the slowest stage over the mean of all, less one
WORTHWHILE = 0.01  # by how much, at least, the slowest stage has to become faster


def better_cuts(
    rows: Sequence[LayerProfile],
    starts: Sequence[int],
    stage_s: Sequence[float],
    may_start: Collection[int] | None = None,
) -> tuple[int, ...] | None:
    """Return better first layers of all stages but the first, or None: balanced, or nothing better is found.

    Args:
        rows: the profile's layers and, last, the loss, at the size that travels.
        starts: the first layers as they are.
        stage_s: seconds of a forward and a backward of every stage, as measured.
        may_start: layers that a stage may begin with; None: any but the first.
    """
    if max(stage_s) <= (1 + UNBALANCED) * sum(stage_s) / len(stage_s):
        return None
    line = Line(timed_graph(rows, layer_seconds(rows, starts, stage_s)), may_start)
    found = min((repartition(line, starts, tolerance) for tolerance in (TOLERANCE, 0.0)), key=line.slowest_s)
    return found if line.slowest_s(found) <= (1 - WORTHWHILE) * line.slowest_s(starts) else None


def layer_seconds(rows: Sequence[LayerProfile], starts: Sequence[int], stage_s: Sequence[float]) -> list[float]:
    """Return what every layer takes, forward and backward; the last stage's time is the loss's, too."""
    seconds: list[float] = []
    for (start, stop), measured_s in zip(itertools.pairwise([0, *starts, len(rows)]), stage_s, strict=True):
        expected = [row.forward_s + row.backward_s for row in rows[start:stop]]
        total_s = sum(expected)
        seconds += [each * measured_s / total_s if total_s else measured_s / len(expected) for each in expected]
    return seconds


def one_step(starts: Sequence[int], wanted: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return cuts as near to the wanted ones as they can be if no layer moves further than to the next stage."""
    ends = [0, *starts, num_layers]
    found: list[int] = []
    for boundary, start in enumerate(wanted, 1):
        nearest = min(max(start, ends[boundary - 1] + 1), ends[boundary + 1] - 1)
        found.append(max(nearest, found[-1] + 1) if found else nearest)
    return tuple(found)
