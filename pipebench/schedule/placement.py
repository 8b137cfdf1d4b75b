"""Placements: the worker of every replica of every stage, which the order of work decides.

In a *loop*, the usual one, stage s is at position s mod P of P. In a *V* workers hold stages from both ends: of n
stages, s and n - 1 - s are on the same one. In *two ways* replicas meet in a V: a worker that has replica j of r of
stage s has replica r - 1 - j of stage n - 1 - s. An order read from a file stands where the file has it.
"""

import itertools
from collections.abc import Sequence

from pipebench.schedule.csv_form import is_csv, read_csv

ZBV, DUALPIPEV, DUALPIPE = "zbv", "dualpipev", "dualpipe"
_IN_A_V, _TWO_WAYS = (ZBV, DUALPIPEV, DUALPIPE), (DUALPIPE,)


def places(order: str, replicas: Sequence[int], chunks: int) -> tuple[tuple[int, ...], ...]:
    """Return the workers of every stage's replicas, of which stages of one position have equally many.

    Workers are numbered position by position, positions in the order of their first stages. The order of work is a name
    in `orders.ORDERS`, or the path of a file; `chunks` are the stages per worker.
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
    return tuple(workers[at][:: -1 if stage in mirrored else 1] for stage, at in enumerate(positions))
