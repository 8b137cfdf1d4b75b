"""Placements: which worker stands on which device, so that workers that communicate most share a server.

Order along the devices is best if every stage fills whole servers. Otherwise the boundary of a server may split a stage
with many parameters (3-4-1 on two servers of 4), or separate two stages that send each other more than the bytes of
their gradient sums (4-4 on the same servers).

A placement is an *order*: device i holds worker `order[i]`, with workers numbered stage by stage. Only the first
devices are used, since process r of a run computes on device r.
"""

import itertools
import math
import operator
from collections.abc import Iterator, Sequence

from pipebench.cluster import Cluster
from pipebench.planner.placement_costs import LONGEST_CYCLE, along

Order = tuple[int, ...]

_ALL_UP_TO = 8  # workers; beyond, only placements of a known form are listed
_PERMUTED_UP_TO = 4  # stages; beyond, they stay in order
_INTERLEAVED_UP_TO = 16  # stages; beyond, none are
_MOST_SHIFTS = 16  # of the first server's boundary, and of minibatches when placements are compared
_COST_AT_MOST = 40_000  # of pricing all placements, in units of `_cost`: a quarter of a second


def placements(cluster: Cluster, replicas: Sequence[int]) -> list[list[tuple[int, ...]]]:
    """Return candidate placements, each the devices of every stage's replicas, in order along the devices first.

    Placements that differ only in the names of equal servers or of minibatches are listed once, because their
    bottlenecks are equal. Up to 8 workers all are listed, within a budget. For more workers these are, each shifted
    along the devices: stages in order, stages permuted, and neighbouring stages interleaved so that replicas which
    exchange minibatches share a server. There is a single one if all workers share a server or there is one stage.
    """
    count = sum(replicas)
    counts = (level.count for level in cluster.levels[:-1])
    sizes = [size for size in itertools.accumulate(counts, operator.mul) if 1 < size < count]
    first = tuple(range(count))
    found = {_signature(first, sizes, replicas): first}
    if sizes and len(replicas) > 1:
        most = max(1, _COST_AT_MOST // _cost(replicas))
        for order in itertools.islice(_orders(replicas, sizes), 16 * most):
            found.setdefault(_signature(order, sizes, replicas), order)
            if len(found) >= most:
                break
    return [_devices(_canonical(order, sizes), replicas) for order in found.values()]


def _cost(replicas: Sequence[int]) -> int:
    """Return the planner's time to price a placement, in units of about 6 microseconds."""
    cycles = sum(min(math.lcm(a, b), LONGEST_CYCLE) for a, b in itertools.pairwise(replicas))
    return 64 + len(replicas) ** 2 + cycles


def _orders(replicas: Sequence[int], sizes: Sequence[int]) -> Iterator[Order]:
    """Yield candidate orders, simple ones first, with repetitions."""
    count = sum(replicas)
    for order in _unshifted(replicas):
        for shift in range(min(sizes[0], _MOST_SHIFTS)):
            yield order[shift:] + order[:shift]
    if count <= _ALL_UP_TO:
        yield from _all_orders(tuple(range(count)), sizes)


def _unshifted(replicas: Sequence[int]) -> Iterator[Order]:
    workers = along(replicas)
    stages = range(len(replicas))
    yield tuple(range(sum(replicas)))
    if len(replicas) <= _INTERLEAVED_UP_TO:
        for first, last in itertools.combinations(stages, 2):
            middle = _interleaved(replicas, stages[first : last + 1])
            yield (*range(workers[first].start), *middle, *range(workers[last].stop, sum(replicas)))
    if len(replicas) <= _PERMUTED_UP_TO:
        for permuted in itertools.permutations(stages):
            yield tuple(itertools.chain.from_iterable(workers[stage] for stage in permuted))


def _interleaved(replicas: Sequence[int], stages: Sequence[int]) -> list[int]:
    """Return the workers of some stages, those of the same minibatches together."""
    workers = along(replicas)
    classes = math.gcd(*(replicas[stage] for stage in stages))
    places = [(r % classes, stage, r) for stage in stages for r in range(replicas[stage])]
    return [workers[stage][r] for _, stage, r in sorted(places)]


def _all_orders(workers: Order, sizes: Sequence[int]) -> Iterator[Order]:
    """Yield every way to fill components of these sizes, innermost first, up to renaming of equal components."""
    if not sizes or len(workers) <= sizes[0]:
        yield workers
        return
    *inner, size = sizes
    for groups in _groups(workers, size):
        for chosen in itertools.product(*(list(_all_orders(group, inner)) for group in groups)):
            yield tuple(itertools.chain.from_iterable(chosen))


def _groups(workers: Order, size: int) -> Iterator[list[Order]]:
    """Yield the ways to make groups of `size`, the last of which holds the remainder."""
    if not workers:
        yield []
        return
    if len(workers) % size:
        for partial in itertools.combinations(workers, len(workers) % size):
            others = tuple(worker for worker in workers if worker not in partial)
            yield from ([*groups, partial] for groups in _groups(others, size))
        return
    for mates in itertools.combinations(workers[1:], size - 1):
        group = (workers[0], *mates)
        others = tuple(worker for worker in workers if worker not in group)
        yield from ([group, *groups] for groups in _groups(others, size))


def _canonical(order: Order, sizes: Sequence[int]) -> Order:
    """Return the same components with the smallest workers first; only equal components change places."""
    if not sizes:
        return tuple(sorted(order))
    *inner, size = sizes
    parts: list[Order] = [_canonical(order[i : i + size], inner) for i in range(0, len(order), size)]
    parts.sort(key=lambda part: (-len(part), min(part)))
    return tuple(itertools.chain.from_iterable(parts))


def _signature(order: Order, sizes: Sequence[int], replicas: Sequence[int]) -> Order:
    """Return a key that equal placements share: the smallest of their orders over all shifts of minibatches."""
    stages = along(replicas)
    shifts = math.lcm(*replicas)
    if shifts > _MOST_SHIFTS:
        return _canonical(order, sizes)

    def shifted(by: int) -> Order:
        turned = {own[r]: own[(r + by) % len(own)] for own in stages for r in range(len(own))}
        return tuple(turned[worker] for worker in order)

    return min(_canonical(shifted(by), sizes) for by in range(shifts))


def _devices(order: Order, replicas: Sequence[int]) -> list[tuple[int, ...]]:
    device_of = {worker: device for device, worker in enumerate(order)}
    return [tuple(device_of[worker] for worker in own) for own in along(replicas)]
