"""The runs left when a command ends early: how many, and the commands to run them."""

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby

from pipebench.recipe.load import LoadedRecipe
from pipebench.run.suite import Suite

Ids = Mapping[tuple[str, int | None], str | None]


@contextmanager
def telling_what_is_left(
    loaded: Sequence[LoadedRecipe], suite: Suite, seeds: Sequence[int] | None, ids: Ids
) -> Iterator[None]:
    """Print on exit, for whatever reason, how to run what is left of `loaded`, in order, each with all seeds.

    `ids` gets an entry by (name, seed) per finished run; a name alone is a group of seeds.
    """
    try:
        yield
    finally:
        total, done = len(loaded) * len(seeds or [0]), sum(seed is not None for _, seed in ids)
        if total > 1 and done < total:
            commands = "; ".join(left(loaded, suite, seeds, done))
            message = f"pipebench: {done} of {total} runs done; the others: {commands}"
            print(message, file=sys.stderr, flush=True)


def left(loaded: Sequence[LoadedRecipe], suite: Suite, seeds: Sequence[int] | None, done: int) -> list[str]:
    """Return the commands for all runs after the first `done`, counted recipe by recipe."""
    per_recipe = len(seeds or [0])
    first, begun = divmod(done, per_recipe)
    parts = [(each, tuple(seeds or ())[begun if index == 0 else 0 :]) for index, each in enumerate(loaded[first:])]
    commands = []
    # Each run of a sweep has its own overrides; others share a command.
    for (words, some), group in groupby(parts, key=lambda part: (part[0].words, part[1])):
        recipes = [str(each.path) for each, _ in group]
        options = ["--seeds", ",".join(map(str, some))] if some else []
        commands.append(shlex.join(["pipebench", "run", *recipes, *suite.overrides, *words, *options]))
    return commands
