"""Rules on the cluster, the order of work and the engine; they make `cluster` and `row`, which later rules read."""

from typing import Any

from pipebench.cluster import RING, coarser
from pipebench.errors import PlanError, RecipeError, choice, shown
from pipebench.recipe.clusters import CHANGED, SERVERS, load_cluster
from pipebench.recipe.draft import UNUSABLE, Draft, Problems, either, rule
from pipebench.recipe.engines import ENGINES
from pipebench.recipe.ranges import MEASURED, TIMINGS
from pipebench.recipe.schema import COLUMNS, ClusterRecipe, ParallelismRecipe
from pipebench.schedule.csv_form import CsvError, is_csv
from pipebench.schedule.modes import MODES, Mode
from pipebench.schedule.orders import ORDERS, order_of
from pipebench.schedule.pipeline import SPLIT, WHOLE
from pipebench.schedule.syncs import NOT_SHARDED


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
        yield "parallelism.order", f"{choice(order, ORDERS)}, or a file in torch's CSV form such as schedule.csv"
        return
    try:
        order_of(order)
    except CsvError as error:
        yield "parallelism.order", str(error)


# Columns that rules on other columns read; without one of them, a row would have faults that follow from that alone.
_OF_ROWS = ("order", "flush", "weights", "sync", "chunks", "backward", "shard")


@rule
def _row(draft: Draft, mode: str) -> Problems:
    """Make the mode's row with the recipe's columns, unless the mode is `auto` or one of `_OF_ROWS` is faulty."""
    if mode in MODES and not any(draft.get(f"parallelism.{name}") is UNUSABLE for name in _OF_ROWS):
        draft.made["@row"] = ParallelismRecipe(mode, **draft.given("parallelism", "cuts", *COLUMNS)).row
    yield from ()


@rule
def _all_reduce(kind: str, cluster: Any) -> Problems:
    if ENGINES[kind].in_processes and cluster.all_reduce != RING:
        why = f"whose all_reduce is {cluster.all_reduce}: in processes torch's process groups choose their own way"
        others = either(ENGINES, lambda engine: not engine.in_processes)
        yield "engine.kind", f"got {kind} with cluster {cluster.name}, {why}: allowed is {others}"


@rule
def _relay(kind: str, relay: bool) -> Problems:
    if relay and ENGINES[kind].trains:
        others = either(ENGINES, lambda engine: not engine.trains)
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
            f"got analytic with cluster {cluster.name}, whose device isn't in the catalogue: allowed is measured",
        )
    elif timing not in TIMINGS and "/" not in timing and "." not in timing:
        yield "engine.timing", f"{choice(timing, TIMINGS)}, or the path of a profile file"


# Keys that treat a stage's layers one by one, which compiled stages can't, and why.
_WITHOUT = {
    "recompute_layers": "which chooses itself what a backward computes again",
    "swap_layers": "whose saved tensors aren't those of single layers",
    "vpipe": "which makes one piece of a stage's layers",
}


@rule
def _compiled(
    draft: Draft, engine__compile: bool, mode: str, row: Mode, recompute: bool | None, tensor: Any
) -> Problems:
    """Compiled stages need all their layers in one place, and backwards that are whole."""
    if not engine__compile:
        return
    given = draft.given("parallelism", *_WITHOUT, "backward")
    for name, why in _WITHOUT.items():
        if name in given:
            problem = f"got {shown(given[name])} with engine.compile, {why}"
            yield f"parallelism.{name}", f"{problem}: allowed is null, or engine.compile: false"
    if row.recompute and not {"vpipe", "recompute_layers"} & given.keys():
        own = f", mode {mode}'s own," if recompute is None else ""
        problem = f"got {shown(recompute)}{own} with engine.compile, {_WITHOUT['recompute_layers']}"
        yield "parallelism.recompute", f"{problem}: allowed is false, or engine.compile: false"
    if row.backward == SPLIT:
        key, value = ("backward", SPLIT) if "backward" in given else ("mode", mode)
        problem = f"got {value} with engine.compile, which compiles a backward as one piece"
        yield f"parallelism.{key}", f"{problem}: allowed is backward: {WHOLE}, or engine.compile: false"
    if tensor != 1:
        problem = f"got {shown(tensor)} with engine.compile, and slices exchange sums inside layers"
        yield "parallelism.tensor", f"{problem}: allowed is 1, or engine.compile: false"
    if draft.get("search") is not None:
        why = "got a search with engine.compile, which would compile every new model of the search"
        yield "search", f"{why}; allowed is engine.compile: false"


@rule
def _channels_last(channels_last: bool, mode: str, row: Mode, shard: str | None) -> Problems:
    """Shards are runs of a parameter's elements in the order of its shape."""
    if channels_last and row.is_sharded:
        key, value = ("mode", mode) if shard is None else ("shard", shard)
        problem = f"got {value} with engine.channels_last, and shards are cut in the order of a weight's shape"
        allowed = f"shard: {NOT_SHARDED}" if shard is not None else "mode dp"
        yield f"parallelism.{key}", f"{problem}: allowed is {allowed}, or engine.channels_last: false"
