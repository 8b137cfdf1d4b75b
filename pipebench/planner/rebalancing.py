"""The planner's part of Algorithm 1: from what stages take, as measured, to better cuts, or to none.

Paper: vPipe (TPDS'21) section 4.2, Algorithm 1. Stages whose times differ are unbalanced; Algorithm 3 cuts anew, and
that goes on until stages are balanced or no better cuts are found.
Differs: the listing doesn't say when stages count as unbalanced: here the slowest takes `UNBALANCED` more than the
mean. A layer takes what its profile says, times what its stage takes by measurement over what the profile says of it.
"""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import replace

from pipebench.model.plan import Plan
from pipebench.planner.partition.consecutive import Fits, Line, repartition
from pipebench.planner.partition.graph import timed_graph
from pipebench.planner.partition.parts import TOLERANCE
from pipebench.profile.model import LayerProfile, Profile
from pipebench.schedule.pipeline import Pipeline
from pipebench.schedule.programs import most_in_flight
from pipebench.schedule.weights import WEIGHT_POLICIES
from pipebench.simulate.memory import stage_memory

UNBALANCED = 0.05  # the slowest stage over the mean of all, less one
WORTHWHILE = 0.01  # by how much, at least, the slowest stage has to become faster


def better_cuts(
    rows: Sequence[LayerProfile],
    starts: Sequence[int],
    stage_s: Sequence[float],
    may_start: Collection[int] | None = None,
    fits: Fits | None = None,
) -> tuple[int, ...] | None:
    """Return better first layers of all stages but the first, or None: balanced, or nothing better is found that fits.

    Args:
        rows: the profile's layers and, last, the loss, at the size that travels.
        starts: the first layers as they are.
        stage_s: seconds of a forward and a backward of every stage, as measured.
        may_start: layers that a stage may begin with; None: any but the first.
        fits: whether a stage fits in memory; None: it does.
    """
    if max(stage_s) <= (1 + UNBALANCED) * sum(stage_s) / len(stage_s):
        return None
    line = Line(timed_graph(rows, layer_seconds(rows, starts, stage_s)), may_start)
    within = replace(line, fits=fits)
    found = _faster(line, starts)
    if not within.fit(found):  # to look at every stage that comes into question takes long, and is seldom needed
        found = _faster(within, starts)
    is_better = line.slowest_s(found) <= (1 - WORTHWHILE) * line.slowest_s(starts)
    return found if is_better and within.fit(found) else None


def _faster(line: Line, starts: Sequence[int]) -> tuple[int, ...]:
    return min((repartition(line, starts, tolerance) for tolerance in (TOLERANCE, 0.0)), key=line.slowest_s)


def fits_within(limit_bytes: int | None, profile: Profile, plan: Plan, pipeline: Pipeline, num_samples: int) -> Fits:
    """Return what says whether a stage of other layers fits in a device's memory, each with the policy it has now.

    Args:
        limit_bytes: of a device; None: everything fits.
        profile: layer costs.
        plan: the plan as it is, straight.
        pipeline: the plan's.
        num_samples: of a unit.
    """
    memory = tuple(policy for stage in plan.stages for policy in stage.memory)
    in_flight, versions = most_in_flight(pipeline), WEIGHT_POLICIES[pipeline.weights].versions

    def fits(part: int, start: int, stop: int) -> bool:
        if limit_bytes is None:
            return True
        own = replace(plan.stages[part], start=start, stop=stop, memory=memory[start:stop])
        cut = replace(plan, stages=(*plan.stages[:part], own, *plan.stages[part + 1 :]))
        needed = stage_memory(profile, cut, pipeline, part, {})
        return needed.most_bytes(num_samples, in_flight[part], versions or in_flight[part]) <= limit_bytes

    return fits


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
