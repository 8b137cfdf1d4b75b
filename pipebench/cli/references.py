"""Splits and loads the recipes and overrides of a command line: `quickstart train.seed=1`."""

import os
from collections.abc import Sequence
from pathlib import Path

import click

from pipebench.errors import Fault, RecipeError, UserError
from pipebench.recipe.catalog import cluster_names, find, find_cluster, find_recipes, recipe_names
from pipebench.recipe.cluster_files import LEVELS
from pipebench.recipe.leaves import full_keys
from pipebench.recipe.load import LoadedRecipe, load, load_each
from pipebench.recipe.yaml_file import read_mapping
from pipebench.run.preflight_all import faults_together

_CLOSING = {"{": "}", "[": "]"}  # brackets around the value of an override


def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the recipes and keys (with `=`) that begin with an incomplete word, for completion in the shell."""
    keys = [*full_keys(), "model.name", "dataset.name"]
    sections = {key.rpartition(".")[0] for key in keys}
    known = [*recipe_names(), *(f"{key}=" for key in keys if key not in sections)]
    return [name for name in known if name.startswith(incomplete)]


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split words into recipes and overrides: words with `=` that aren't existing paths.

    Raises:
        UserError: a word is a key without a value, or the beginning of a value with spaces.
    """
    overrides = [word for word in words if "=" in word and not os.path.exists(word)]
    references = [word for word in words if word not in overrides]
    keys = {*full_keys()}
    for word in references:
        key, _, value = word.partition(":")
        if key in keys and not os.path.exists(word):
            raise UserError(f"{key} is a key of recipes, which needs a value: {key}={value.strip() or 'VALUE'}")
    for index, word in enumerate(words):
        end = _CLOSING.get(word.partition("=")[2][:1])
        last = next((at for at in range(index, len(words)) if end and words[at].endswith(end)), index)
        if last > index:
            whole = " ".join(words[index : last + 1])
            raise UserError(f"got {word!r}, which the shell has cut at a space: put it in quotes, '{whole}'")
    return references, overrides


def find_cluster_named(words: Sequence[str]) -> Path | None:
    """Return the file of a cluster if the only word that is no override names one, by short name or path; else None.

    Raises:
        UserError: there are overrides, too.
    """
    references, overrides = split(words)
    if len(references) != 1:
        return None
    (name,) = references
    if name in cluster_names():
        path = find_cluster(name)
    elif not os.path.isfile(name) or LEVELS not in read_mapping(path := Path(name)):
        return None
    if overrides:
        changes = " ".join(f"cluster.{override.removeprefix('cluster.')}" for override in overrides)
        instead = f"pipebench show RECIPE cluster.name={name} {changes}"
        raise UserError(f"{name} is a cluster; its keys are changed in a recipe: {instead}")
    return path


def load_one(words: Sequence[str], *, builds: bool = True) -> LoadedRecipe:
    """Load one recipe with its overrides; `builds` as in `load_each`."""
    references, overrides = split(words)
    if len(references) != 1:
        raise click.UsageError(f"one recipe is needed, got {len(references)}")
    return load(references[0], overrides, builds=builds)


def load_to_plan(words: Sequence[str], *, zipped: bool) -> list[LoadedRecipe]:
    """Load one recipe with its overrides, once per combination of the elements of its lists.

    The models of several combinations are built, so that all faults are reported together. That of a single one isn't,
    since its profile may not need it.
    """
    references, overrides = split(words)
    if len(references) != 1:
        raise click.UsageError(f"one recipe is needed, got {len(references)}")
    path = find(references[0], recipe_names)
    if path.is_dir():
        return [load(references[0], overrides)]
    loaded = load_each(path, overrides, zipped=zipped, builds=False)
    if zipped:
        _refuse_zip_alone(loaded)
    if len(loaded) == 1:
        return loaded
    loaded = load_each(path, overrides, zipped=zipped)
    if faults := faults_together(loaded):
        raise RecipeError(faults)
    return loaded


def load_all(references: Sequence[str], overrides: Sequence[str], *, zipped: bool = False) -> list[LoadedRecipe]:
    """Load every recipe, once per combination of the elements of its lists; faults are raised together.

    `references` are files, folders or short names; `zipped` combines elements of several lists by position.
    """
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
                loaded += load_each(path, overrides, zipped=zipped)
            except RecipeError as error:
                faults += error.faults
    faults += faults_together(loaded)
    if faults:
        raise RecipeError(dict.fromkeys(faults))
    if zipped:
        _refuse_zip_alone(loaded)
    return loaded


def _refuse_zip_alone(loaded: Sequence[LoadedRecipe]) -> None:
    """Raise a UserError if no recipe has a list: --zip combines lists."""
    if not any(each.varied for each in loaded):
        why = "--zip combines lists by position, and no key has a list"
        raise UserError(f"{why}: leave it out, or give KEY=A,B,C")
