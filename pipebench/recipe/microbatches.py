"""Chooses the number of microbatches of a recipe that doesn't give one."""

from collections.abc import Callable
from typing import Any

from pipebench.cluster import Cluster
from pipebench.recipe.plan_file import asked_replicas
from pipebench.recipe.ranges import TIMINGS
from pipebench.schedule.csv_form import is_csv, read_csv
from pipebench.schedule.modes import AUTO, MODES
from pipebench.schedule.pipeline import default_microbatches

DECIDING = ("mode", "plan", "flush", "weights", "accumulate", "order")  # keys of `parallelism`


def microbatches_by_default(value: Callable[[str], Any], cluster: Cluster, minibatch_size: int) -> int:
    """Return the default number of microbatches of the recipe's mode, or of the modes that `auto` compares.

    It is 1 if `accumulate` fills the pipeline with whole minibatches, or if the mode doesn't cut minibatches. An order
    file has a number of its own. A plan that is left to the planner counts as a straight one.

    Args:
        value: returns a recipe's value by its full key.
        cluster: the recipe's cluster.
        minibatch_size: in samples.
    """
    mode, plan, flush, weights, accumulate, order = (value(f"parallelism.{key}") for key in DECIDING)
    if accumulate not in (None, 1):
        return 1
    if mode == AUTO:
        if value("model.profile") is not None or value("engine.timing") not in TIMINGS:
            return 1  # a profile file has times at few sizes
        return default_microbatches(cluster.num_workers, minibatch_size)
    row = MODES[mode]
    if not row.takes_microbatches(flush, weights):
        return 1
    if order is not None and is_csv(order):
        return read_csv(order).num_microbatches
    replicas = asked_replicas(plan, row, cluster.num_workers)
    stages = cluster.num_workers if replicas is None else len(replicas)
    return default_microbatches(stages, minibatch_size)
