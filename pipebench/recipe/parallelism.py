"""A recipe's parallelism: its row of the table of modes, with the columns the recipe overwrites."""

from dataclasses import replace

from pipebench.recipe.schema import ParallelismRecipe
from pipebench.schedule.modes import MODES, Mode

COLUMNS = ("order", "flush", "weights", "chunks", "recompute")  # that a recipe may overwrite in any mode


def resolve(parallelism: ParallelismRecipe) -> Mode:
    """Return a recipe's row of the table, with the columns the recipe overwrites."""
    row = MODES[parallelism.mode]
    columns = {name: getattr(parallelism, name) for name in (*COLUMNS, "accumulate")}
    return replace(row, **{name: value for name, value in columns.items() if value is not None})
