"""Check all recipes of a command before the first runs: what they use and their targets."""

from collections.abc import Iterator, Sequence
from pathlib import PurePath

from pipebench.errors import Fault, FileName, RecipeError
from pipebench.profile.graph_txt import UNKNOWN_DEVICE
from pipebench.profile.load import load_profile
from pipebench.recipe.engines import engine_kind
from pipebench.recipe.load import LoadedRecipe
from pipebench.recipe.preflight import preflight

_SEED, _SIZE = "train.seed", "train.minibatch_size"


def preflight_all(loaded: Sequence[LoadedRecipe], *, seeds: Sequence[int] | None = None, tries: bool = True) -> None:
    """Check everything that recipes use.

    Args:
        loaded: the recipes.
        seeds: seeds that each is to run with, None for its own.
        tries: whether to try out the targets of recipes that train, which takes the time to build a model.

    Raises:
        RecipeError: with all faults.
    """
    faults = [*_own_seeds(loaded, seeds)] if seeds else []
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


def _own_seeds(loaded: Sequence[LoadedRecipe], seeds: Sequence[int]) -> Iterator[Fault]:
    """Yield a fault per recipe whose seeds `seeds` would replace: a list, or one given on the command line."""
    others = ", ".join(map(str, seeds))
    for each in loaded:
        file = each.origins.get(_SEED)
        if _SEED in each.varied or (file is not None and not isinstance(file, FileName)):
            given = "a list" if _SEED in each.varied else each.recipe.train.seed
            problem = f"got {given}, and seeds {others} replace it in every run: leave out one of the two"
            yield Fault(file or each.source, _SEED, problem)


def faults_together(loaded: Sequence[LoadedRecipe]) -> list[Fault]:
    """Return the faults that recipes have only in one command."""
    return [*_same_names(loaded), *_other_sizes(loaded)]


def _other_sizes(loaded: Sequence[LoadedRecipe]) -> Iterator[Fault]:
    """Yield a fault per recipe that uses a `graph.txt` with another minibatch size than an earlier recipe."""
    first: dict[str, int] = {}
    for each in loaded:
        path, size = each.recipe.model.get("profile"), each.recipe.train.minibatch_size
        if path is None or first.setdefault(str(path), size) == size or load_profile(path).device != UNKNOWN_DEVICE:
            continue
        why = f"{PurePath(path).name} holds one size and doesn't say which: it can't be that of both"
        mend = "give each size a file of its own, or a profile in JSON"
        yield Fault(each.origin(_SIZE), _SIZE, f"got {size}, beside {first[str(path)]}, and {why}; {mend}")


def _same_names(loaded: Sequence[LoadedRecipe]) -> list[Fault]:
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
