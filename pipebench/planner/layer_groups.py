"""The layer groups of sharded data parallelism: what is gathered, used and freed as one.

Two groups are in memory at once, so they should be equal in parameters; where each ends decides nothing else, since all
run on the same workers.
"""

from collections.abc import Sequence

import numpy as np

from pipebench.planner.states import States


def layer_groups(states: States, most: int) -> list[tuple[int, int]]:
    """Return the groups of a model as pairs of states, at most `most` and each with parameters.

    Borders lie nearest to equal shares of the bytes of parameters; of equally near ones the last, so that layers
    without parameters stay with those before them. Tied parameters are in one group.
    """
    held, last = states.parameter_bytes, len(states) - 1
    bounds = [0]
    for group in range(1, most):
        distances = np.abs(held - held[last] * group / most)
        near = np.flatnonzero(distances == distances.min())
        border = int(near[-1])
        if border < last and held[border] > held[bounds[-1]] and states.inside[bounds[-1], border]:
            bounds.append(border)
    if len(bounds) > 1 and held[last] == held[bounds[-1]]:
        bounds.pop()
    return [*zip(bounds, [*bounds[1:], last], strict=True)]


def transient_bytes(group_bytes: Sequence[float], at_once: int) -> list[float]:
    """Return, per group, what it adds to the peak of bytes that only the `at_once` largest have at a time."""
    largest = sorted(range(len(group_bytes)), key=lambda index: -group_bytes[index])[:at_once]
    return [size if index in largest else 0.0 for index, size in enumerate(group_bytes)]
