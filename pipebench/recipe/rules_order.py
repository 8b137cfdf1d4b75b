"""Rules on how much travels between two flushes, and on the rows and microbatches of a schedule's file."""

from typing import Any

from pipebench.errors import PlanError
from pipebench.recipe.draft import Draft, Problems, rule
from pipebench.recipe.plan_file import asked_replicas
from pipebench.recipe.schema import LARGEST
from pipebench.recipe.typecheck import shown
from pipebench.schedule.csv_form import is_csv, read_csv
from pipebench.schedule.modes import Mode
from pipebench.schedule.orders import ORDERS, order_of


@rule
def _largest(cluster: Any, row: Mode, accumulate: Any) -> Problems:
    """`accumulate: largest` needs minibatches that each take memory, and a memory limit."""
    if accumulate != LARGEST:
        return
    if not order_of(row.order).keeps_all:
        orders = " or ".join(name for name, each in ORDERS.items() if each.keeps_all)
        why = f"got {LARGEST} with order {row.order}, in which more minibatches take no more memory"
        yield "parallelism.accumulate", f"{why}: allowed is a whole number, or order: {orders}"
    elif cluster.memory_bytes is None:
        why = f"got {LARGEST} on cluster {cluster.name}, whose file gives no memory size"
        yield "parallelism.accumulate", f"{why}: allowed is a whole number"


@rule
def _rows_of_order(cluster: Any, row: Mode, plan: Any) -> Problems:
    """An order file needs a row per position in the pipeline, with the stages of its workers."""
    if not is_csv(row.order):
        return
    schedule = read_csv(row.order)
    try:
        replicas = asked_replicas(plan, row, cluster.num_workers)
    except PlanError:  # another rule's fault
        return
    rows = len(schedule.rows)
    if replicas is None or len(replicas) != rows or len({*replicas}) != 1:
        allowed = f"as many workers for each row, such as {'-'.join('1' * rows)}"
        yield "parallelism.plan", f"got {shown(plan)} with an order of {rows} rows: allowed are {allowed}"
    elif row.chunks != schedule.chunks:
        given = f"got {row.chunks} with an order whose rows have {schedule.chunks} stages each"
        yield "parallelism.chunks", f"{given}: allowed is {schedule.chunks}"


@rule
def _units_of_order(
    draft: Draft, row: Mode, microbatches: int, accumulate: int | None, minibatch_size: int
) -> Problems:
    """An order file fixes the number of microbatches between two flushes: of one minibatch, or of several."""
    if not is_csv(row.order):
        return
    needed, whole = read_csv(row.order).num_microbatches, accumulate or 1
    cuts = row.microbatches and whole == 1 and ("parallelism", "microbatches") not in draft.leaves.found
    units = whole * (needed if cuts else microbatches)
    if units != needed:
        given = f"got {units} microbatches per update with an order of {needed}"
        yield "parallelism.microbatches", f"{given}: allowed is {needed}, or accumulate with a product of {needed}"
    elif cuts and minibatch_size % needed:
        given = f"got {needed}, of the order's file, which doesn't divide minibatch_size {minibatch_size}"
        yield (
            "parallelism.microbatches",
            f"{given}: allowed is a minibatch_size that it divides, or accumulate: {needed}",
        )
