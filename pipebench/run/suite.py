"""How a command runs its recipes."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipebench.recipe.catalog import recipes_folder
from pipebench.recipe.load import LoadedRecipe
from pipebench.run.folder import RunFolder

_SEVERAL = "comparison"  # of recipes whose folders have nothing in common
_RECORDED = "recipe.yaml"  # what a run keeps of its recipe, in a folder that is named by an id


@dataclass(frozen=True)
class Suite:
    """How a command runs its recipes.

    Attributes:
        name: names the MLflow experiment.
        overrides: of every recipe, as words of the command line.
        verbose: log every instruction, with worker and time.
        resumed: the folder of the one run to go on with; None for new runs.
        brief: many runs are made whose results are looked at elsewhere: nothing is printed of them, and simulations,
            which take no longer than that, are recorded without pictures.
    """

    name: str
    overrides: tuple[str, ...] = ()
    verbose: bool = False
    resumed: RunFolder | None = None
    brief: bool = False

    @property
    def changes(self) -> tuple[str, ...]:
        """What a run that goes on does otherwise than its recipe says."""
        return self.overrides if self.resumed is not None else ()


def suite_name(loaded: Sequence[LoadedRecipe]) -> str:
    """Return the name that groups runs of these recipes, and of others beside them, whenever they are made.

    It is the folder's path below the shipped recipes (`small/gnmt8`) or the working directory, or, elsewhere, the last
    two parts of the path; a recipe at the top, or one that a run has kept, goes by its own name. Of several folders it
    is what their names begin with.

    Args:
        loaded: at least one recipe.
    """
    return os.path.commonpath([_name(each) for each in loaded]) or _SEVERAL


def _name(loaded: LoadedRecipe) -> str:
    path = loaded.path.resolve()
    if path.name == _RECORDED:
        return loaded.recipe.name
    for top in (recipes_folder().resolve(), Path.cwd()):
        if path.is_relative_to(top):
            folder = path.parent.relative_to(top).as_posix()
            return path.stem if folder == "." else folder
    return "/".join(path.parent.parts[1:][-2:]) or path.stem
