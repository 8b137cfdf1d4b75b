"""The order of pushes that a run has kept, read to be repeated: `parallelism.push_order`."""

from pipebench.errors import Fault, RecipeError
from pipebench.files import read_text
from pipebench.schedule.pushes import VERSION, Pushes, PushOrder
from pipebench.typed_json import JsonError, read


def load_push_order(path: str, num_workers: int | None = None) -> list[Pushes]:
    """Read the order of pushes of a run.

    Args:
        path: of its artifact.
        num_workers: how many workers are to repeat it; None where that isn't known yet.

    Raises:
        RecipeError: it can't be read, isn't an order of pushes, or not one that so many workers can have.
    """
    text = read_text(path)
    try:
        found = read(PushOrder, text)
        if found.pipebench_push_order != VERSION:
            raise JsonError(f"pipebench_push_order: got {found.pipebench_push_order}, allowed is {VERSION}")
    except JsonError as error:
        raise RecipeError([Fault(path, "", str(error))]) from error
    for index, pushes in enumerate(found.segments):
        problem = _problem(pushes, num_workers)
        if problem is not None:
            raise RecipeError([Fault(path, f"segments[{index}].minibatches", problem)])
    return found.segments


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
