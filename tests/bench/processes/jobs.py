"""The jobs of the bench's workers; they run in all processes of a group."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from pipebench.zoo.mnist5k import mnist5k
from tests.bench.processes import memory, traffic
from tests.bench.processes.comparison import compare
from tests.bench.processes.ours import Ours
from tests.bench.processes.references import DDP, FSDP, distance_from_plain_loop
from tests.bench.processes.sides import OURS, Given, Side, make_side, subject_of

_WARM_UP = 2


def comparisons(given: Mapping[str, Any], rows: Sequence[tuple[str, str, float, int]], pairs: int) -> list[Any]:
    """Compare pairs of sides, one row after another.

    The sides of a row are closed after it, since threads of idle connections wake now and then.

    Args:
        given: of `Given.to_json`.
        rows: names of ours and theirs, the target and the number of minibatches.
        pairs: interleaved pairs of measurements per row.

    Returns:
        The fields of the `Comparison` of every row.
    """
    found = Given.from_json(given)
    results = []
    for ours, theirs, target, count in rows:
        names = dict.fromkeys((ours, theirs))
        settings = {name: subject_of(found, name).settings for name in names}
        sides: dict[str, Side] = {}
        for name in names:
            with settings[name]():
                sides[name] = make_side(found, name)

        def train(name: str, sides: Mapping[str, Side] = sides, settings: Any = settings, count: int = count) -> None:
            with settings[name]():
                sides[name].train(count)

        result = compare(f"{ours} against {theirs}", partial(train, ours), partial(train, theirs), target, pairs)
        results.append(asdict(result))
        for side in sides.values():
            if isinstance(side, Ours):
                side.close()
    return results


def peak(given: Mapping[str, Any], side: str, num_minibatches: int) -> int:
    """Return this process's peak memory [bytes] of training; the workers should have done nothing else before."""
    found = Given.from_json(given)
    mnist5k().fetch("train", range(2), ["image", "label"])  # reading the digits takes memory that isn't training's

    def make() -> Any:
        made = make_side(found, side)
        return lambda: made.train(num_minibatches)

    return memory.peak_bytes(make)


def sent(given: Mapping[str, Any], side: str, num_minibatches: int) -> tuple[int, dict[str, int]]:
    """Return the bytes that the loopback interface carried, and those that this process's engine counted, by kind."""
    made = make_side(Given.from_json(given), side)
    made.train(_WARM_UP)
    before = dict(made.sent_bytes()) if isinstance(made, Ours) else {}
    carried = traffic.bytes_of(lambda: made.train(num_minibatches))
    after = dict(made.sent_bytes()) if isinstance(made, Ours) else {}
    return carried, {kind: count - before.get(kind, 0) for kind, count in after.items()}


def distances(given: Mapping[str, Any], sides: Sequence[str], steps: int) -> list[float]:
    """Return the distances of several sides, one after another; see `distance`."""
    return [distance(given, side, steps) for side in sides]


def distance(given: Mapping[str, Any], side: str, steps: int) -> float:
    """Return the distance of a side's final weights from a plain loop's, over the distance that the loop went.

    Not for `ALONE`, nor for `pipedream`, whose gradients are stale.
    """
    found = Given.from_json(given)
    made = make_side(found, side)
    if side in (DDP, FSDP, OURS[DDP], OURS[FSDP]):
        made.train(2 * steps)
        return distance_from_plain_loop(made.weights(), found.subject, steps, parts=1, of=2)
    made.train(steps)
    return distance_from_plain_loop(made.weights(), found.subject, steps, parts=found.subject.microbatches)
