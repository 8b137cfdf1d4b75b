"""Finds recipe and cluster files by path or short name, in a checkout as in an installed wheel."""

import functools
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pipebench
from pipebench.errors import Fault, FileName, RecipeError, nearest
from pipebench.lines import LinedFile

CLUSTERS = "clusters"
_PACKAGE = Path(pipebench.__file__).resolve().parent


@functools.cache
def shipped_folder(name: str) -> Path:
    """Return a folder of shipped files: beside the package in a checkout, inside it in a wheel."""
    checkout = _PACKAGE.parent / name
    is_checkout = (_PACKAGE.parent / "pyproject.toml").is_file() and checkout.is_dir()
    return checkout if is_checkout else _PACKAGE / name


def recipes_folder() -> Path:
    """Return the folder of the shipped recipes."""
    return shipped_folder("recipes")


def find_recipes(reference: str) -> list[Path]:
    """Return the recipe files a user means: a file, a folder of recipes, or a short name such as `quickstart/dp`.

    Raises:
        RecipeError: nothing is there, or the folder holds no recipe.
    """
    found = find(reference, recipe_names)
    if not found.is_dir():
        return [found]
    recipes = sorted(path for path in found.glob("*.yaml") if is_recipe(path))
    if not recipes:
        raise RecipeError([Fault(display(found), "", "this folder holds no recipe (*.yaml, base.yaml and _* aside)")])
    return recipes


def find(reference: str, names: Callable[[], Iterable[str]], beside: Path | None = None) -> Path:
    """Return the existing file or folder that a reference names.

    Args:
        reference: a short name, or a path relative to `beside` or to the working directory.
        names: returns the short names that an error may suggest, besides the files of the same folder.
        beside: a folder that is searched first.

    Raises:
        RecipeError: there is no such file or folder.
    """
    for candidate in _candidates(reference, beside):
        if os.path.isfile(candidate) or os.path.isdir(candidate):
            return Path(candidate)
    exists = os.path.exists(reference)
    known = [*names(), *map(str, Path(os.path.dirname(reference)).glob("*.yaml"))]
    # Two file names aren't similar only because both end in `.yaml`.
    stem = Path(reference).stem
    near = [name for name in known if not name.endswith(".yaml") or nearest(stem, [Path(name).stem])]
    problem = "is not a file" if exists else f"no such file, folder or short name{nearest(reference, near)}"
    raise RecipeError([Fault(_short(reference), "", problem)])


def _candidates(reference: str, beside: Path | None) -> list[str]:
    if not reference.strip():
        return []
    short = reference.removeprefix("./").removeprefix("recipes/")
    shipped = str(recipes_folder() / short)
    in_catalog = [shipped, f"{shipped}.yaml"] if short != reference else [f"{shipped}.yaml", shipped]
    if reference.endswith("/"):
        in_catalog = [shipped]
    paths = [str(beside / reference)] if beside else []
    return [*paths, reference, *in_catalog]


def find_cluster(name: str, beside: Path | None = None) -> Path:
    """Return a cluster's file by its short name or a YAML file's path; raises a RecipeError if there is none."""
    if name.endswith((".yaml", ".yml")):
        return find(name, lambda: [path.name for path in beside.glob("*.yaml")] if beside else [], beside)
    names = cluster_names()
    if name not in names:
        problem = "is a folder" if os.path.isdir(name) else "no such cluster"
        allowed = f"allowed are {', '.join(names)} or the path of a YAML file{nearest(name[:60], names)}"
        raise RecipeError([Fault(f"cluster {name[:80]!r}", "", f"{problem}, {allowed}")])
    return recipes_folder() / CLUSTERS / f"{name}.yaml"


def is_recipe(path: Path) -> bool:
    """Return whether a file is a recipe that can be run, by its name: not a base for others (`base.yaml`, `_*`)."""
    return path.suffix == ".yaml" and path.name != "base.yaml" and not path.name.startswith("_")


def recipe_names() -> list[str]:
    """Return the short names of all shipped recipes, sorted."""
    folder = recipes_folder()
    paths = (
        path for path in folder.rglob("*.yaml") if is_recipe(path) and CLUSTERS not in path.relative_to(folder).parts
    )
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in paths)


def cluster_names() -> list[str]:
    """Return the short names of all shipped clusters, sorted."""
    return sorted(path.stem for path in (recipes_folder() / CLUSTERS).glob("*.yaml"))


def summary(path: Path) -> str:
    """Return the comment in the first line of a recipe or cluster file, which describes it."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def display(path: Path) -> FileName:
    """Return a path for messages: relative to the shipped recipes or reports, or to the working directory.

    Faults with this name of a file print the line of their key.
    """
    absolute = os.path.abspath(path)
    return LinedFile(_displayed(absolute, os.getcwd()), absolute)


@functools.lru_cache(maxsize=256)  # a recipe's files are named often while it is read
def _displayed(absolute: str, working_directory: str) -> str:
    path = Path(absolute)
    shipped = ((shipped_folder(name), f"{name}/") for name in ("recipes", "reports"))
    for folder, prefix in (*shipped, (Path(working_directory), "")):
        if path.is_relative_to(folder):
            return prefix + path.relative_to(folder).as_posix()
    return absolute


def _short(reference: str) -> str:
    text = reference if reference.isprintable() else repr(reference)
    return text if len(text) <= 80 else f"{text[:77]}..."
