"""Rules on engine keys that change how stages compute: what compiled layers and channels last go with."""

from typing import Any

from pipebench.recipe.draft import Draft, Problems, rule
from pipebench.recipe.typecheck import shown
from pipebench.schedule.modes import Mode
from pipebench.schedule.pipeline import SPLIT, WHOLE
from pipebench.schedule.syncs import NOT_SHARDED

# What moves or tears apart a stage's layers; compiled ones are one piece.
_WITHOUT = {
    "recompute_layers": "whose backward keeps what is worth keeping, and computes the rest again",
    "swap_layers": "whose saved tensors aren't those of its layers",
    "vpipe": "whose layers can't be told apart any longer",
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
        problem = f"got {value} with engine.compile, whose backward is one piece"
        yield f"parallelism.{key}", f"{problem}: allowed is backward: {WHOLE}, or engine.compile: false"
    if tensor != 1:
        problem = f"got {shown(tensor)} with engine.compile, and slices send each other sums inside of layers"
        yield "parallelism.tensor", f"{problem}: allowed is 1, or engine.compile: false"
    if draft.get("search") is not None:
        why = "got a search with engine.compile, whose cells come and go: every other model would be compiled anew"
        yield "search", f"{why}; allowed is engine.compile: false"


@rule
def _channels_last(channels_last: bool, mode: str, row: Mode, shard: str | None) -> Problems:
    """Shards are runs of a parameter's elements in the order of its shape."""
    if channels_last and row.is_sharded:
        key, value = ("mode", mode) if shard is None else ("shard", shard)
        problem = f"got {value} with engine.channels_last, and shards are cut in the order of a weight's shape"
        allowed = f"shard: {NOT_SHARDED}" if shard is not None else "mode dp"
        yield f"parallelism.{key}", f"{problem}: allowed is {allowed}, or engine.channels_last: false"
