"""Rules on sharded replicas and sliced layers: the columns, optimizers, engines and extensions that they go with."""

from collections.abc import Mapping
from typing import Any

from pipebench.recipe.draft import Draft, Problems, rule
from pipebench.recipe.ranges import TIMINGS
from pipebench.recipe.typecheck import shown
from pipebench.schedule.modes import AUTO, MODES, Mode
from pipebench.schedule.syncs import ALL_REDUCE, NOT_SHARDED, OPTIMIZER, ORDERED, PARAMETERS, SYNCS
from pipebench.schedule.weights import WEIGHT_POLICIES


@rule
def _shards(mode: str, row: Mode, shard: str | None, sync: str | None) -> Problems:
    """Shards need replicas that wait for each other, and one version of the weights; some modes are what they shard."""
    if not row.is_sharded:
        if mode in MODES and MODES[mode].is_sharded:
            yield (
                "parallelism.shard",
                f"got {row.shard} with mode {mode}, which is dp with shards: allowed is null, or mode: dp",
            )
        return
    key, given_shard = "parallelism.shard" if shard is not None else "parallelism.mode", f"got shard {row.shard}"
    if row.shard != OPTIMIZER and row.shape != "one-stage":
        why = f"{given_shard} with mode {mode}, whose stages have several microbatches in flight"
        yield key, f"{why}: allowed is none or optimizer, or mode dp"
    elif not WEIGHT_POLICIES[row.weights].stashed:
        stashed = " or ".join(name for name, policy in WEIGHT_POLICIES.items() if policy.stashed and policy.waits)
        why = f"{given_shard} with weights {row.weights}, whose backwards use weights that aren't gathered"
        yield key, f"{why}: allowed is none, or weights {stashed}"
    if SYNCS[row.sync].way != ALL_REDUCE or not SYNCS[row.sync].waits:
        names = " or ".join(name for name, each in SYNCS.items() if each.way == ALL_REDUCE)
        if sync is not None:
            why = f"got sync {row.sync} with shard {row.shard}, whose replicas scatter sums"
            yield "parallelism.sync", f"{why}: allowed is {names}"
        else:
            why = f"{given_shard} with mode {mode}, whose replicas sum nothing together"
            yield key, f"{why}: allowed is none, or mode dp"


@rule
def _only_where(row: Mode, sums: str | None, reshard_after_forward: bool | None) -> Problems:
    """Some columns mean something only beside others."""
    if reshard_after_forward is not None and row.shard != PARAMETERS:
        why = f"got {shown(reshard_after_forward)} with shard {row.shard}, which keeps all parameters"
        yield "parallelism.reshard_after_forward", f"{why}: allowed is null, or shard: {PARAMETERS}"
    if sums is not None and not SYNCS[row.sync].waits:
        why = f"got {sums} with sync {row.sync}, whose servers add gradients as they come"
        yield "parallelism.sums", f"{why}: allowed is null, or sync: {ALL_REDUCE}"
    if sums not in (None, ORDERED) and SYNCS[row.sync].way != ALL_REDUCE and SYNCS[row.sync].waits:
        why = f"got {sums} with sync {row.sync}, whose servers add in the order of replicas"
        yield "parallelism.sums", f"{why}: allowed is null or {ORDERED}"


@rule
def _goes_with(draft: Draft, row: Mode, optimizer: Mapping[str, Any], precision: str, vpipe: Any) -> Problems:
    """Shards are of the layers that a stage begins with, and of optimizers that keep no averages."""
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
    elif tensor != AUTO and (isinstance(tensor, bool) or not isinstance(tensor, int) or tensor < 1):
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
