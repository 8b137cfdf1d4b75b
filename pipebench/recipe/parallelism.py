"""A recipe's parallelism: its row of the table of modes, with the columns the recipe overwrites."""

from dataclasses import replace

from pipebench.recipe.schema import ParallelismRecipe
from pipebench.schedule.modes import MODES, Mode


def resolve(parallelism: ParallelismRecipe) -> Mode:
    """Return a recipe's row of the table, with the columns the recipe overwrites."""
    row = MODES[parallelism.mode]
    columns = {name: getattr(parallelism, name) for name in ("order", "weights", "recompute")}
    return replace(row, **{name: value for name, value in columns.items() if value is not None})
