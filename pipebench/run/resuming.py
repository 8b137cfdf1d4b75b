"""Which run a command goes on with, and what of its recipe may be changed."""

from collections.abc import Sequence
from typing import Any

from pipebench.errors import UserError
from pipebench.recipe.load import LoadedRecipe
from pipebench.recipe.schema import Recipe
from pipebench.run import folder as run_folder
from pipebench.run.folder import RunFolder

# What a checkpoint's weights, position in the data and clock depend on: the same in a run that goes on.
_FIXED = (
    "model", "dataset", "train.seed", "train.minibatch_size", "train.streams", "train.optimizer.name",
    "train.optimizer.target", "engine.kind",
)  # fmt: skip


def resumed(run: str, overrides: Sequence[str]) -> tuple[RunFolder, LoadedRecipe]:
    """Return a run's folder and its recipe with some keys changed, to go on from its last checkpoint.

    Raises:
        UserError: there is no such run, it has no checkpoint, or a key was changed that its weights depend on.
    """
    folder = run_folder.find(run)
    if not folder.checkpoints.steps():
        raise UserError(f"--resume: run {folder.run_id} has no checkpoint; run its recipe anew")
    before = folder.recipe()
    loaded = folder.recipe(overrides)
    changed = [key for key in _FIXED if _value(before.recipe, key) != _value(loaded.recipe, key)]
    if changed:
        raise UserError(
            f"command line: {changed[0]}: a run that goes on keeps it, because its weights or its clock depend on it; "
            f"allowed are changes outside {', '.join(_FIXED)}"
        )
    return folder, loaded


def _value(recipe: Recipe, key: str) -> Any:
    value: Any = recipe
    for part in key.split("."):
        value = getattr(value, part)
    return value
