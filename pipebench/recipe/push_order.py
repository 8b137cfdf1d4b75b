"""The order of pushes that a run has kept, read to be repeated: `parallelism.push_order`."""

from collections.abc import Iterator

from pipebench.schedule.pushes import Pushes, PushOrder
from pipebench.typed_json import read_file


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
