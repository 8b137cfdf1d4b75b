"""Check all recipes of a command before the first runs: what they use and their targets."""

from collections.abc import Sequence

from pipebench.errors import Fault, RecipeError
from pipebench.recipe.engines import engine_kind
from pipebench.recipe.load import LoadedRecipe
from pipebench.recipe.preflight import preflight


def preflight_all(loaded: Sequence[LoadedRecipe], *, tries: bool = True) -> None:
    """Check everything that recipes use; raises a RecipeError with all faults.

    `tries` also tries out targets of recipes that train, which takes a model.
    """
    faults: list[Fault] = []
    cause: RecipeError | None = None
    for each in loaded:
        try:
            preflight(each)
            if tries and engine_kind(each.recipe).trains and each.has_targets:
                from pipebench.run.trial import try_out  # late: torch, which most refusals don't need

                try_out(each)
        except RecipeError as error:
            faults += error.faults
            cause = error
    if faults:
        raise RecipeError(dict.fromkeys(faults)) from cause


def same_names(loaded: Sequence[LoadedRecipe]) -> list[Fault]:
    """Return a fault per recipe with the name of an earlier one."""
    first: dict[str, str] = {}
    faults = []
    for each in loaded:
        name = each.run_name
        if name in first:
            problem = (
                f"got {name!r}, which {first[name]} is named already; recipes run together need names of their own"
            )
            faults.append(Fault(each.source, "name", problem))
        first.setdefault(name, each.source)
    return faults
