"""Rules on cluster, order of work and engine, which everything else rests on: `cluster` and `row` are made here."""

from typing import Any

from pipebench.cluster import RING, coarser
from pipebench.errors import PlanError, RecipeError, choice
from pipebench.recipe.clusters import CHANGED, SERVERS, load_cluster
from pipebench.recipe.draft import UNUSABLE, Draft, Problems, rule
from pipebench.recipe.engines import ENGINES
from pipebench.recipe.ranges import MEASURED, TIMINGS
from pipebench.recipe.schema import COLUMNS, ClusterRecipe, ParallelismRecipe
from pipebench.schedule.csv_form import CsvError, is_csv
from pipebench.schedule.modes import MODES
from pipebench.schedule.orders import ORDERS, order_of


@rule
def _cluster(draft: Draft, tensor: Any) -> Problems:
    section = draft.get("cluster")
    if section is UNUSABLE:
        return
    given = ClusterRecipe(**section)
    try:
        cluster = load_cluster(given.name, given.servers, draft.folder, given.changes)
        draft.made["@cluster"] = coarser(cluster, tensor) if isinstance(tensor, int) and tensor > 1 else cluster
    except PlanError as error:
        yield "parallelism.tensor", str(error)
    except RecipeError as error:
        for fault in error.faults:
            own = "cluster.servers" if fault.key == SERVERS else fault.key
            yield (own, fault.problem) if own.startswith(CHANGED) else ("cluster.name", str(fault))


@rule
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


# Columns that others are to be read with; a row that lacks one of them would only be blamed for what it isn't.
_OF_ROWS = ("order", "flush", "weights", "sync", "chunks", "backward", "shard")


@rule
def _row(draft: Draft, mode: str) -> Problems:
    """Make the mode's row with the recipe's columns; none of `auto`, nor where one of these columns is faulty."""
    if mode in MODES and not any(draft.get(f"parallelism.{name}") is UNUSABLE for name in _OF_ROWS):
        draft.made["@row"] = ParallelismRecipe(mode, **draft.given("parallelism", "cuts", *COLUMNS)).row
    yield from ()


@rule
def _all_reduce(kind: str, cluster: Any) -> Problems:
    if ENGINES[kind].in_processes and cluster.all_reduce != RING:
        why = f"whose all_reduce is {cluster.all_reduce}: in processes torch's process groups choose their own way"
        others = " or ".join(name for name, each in ENGINES.items() if not each.in_processes)
        yield "engine.kind", f"got {kind} with cluster {cluster.name}, {why}: allowed is {others}"


@rule
def _relay(kind: str, relay: bool) -> Problems:
    if relay and ENGINES[kind].trains:
        others = " or ".join(name for name, each in ENGINES.items() if not each.trains)
        why = f"got true with engine {kind}, which hands values to the stages that read them"
        yield "parallelism.relay", f"{why}: allowed is false, or engine.kind: {others}"


@rule
def _timing(timing: str, cluster: Any) -> Problems:
    is_local = cluster.device == "local"
    if timing in MEASURED and not is_local:
        why = "this machine's compute times are never combined with another cluster's links"
        yield "engine.timing", f"got {timing} with cluster {cluster.name}, {why}: allowed is analytic or a profile file"
    elif timing == "analytic" and is_local:
        yield (
            "engine.timing",
            f"got analytic with cluster {cluster.name}, whose device is no named one: allowed is measured",
        )
    elif timing not in TIMINGS and "/" not in timing and "." not in timing:
        yield "engine.timing", f"{choice(timing[:60], TIMINGS)}, or the path of a profile file"
