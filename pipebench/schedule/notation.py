"""Plans as the papers write them: `15-1`, `2-1-1`, `straight`, `16`."""

import math
import re
from collections.abc import Sequence

from pipebench.errors import PlanError, nearest, shown
from pipebench.schedule.modes import AUTO, Mode

STRAIGHT = "straight"
SHAPES = {
    "one": "a single worker: `auto` or `1`",
    "one-stage": "one stage on all its workers: `auto` or a number such as `4`",
    "straight": "one worker per stage: `auto`, `straight` or e.g. `1-1-1-1`",
    "equal": "`auto`, `straight` or equally many workers for every stage such as `2-2-2`",
    "even": "`auto`, `straight` (two for every stage) or equally many, an even number, such as `2-2`",
    "any": "`auto`, `straight` or replicas per stage such as `2-1-1`",
}
_NOTATION = re.compile(r"[1-9][0-9]{0,6}(-[1-9][0-9]{0,6})*", re.ASCII)


def parse_plan(given: object, mode: Mode, num_workers: int) -> tuple[int, ...]:
    """Return the replicas of every stage, or of every position if workers have several stages.

    Args:
        given: `straight`, a number of workers, or replicas per stage joined by `-`. In modes with one worker or one
            stage also `auto`, which is for the planner to resolve in all others.
        mode: decides which shapes of plans are allowed.
        num_workers: the cluster's number of workers.

    Raises:
        PlanError: `given` is no plan, has a shape that the mode doesn't allow, or needs more workers.
    """
    replicas = _replicas(given, mode, num_workers)
    if not _has_shape(replicas, mode.shape):
        raise PlanError(f"got {_shown(given)}, this mode takes {SHAPES[mode.shape]}")
    if sum(replicas) > num_workers:
        raise PlanError(f"got {_shown(given)}, which needs {sum(replicas)} workers; the cluster has {num_workers}")
    return replicas


def format_plan(replicas: Sequence[int]) -> str:
    """Return the papers' notation; `straight` for two or more stages of one worker each."""
    if len(replicas) > 1 and set(replicas) == {1}:
        return STRAIGHT
    return "-".join(str(count) for count in replicas)


def streams_problem(replicas: Sequence[int], streams: int | None) -> str | None:
    """Return why a plan can't train on this many streams of text, or None if it can.

    Minibatches take turns over the streams and over a stage's replicas. A stream's carried state stays on one replica
    only if the number of replicas divides that of streams.
    """
    if streams is None or all(streams % r == 0 for r in replicas):
        return None
    needed = math.lcm(*replicas)
    return (
        f"{streams} with plan {format_plan(replicas)}, whose replicas would take turns with a stream that one of them "
        f"has to carry on: allowed are multiples of {needed}"
    )


def _replicas(given: object, mode: Mode, num_workers: int) -> tuple[int, ...]:
    """Return the replicas of a plan as given, before checks against mode and cluster."""
    text = str(given).strip()
    if text == AUTO and mode.is_one_stage:
        return (1,) if mode.shape == "one" else (num_workers,)
    if text == STRAIGHT:
        return (2,) * (num_workers // 2) if mode.shape == "even" else (1,) * num_workers
    if isinstance(given, bool) or not isinstance(given, str | int) or not _NOTATION.fullmatch(text):
        others = "replicas per stage such as 15-1, 2-1-1 or 16, or a plan's file such as plan.json"
        hint = nearest(given, (AUTO, STRAIGHT)) if isinstance(given, str) else ""
        raise PlanError(f"got {shown(given)}, allowed are {AUTO}, {STRAIGHT}, or {others}{hint}")
    return tuple(int(part) for part in text.split("-"))


def _shown(given: object) -> str:
    """Return a plan as it was given, cut to 40 characters."""
    text = str(given).strip()
    return text if len(text) <= 40 else f"{text[:37]}..."


def _has_shape(replicas: Sequence[int], shape: str) -> bool:
    """Return whether a plan has one of the `SHAPES`."""
    if shape == "one":
        return tuple(replicas) == (1,)
    if shape == "one-stage":
        return len(replicas) == 1
    if shape in ("equal", "even"):
        return len(set(replicas)) == 1 and (shape == "equal" or replicas[0] % 2 == 0)
    return shape == "any" or set(replicas) == {1}
