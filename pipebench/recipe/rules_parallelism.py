"""Rules on sharded replicas, sliced layers, order files and vPipe: what each of them goes with."""

from collections.abc import Mapping
from typing import Any

from pipebench.errors import PlanError, shown
from pipebench.recipe.draft import Draft, Problems, either, rule
from pipebench.recipe.plan_file import asked_replicas, is_plan_file
from pipebench.recipe.ranges import TIMINGS
from pipebench.recipe.schema import LARGEST, VpipeRecipe
from pipebench.schedule.csv_form import is_csv, read_csv
from pipebench.schedule.modes import AUTO, MODES, Mode
from pipebench.schedule.orders import ORDERS, order_of
from pipebench.schedule.pipeline import WHOLE
from pipebench.schedule.syncs import ALL_REDUCE, NOT_SHARDED, OPTIMIZER, ORDERED, PARAMETERS, SYNCS
from pipebench.schedule.weights import WEIGHT_POLICIES


@rule
def _shards(mode: str, row: Mode, shard: str | None, sync: str | None) -> Problems:
    """Check that shards go with the mode, the weights and the sync."""
    if not row.is_sharded:
        if mode in MODES and MODES[mode].is_sharded:
            yield (
                "parallelism.shard",
                f"got {row.shard} with mode {mode}, which is dp with shards: allowed is null, or mode: dp",
            )
        return
    key = "parallelism.mode" if shard is None else "parallelism.shard"
    given_shard = f"got shard {row.shard}"
    if row.shard != OPTIMIZER and row.shape != "one-stage":
        why = f"{given_shard} with mode {mode}, and only data parallelism of one stage shares out more than state"
        yield key, f"{why}: allowed is none or optimizer, or mode dp"
    elif not WEIGHT_POLICIES[row.weights].stashed:
        why = f"{given_shard} with weights {row.weights}, whose backwards use weights that aren't gathered"
        stashed = either(WEIGHT_POLICIES, lambda policy: policy.stashed and policy.waits)
        yield key, f"{why}: allowed is none, or weights {stashed}"
    if SYNCS[row.sync].algorithm != ALL_REDUCE or not SYNCS[row.sync].waits:
        if sync is not None:
            why = f"got sync {row.sync} with shard {row.shard}, whose replicas scatter sums"
            yield "parallelism.sync", f"{why}: allowed is {either(SYNCS, lambda each: each.algorithm == ALL_REDUCE)}"
        else:
            why = f"{given_shard} with mode {mode}, whose replicas sum nothing together"
            yield key, f"{why}: allowed is none, or mode dp"


@rule
def _only_where(row: Mode, sums: str | None, reshard_after_forward: bool | None) -> Problems:
    """Check columns that have a meaning only together with others."""
    if reshard_after_forward is not None and row.shard != PARAMETERS:
        why = f"got {shown(reshard_after_forward)} with shard {row.shard}, which keeps all parameters"
        yield "parallelism.reshard_after_forward", f"{why}: allowed is null, or shard: {PARAMETERS}"
    if sums is not None and not SYNCS[row.sync].waits:
        why = f"got {sums} with sync {row.sync}, whose servers add gradients as they come"
        yield "parallelism.sums", f"{why}: allowed is null, or sync: {ALL_REDUCE}"
    if sums not in (None, ORDERED) and SYNCS[row.sync].algorithm != ALL_REDUCE and SYNCS[row.sync].waits:
        why = f"got {sums} with sync {row.sync}, whose servers add in the order of replicas"
        yield "parallelism.sums", f"{why}: allowed is null or {ORDERED}"


@rule
def _goes_with(draft: Draft, row: Mode, optimizer: Mapping[str, Any], precision: str, vpipe: Any) -> Problems:
    """Check that nothing moves a sharded stage's layers, and that the optimizer and the precision suit shards."""
    if not row.is_sharded:
        return
    if not row.flush:
        why = f"with shard {row.shard} and no flush, where no replica knows its stage's norm"
        clip_norm = optimizer.get("clip_norm")
        if clip_norm is not None:
            yield "train.optimizer.clip_norm", f"got {clip_norm:g} {why}: allowed is null, or shard: {NOT_SHARDED}"
        if precision == "fp16":
            yield "train.precision", f"got {precision} {why}: allowed are fp32 and bf16, or shard: {NOT_SHARDED}"
    if optimizer["name"] == "asgd":
        why = f"got asgd with shard {row.shard}, and evaluations need its averages of all parameters"
        yield "train.optimizer.name", f"{why}: allowed are others, or shard: {NOT_SHARDED}"
    if isinstance(draft.values.get("search"), dict):
        why = f"got a mapping with shard {row.shard}, whose layers all stay"
        yield "search", f"{why}: allowed is null, or shard: {NOT_SHARDED}"
    if vpipe is not None:
        why = f"got a mapping with shard {row.shard}, whose layers stay where they are"
        yield "parallelism.vpipe", f"{why}: allowed is null, or shard: {NOT_SHARDED}"


@rule
def _tensor(tensor: Any, mode: str, model__profile: str | None, timing: str, search: Any) -> Problems:
    if tensor == AUTO and mode != AUTO:
        yield "parallelism.tensor", f"got auto with mode {mode}: allowed is a whole number, or mode: auto"
    elif tensor != AUTO and not (type(tensor) is int and tensor >= 1):
        yield "parallelism.tensor", f"got {shown(tensor)}, allowed is a whole number of at least 1, or auto"
    elif tensor != 1:
        if model__profile is not None:
            why = f"got {tensor} with model.profile, whose layers have no matrices to divide"
            yield "parallelism.tensor", f"{why}: allowed is 1, or a model"
        elif timing not in TIMINGS:
            why = f"got {tensor} with timing {timing}, which has times of whole layers"
            yield "parallelism.tensor", f"{why}: allowed is 1, or engine.timing: auto"
        if search is not None:
            yield "parallelism.tensor", f"got {tensor} with a search, whose layers come and go: allowed is 1"


@rule
def _largest(cluster: Any, row: Mode, accumulate: Any) -> Problems:
    """Check that with `accumulate: largest` each minibatch takes memory, of which there is a limit."""
    if accumulate != LARGEST:
        return
    if not order_of(row.order).keeps_all:
        why = f"got {LARGEST} with order {row.order}, in which more minibatches take no more memory"
        orders = either(ORDERS, lambda order: order.keeps_all)
        yield "parallelism.accumulate", f"{why}: allowed is a whole number, or order: {orders}"
    elif cluster.memory_bytes is None:
        why = f"got {LARGEST} on cluster {cluster.name}, whose file gives no memory size"
        yield "parallelism.accumulate", f"{why}: allowed is a whole number, or a size as in cluster.memory: 16 GB"


@rule
def _rows_of_order(cluster: Any, row: Mode, plan: Any) -> Problems:
    """Check that an order file has a row per position in the pipeline, with as many stages as its workers have."""
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
    """Check that an update has as many microbatches as the order file, of one minibatch or of several."""
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


@rule
def _choosing(cluster: Any, vpipe: Mapping[str, Any] | None, mode: str, row: Mode, plan: Any) -> Problems:
    """Check that stages that choose memory policies have whole backwards, own workers, and a rate to swap at."""
    given = VpipeRecipe(**vpipe or {})
    if vpipe is None or given.moves or is_plan_file(plan):  # checked by another rule or the file
        return
    chosen = [name for name in ("swap", "recompute") if getattr(given, name)]
    if chosen and not row.chooses_memory:
        others = f"mode {either(MODES, lambda each: each.chooses_memory)}"
        allowed = f"chunks: 1 and backward: {WHOLE}" if MODES[mode].chooses_memory else others
        why = f"got true in mode {mode}, and is for stages that have a worker each and run backwards whole"
        yield f"parallelism.vpipe.{chosen[0]}", f"{why}: allowed is false, or {allowed}"
    elif given.swap and cluster.pcie_bytes_per_s is None:
        why = f"got true on cluster {cluster.name}, whose file doesn't say how fast devices copy to their hosts"
        yield "parallelism.vpipe.swap", f"{why}: allowed is false, or pcie in the cluster's file"


@rule
def _vpipe_auto(vpipe: Mapping[str, Any] | None, mode: str) -> Problems:
    if vpipe is not None and mode == AUTO and not vpipe.get("moves") and VpipeRecipe(**vpipe).policies:
        yield "parallelism.vpipe", "got a mapping with mode auto, which plans every mode as it is: allowed is null"


@rule
def _chosen_by_vpipe(draft: Draft, vpipe: Mapping[str, Any] | None) -> Problems:
    """Check that memory policies are chosen by vPipe or by the recipe, not by both."""
    if vpipe is None or not VpipeRecipe(**vpipe).policies:
        return
    for name, value in draft.given("parallelism", "recompute", "recompute_layers", "swap_layers").items():
        why = f"got {shown(value)} beside vpipe, which chooses layer by layer"
        yield f"parallelism.{name}", f"{why}: allowed is null, or vpipe with swap: false and recompute: false"
