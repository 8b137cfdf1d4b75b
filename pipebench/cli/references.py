"""The recipes that a command names, and the keys that it changes: `quickstart train.seed=1`."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from pipebench.errors import Fault, RecipeError

if TYPE_CHECKING:
    from pipebench.recipe.load import LoadedRecipe


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return recipes and overrides: a word with `=` is an override unless it is an existing path."""
    overrides = [word for word in words if "=" in word and not os.path.exists(word)]
    return [word for word in words if word not in overrides], overrides


def load_one(words: Sequence[str]) -> "LoadedRecipe":
    """Load the one recipe that is named, with its overrides."""
    from pipebench.recipe.load import load

    references, overrides = split(words)
    if len(references) != 1:
        raise click.UsageError(f"one recipe is needed, got {len(references)}")
    return load(references[0], overrides)


def load_all(references: Sequence[str], overrides: Sequence[str]) -> list["LoadedRecipe"]:
    """Load every recipe, or raise with the faults of all of them together."""
    from pipebench.recipe.catalog import find_recipes
    from pipebench.recipe.load import load_file
    from pipebench.run.preflight_all import same_names

    loaded: list[LoadedRecipe] = []
    faults: list[Fault] = []
    for reference in references:
        try:
            paths = find_recipes(reference)
        except RecipeError as error:
            faults += error.faults
            continue
        for path in paths:
            try:
                loaded.append(load_file(path, overrides))
            except RecipeError as error:
                faults += error.faults
    faults += same_names(loaded)
    if faults:
        raise RecipeError(dict.fromkeys(faults))
    return loaded
