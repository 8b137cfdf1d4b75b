"""Shrinks a recipe that fails: removes keys and steps, and makes numbers smaller, as long as it still fails."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

_NEEDED = {"name", "model", "dataset", "cluster", "train", "parallelism", "optimizer", "target", "steps", "dtype"}
_NEEDED |= {"num_train", "num_eval", "minibatch_size", "max_epochs", "lr", "mode"}
_SMALLER = {"max_epochs": (1, 2), "num_train": (8, 12, 16, 24, 32), "num_eval": (2,), "minibatch_size": (2, 4)}


def shrunk(recipe: dict[str, Any], fails: Callable[[dict[str, Any]], bool], tries: int = 150) -> dict[str, Any]:
    """Return a recipe for which `fails` is true and of which nothing more can be removed.

    Args:
        recipe: one that fails.
        fails: whether a recipe fails.
        tries: most recipes to try, after which the smallest so far is returned.
    """
    found = True
    while found:
        found = False
        for smaller in _smaller(recipe):
            tries -= 1
            if tries < 0:
                return recipe
            if fails(smaller):
                recipe, found = smaller, True
                break
    return recipe


def _smaller(recipe: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield recipes with one key less, a smaller number, one step less, or a simpler step."""
    for path in [*_keys(recipe)]:
        made = copy.deepcopy(recipe)
        section = made
        for key in path[:-1]:
            section = section[key]
        if path[-1] not in _NEEDED:
            del section[path[-1]]
            yield made
        for number in _SMALLER.get(path[-1], ()):
            if number < section.get(path[-1], 0):
                section[path[-1]] = number
                yield copy.deepcopy(made)
    steps = recipe["model"]["steps"]
    if len(steps) > 1:
        yield _with_steps(recipe, steps[:-1])
    for index, step in enumerate(steps):
        if step != "linear":
            yield _with_steps(recipe, [*steps[:index], "linear", *steps[index + 1 :]])


def _with_steps(recipe: dict[str, Any], steps: list[str]) -> dict[str, Any]:
    return recipe | {"model": recipe["model"] | {"steps": steps}}


def _keys(section: dict[str, Any], *path: str) -> Iterator[tuple[str, ...]]:
    """Yield the path of every key, that of a section before those of its keys."""
    for key, value in section.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from _keys(value, *path, key)
