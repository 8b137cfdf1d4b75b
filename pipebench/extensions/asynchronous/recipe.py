"""The recipe's key `parallelism.push_order`: the file of a run's order of pushes, to repeat it."""

from collections.abc import Callable, Iterator
from typing import Any, Final

from pipebench.errors import PlanError, RecipeError, shown
from pipebench.extensions.asynchronous.pushes import Pushes, PushOrder
from pipebench.recipe.draft import Problems
from pipebench.recipe.engines import ENGINES
from pipebench.recipe.plan_file import is_plan_file
from pipebench.recipe.schema import Recipe
from pipebench.schedule.modes import MODES
from pipebench.schedule.notation import parse_plan
from pipebench.schedule.pipeline import Pipeline
from pipebench.typed_json import read_file


def settings(recipe: Recipe, pipeline: Pipeline) -> dict[int, list[int]]:
    """Return the order of pushes to repeat, by first minibatch of each segment; empty for the order of arrival."""
    path = recipe.parallelism.push_order
    segments = [] if path is None else load_push_order(path, pipeline.replicas[0])
    return {pushes.first: pushes.minibatches for pushes in segments}


def load_push_order(path: str, num_workers: int | None = None) -> list[Pushes]:
    """Read a run's order of pushes, segment by segment.

    Args:
        path: the run's artifact.
        num_workers: the workers of the run that repeats it; None if not known yet.

    Raises:
        RecipeError: it can't be read, isn't an order of pushes, or is impossible for so many workers.
    """

    def problems(found: PushOrder) -> Iterator[tuple[str, str]]:
        for index, pushes in enumerate(found.segments):
            problem = _problem(pushes, num_workers)
            if problem is not None:
                yield f"segments[{index}].minibatches", problem

    return read_file(PushOrder, path, problems).segments


def _problem(pushes: Pushes, num_workers: int | None) -> str | None:
    """Return why workers can't push in this order, or None if they can."""
    found = pushes.minibatches
    if sorted(found) != list(range(len(found))):
        return f"got {len(found)} minibatches, allowed is every one from 0 to {len(found) - 1} once"
    last: dict[int, int] = {}  # the last minibatch so far, by worker
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
    """Check that an order of pushes fits the number of workers."""
    if given is None:
        return
    try:
        replicas = None if is_plan_file(plan) else parse_plan(plan, MODES[mode], cluster.num_workers)
        load_push_order(given, None if replicas is None else replicas[0])
    except PlanError:  # reported for the plan
        return
    except RecipeError as error:
        yield from (("parallelism.push_order", str(fault)) for fault in error.faults)


def _simulated(given: str | None, kind: str) -> Problems:
    """Check that the engine trains: a simulation can't repeat an order of pushes."""
    if given is not None and not ENGINES[kind].trains:
        others = " or ".join(name for name, each in ENGINES.items() if each.trains)
        why = f"got {shown(given)} with engine {kind}, in which pushes are applied as they arrive"
        yield "parallelism.push_order", f"{why}: allowed is null, or engine.kind: {others}"


RULES: Final[tuple[tuple[tuple[str, ...], Callable[..., Problems]], ...]] = (
    (("@cluster", "parallelism.mode", "parallelism.plan", "parallelism.push_order"), _push_order),
    (("parallelism.push_order", "engine.kind"), _simulated),
)
