"""The jobs of the bench's crews."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from pipebench.zoo.mnist5k import mnist5k
from tests.bench.processes import memory, traffic
from tests.bench.processes.duel import duel
from tests.bench.processes.ours import Ours
from tests.bench.processes.references import DDP, FSDP, distance_from_plain_loop
from tests.bench.processes.sides import OURS, Given, Side, make_side, subject_of

_WARM_UP = 2


def duels(given: Mapping[str, Any], rows: Sequence[tuple[str, str, float, int]], pairs: int) -> list[Any]:
    """Time sides against each other, one crew for all: (ours, theirs, target, minibatches) in a row.

    A row's sides are made for it and given up after it: idle connections have threads that wake now and then.

    Returns:
        Per row the fields of the duel.
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

        result = duel(f"{ours} against {theirs}", partial(train, ours), partial(train, theirs), target, pairs)
        results.append(asdict(result))
        for side in sides.values():
            if isinstance(side, Ours):
                side.close()
    return results


def peak(given: Mapping[str, Any], side: str, num_minibatches: int) -> int:
    """Return this process's peak memory of training; the crew should do nothing else before."""
    found = Given.from_json(given)
    mnist5k().fetch("train", range(2), ["image", "label"])  # reading the digits takes memory that training doesn't

    def make() -> Any:
        made = make_side(found, side)
        return lambda: made.train(num_minibatches)

    return memory.peak_bytes(make)


def sent(given: Mapping[str, Any], side: str, num_minibatches: int) -> tuple[int, dict[str, int]]:
    """Return the bytes that the loopback interface carried, and what this process's engine says it sent, by kind."""
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
    """Return how far a side's weights end from a plain loop's, over how far the loop went; not of `ALONE`.

    Without a flush weights are stale, which no plain loop's are: those of `pipedream` differ.
    """
    found = Given.from_json(given)
    made = make_side(found, side)
    if side in (DDP, FSDP, OURS[DDP], OURS[FSDP]):
        made.train(2 * steps)
        return distance_from_plain_loop(made.weights(), found.subject, steps, parts=1, of=2)
    made.train(steps)
    return distance_from_plain_loop(made.weights(), found.subject, steps, parts=found.subject.microbatches)
