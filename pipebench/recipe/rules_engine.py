"""Rules on engine keys that change how stages compute: what compiled layers and channels last go with."""

from typing import Any

from pipebench.recipe.draft import UNUSABLE, Draft, Problems, rule
from pipebench.recipe.schema import ParallelismRecipe
from pipebench.recipe.typecheck import shown
from pipebench.schedule.modes import AUTO, MODES
from pipebench.schedule.pipeline import SPLIT, WHOLE
from pipebench.schedule.syncs import NOT_SHARDED

# What moves or tears apart a stage's layers; compiled ones are one piece.
_WITHOUT = {
    "recompute_layers": "whose backward keeps what is worth keeping, and computes the rest again",
    "swap_layers": "whose saved tensors aren't those of its layers",
    "vpipe": "whose layers can't be told apart any longer",
}


@rule("@draft", "engine.compile", "parallelism.mode")
def _compiled(draft: Draft, compiles: bool, mode: str) -> Problems:
    """Compiled stages need all their layers in one place, and backwards that are whole."""
    if not compiles:
        return
    if mode == AUTO:
        yield "parallelism.mode", "got auto with engine.compile, which not every mode goes with: allowed is a mode"
        return
    given: dict[str, Any] = {name: draft.get(f"parallelism.{name}") for name in (*_WITHOUT, "recompute", "backward")}
    if UNUSABLE in given.values():
        return
    for name, why in _WITHOUT.items():
        if given[name] is not None:
            problem = f"got {shown(given[name])} with engine.compile, {why}"
            yield f"parallelism.{name}", f"{problem}: allowed is null, or engine.compile: false"
    row = MODES[mode]
    by_layer = given["vpipe"] is not None or given["recompute_layers"] is not None
    if not by_layer and (row.recompute if given["recompute"] is None else given["recompute"]):
        told = shown(given["recompute"]) + (f", mode {mode}'s own," if given["recompute"] is None else "")
        problem = f"got {told} with engine.compile, {_WITHOUT['recompute_layers']}"
        yield "parallelism.recompute", f"{problem}: allowed is false, or engine.compile: false"
    if (given["backward"] or row.backward) == SPLIT:
        key, value = ("mode", mode) if given["backward"] is None else ("backward", given["backward"])
        problem = f"got {value} with engine.compile, whose backward is one piece"
        yield f"parallelism.{key}", f"{problem}: allowed is backward: {WHOLE}, or engine.compile: false"
    tensor = draft.get("parallelism.tensor")
    if tensor != 1:
        problem = f"got {shown(tensor)} with engine.compile, and slices send each other sums inside of layers"
        yield "parallelism.tensor", f"{problem}: allowed is 1, or engine.compile: false"
    if draft.get("search") is not None:
        why = "got a search with engine.compile, whose cells come and go: every other model would be compiled anew"
        yield "search", f"{why}; allowed is engine.compile: false"


@rule("engine.channels_last", "parallelism.mode", "parallelism.shard")
def _channels_last(channels_last: bool, mode: str, shard: str | None) -> Problems:
    """Shards are runs of a parameter's elements in the order of its shape."""
    if not channels_last or mode == AUTO:
        return
    row = ParallelismRecipe(mode, shard=shard).row
    if row.is_sharded:
        key, value = ("mode", mode) if shard is None else ("shard", shard)
        problem = f"got {value} with engine.channels_last, and shards are cut in the order of a weight's shape"
        allowed = f"shard: {NOT_SHARDED}" if shard is not None else "mode dp"
        yield f"parallelism.{key}", f"{problem}: allowed is {allowed}, or engine.channels_last: false"
