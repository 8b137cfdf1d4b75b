"""The order of pushes that a run has kept, read to be repeated: `parallelism.push_order`."""

from collections.abc import Callable, Iterator
from typing import Any, Final

from pipebench.errors import PlanError, RecipeError
from pipebench.extensions.asynchronous.pushes import Pushes, PushOrder
from pipebench.recipe.draft import Problems
from pipebench.recipe.plan_file import is_plan_file
from pipebench.recipe.schema import Recipe
from pipebench.schedule.modes import MODES
from pipebench.schedule.notation import parse_plan
from pipebench.schedule.pipeline import Pipeline
from pipebench.typed_json import read_file


def settings(recipe: Recipe, pipeline: Pipeline) -> dict[int, list[int]]:
    """Return the order of pushes to repeat, by the minibatch that a segment begins with; empty for the clock's."""
    path = recipe.parallelism.push_order
    segments = [] if path is None else load_push_order(path, pipeline.replicas[0])
    return {pushes.first: pushes.minibatches for pushes in segments}


def load_push_order(path: str, num_workers: int | None = None) -> list[Pushes]:
    """Read the order of pushes of a run.

    Args:
        path: of its artifact.
        num_workers: how many workers are to repeat it; None where that isn't known yet.

    Raises:
        RecipeError: it can't be read, isn't an order of pushes, or not one that so many workers can have.
    """

    def problems(found: PushOrder) -> Iterator[tuple[str, str]]:
        for index, pushes in enumerate(found.segments):
            problem = _problem(pushes, num_workers)
            if problem is not None:
                yield f"segments[{index}].minibatches", problem

    return read_file(PushOrder, path, problems).segments


def _problem(pushes: Pushes, num_workers: int | None) -> str | None:
    """Say why workers can't push in an order, or return None."""
    found = pushes.minibatches
    if sorted(found) != list(range(len(found))):
        return f"got {len(found)} minibatches, allowed is every one from 0 to {len(found) - 1} once"
    last: dict[int, int] = {}
    for minibatch in found if num_workers is not None else ():
        worker = minibatch % num_workers  # type: ignore[operator]
        if minibatch < last.get(worker, -1):
            return (
                f"got minibatch {minibatch} after {last[worker]}, and worker {worker} of {num_workers} runs them in "
                "ascending order"
            )
        last[worker] = minibatch
    return None


def _push_order(cluster: Any, mode: str, plan: Any, given: str | None) -> Problems:
    """An order of pushes is for as many workers."""
    if given is None:
        return
    try:
        replicas = None if is_plan_file(plan) else parse_plan(plan, MODES[mode], cluster.num_workers)
        load_push_order(given, None if replicas is None else replicas[0])
    except PlanError:  # told of the plan
        return
    except RecipeError as error:
        yield from (("parallelism.push_order", str(fault)) for fault in error.faults)


RULES: Final[tuple[tuple[tuple[str, ...], Callable[..., Problems]], ...]] = (
    (("@cluster", "parallelism.mode", "parallelism.plan", "parallelism.push_order"), _push_order),
)
