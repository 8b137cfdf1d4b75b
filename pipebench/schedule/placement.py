"""Placements: the worker of every replica of every stage, which depends on the order of work.

In a *loop*, the usual placement, stage s is at position s mod P of P positions. In a *V* of n stages, s and n - 1 - s
share a worker, so that workers hold stages from both ends. In *two ways* pipelines run through a V in both directions:
a worker that has replica j of r of stage s has replica r - 1 - j of stage n - 1 - s. A file's stages are at the
positions of their rows.
"""

import itertools
from collections.abc import Sequence

from pipebench.schedule.csv_form import is_csv, read_csv

ZBV, DUALPIPEV, DUALPIPE = "zbv", "dualpipev", "dualpipe"
_IN_A_V, _TWO_WAYS = (ZBV, DUALPIPEV, DUALPIPE), (DUALPIPE,)


def places(order: str, replicas: Sequence[int], chunks: int) -> tuple[tuple[int, ...], ...]:
    """Return, per stage, the workers of its replicas.

    Workers are numbered position by position, positions in the order of their first stages.

    Args:
        order: of work, a name in `orders.ORDERS` or the path of a file.
        replicas: per stage; stages of one position have equally many.
        chunks: stages per worker.
    """
    count, num_positions = len(replicas), len(replicas) // chunks
    found = read_csv(order).placement if is_csv(order) else ()
    if len(found) == count:
        position_of = {position: index for index, position in enumerate(dict.fromkeys(found))}
        positions = [position_of[position] for position in found]
    elif order in _IN_A_V and chunks == 2:
        positions = [min(stage, count - 1 - stage) for stage in range(count)]
    else:
        positions = [stage % num_positions for stage in range(count)]
    widths = [replicas[positions.index(position)] for position in range(num_positions)]
    workers = [tuple(range(a, b)) for a, b in itertools.pairwise([0, *itertools.accumulate(widths)])]
    mirrored = range(num_positions, count) if order in _TWO_WAYS and chunks == 2 else ()
    return tuple(workers[position][:: -1 if stage in mirrored else 1] for stage, position in enumerate(positions))
