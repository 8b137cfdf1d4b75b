"""Rules on orders of work: those of a schedule's file, and how much travels between two flushes."""

from typing import Any

from pipebench.errors import PlanError, choice
from pipebench.recipe.draft import Draft, Problems, rule
from pipebench.recipe.plan_file import asked_replicas
from pipebench.recipe.schema import LARGEST
from pipebench.recipe.typecheck import shown
from pipebench.schedule.csv_form import CsvError, is_csv, read_csv
from pipebench.schedule.modes import AUTO, MODES
from pipebench.schedule.orders import ORDERS, order_of


@rule("parallelism.order")
def _order(order: str | None) -> Problems:
    if order is None:
        return
    if not is_csv(order) and order not in ORDERS:
        yield "parallelism.order", f"{choice(order[:60], ORDERS)}, or a file in torch's CSV form such as schedule.csv"
        return
    try:
        order_of(order)
    except CsvError as error:
        yield "parallelism.order", str(error)


@rule("@cluster", "parallelism.mode", "parallelism.order", "parallelism.accumulate")
def _largest(cluster: Any, mode: str, order: str | None, accumulate: Any) -> Problems:
    """`accumulate: largest` needs minibatches that each take memory, and a memory limit."""
    if accumulate != LARGEST:
        return
    if mode == AUTO:
        why = f"got {LARGEST} with mode {AUTO}, which plans every mode"
        yield "parallelism.accumulate", f"{why}: allowed is a whole number"
        return
    given = order or MODES[mode].order
    if not order_of(given).keeps_all:
        orders = " or ".join(name for name, each in ORDERS.items() if each.keeps_all)
        why = f"got {LARGEST} with order {given}, in which more minibatches take no more memory"
        yield "parallelism.accumulate", f"{why}: allowed is a whole number, or order: {orders}"
    elif cluster.memory_bytes is None:
        why = f"got {LARGEST} on cluster {cluster.name}, whose file gives no memory size"
        yield "parallelism.accumulate", f"{why}: allowed is a whole number"


@rule("@cluster", "parallelism.mode", "parallelism.order", "parallelism.plan", "parallelism.chunks")
def _rows_of_order(cluster: Any, mode: str, order: str | None, plan: Any, chunks: int | None) -> Problems:
    """An order file needs a row per position in the pipeline, with the stages of its workers."""
    if mode == AUTO or order is None or not is_csv(order):
        return
    schedule, row = read_csv(order), MODES[mode]
    try:
        replicas = asked_replicas(plan, row, cluster.num_workers)
    except PlanError:  # another rule's fault
        return
    rows = len(schedule.rows)
    if replicas is None or len(replicas) != rows or len({*replicas}) != 1:
        allowed = f"as many workers for each row, such as {'-'.join('1' * rows)}"
        yield "parallelism.plan", f"got {shown(plan)} with an order of {rows} rows: allowed are {allowed}"
    elif (chunks or row.chunks) != schedule.chunks:
        given = f"got {chunks or row.chunks} with an order whose rows have {schedule.chunks} stages each"
        yield "parallelism.chunks", f"{given}: allowed is {schedule.chunks}"


@rule(
    "@draft",
    "parallelism.mode",
    "parallelism.order",
    "parallelism.microbatches",
    "parallelism.accumulate",
    "train.minibatch_size",
)
def _units_of_order(
    draft: Draft, mode: str, order: str | None, microbatches: int, accumulate: int | None, minibatch_size: int
) -> Problems:
    """An order file fixes the number of microbatches between two flushes: of one minibatch, or of several."""
    if mode == AUTO or order is None or not is_csv(order):
        return
    needed, whole = read_csv(order).num_microbatches, accumulate or 1
    cuts = MODES[mode].microbatches and whole == 1 and ("parallelism", "microbatches") not in draft.leaves.found
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
