"""Plans that were found before in this process.

The runs of a sweep and of several seeds mostly ask for the same plan, and each run asks twice: before the first run, so
that all faults are found, and when it begins. A search takes seconds, for large models minutes.
"""

import hashlib
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple, TypeVar, cast

from pipebench.planner.compare import compare
from pipebench.planner.planner import Planner
from pipebench.planner.plans import Comparison, PlanEstimate, Request

_Function = TypeVar("_Function", bound=Callable[..., object])


class Arrangement(NamedTuple):
    """What the planner adds to replicas that a recipe gives."""

    starts: tuple[int, ...]  # the first layers of all stages but the first
    memory: tuple[str, ...]  # every layer's policy
    devices: tuple[int, ...]  # every worker's


def _once(function: _Function) -> _Function:
    """Return a function that computes its result for equal arguments once; a result is not to be changed.

    Arguments are compared by their `repr`: a profile has thousands of rows, and is made anew for every run.
    """
    found: dict[bytes, object] = {}

    @wraps(function)
    def remembering(*given: Any, **named: Any) -> object:
        key = hashlib.sha256(repr((given, named)).encode()).digest()
        if key not in found:
            found[key] = function(*given, **named)
        return found[key]

    return cast(_Function, remembering)


@_once
def best_plan(request: Request, mode: str) -> PlanEstimate:
    """Return `Planner.best` of a mode."""
    return Planner(request, mode).best()


@_once
def compared(request: Request, mode: str | None = None, *, others: bool = True) -> Comparison:
    """Return `compare` of a mode; None for the fastest."""
    return compare(request, mode, others=others)


@_once
def arranged(request: Request, mode: str, replicas: Sequence[int], starts: Sequence[int] | None) -> Arrangement:
    """Return the rest of a plan whose replicas are given; `starts` None for the best cuts.

    Raises:
        PlanError: more stages than places to cut, or a stage that chooses its policies fits with none.
    """
    planner = Planner(request, mode)
    cuts = planner.starts_of(replicas) if starts is None else starts
    memory = planner.policies_of([*replicas] * planner.mode.chunks, cuts)
    return Arrangement(tuple(cuts), memory, planner.devices_of(replicas, cuts))
