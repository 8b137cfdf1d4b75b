"""How a command runs its recipes."""

import os
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from pipebench.distributed.launch_template import Template
from pipebench.recipe.catalog import recipes_folder
from pipebench.recipe.load import IN_MEMORY, LoadedRecipe
from pipebench.run.folder import RunFolder

_MOST_NAMED = 4  # of unrelated folders
_RECORDED = "recipe.yaml"  # in a run's folder, which is named by an id


@dataclass(frozen=True)
class Suite:
    """How a command runs its recipes."""

    name: str  # of the MLflow experiment
    overrides: tuple[str, ...] = ()  # of every recipe, as on the command line
    verbose: bool = False  # log every instruction, with worker and time
    resumed: RunFolder | None = None  # the run to resume; None for new runs
    brief: bool = False  # one of many runs summarised elsewhere: print nothing, record no pages
    draws: bool = True  # pictures of simulated runs, which take most of their time
    silent: bool = False  # print no result, because the caller shows it
    on_progress: Callable[[dict[str, Any]], None] | None = None  # gets `ProgressEvents` in place of the terminal
    template: Template | None = None  # where workers come from; None starts new processes

    @property
    def prints(self) -> bool:
        """Whether results are printed."""
        return not self.brief and not self.silent

    @property
    def is_quiet(self) -> bool:
        """Whether no progress is printed."""
        return self.brief or self.on_progress is not None

    @property
    def changes(self) -> tuple[str, ...]:
        """Overrides of a resumed run."""
        return self.overrides if self.resumed is not None else ()


def suite_name(loaded: Sequence[LoadedRecipe]) -> str:
    """Return the name of the MLflow experiment for runs of these recipes, at least one.

    A recipe's experiment has the path of its folder below the shipped recipes (`small/gnmt8`) or below the working
    directory, elsewhere the last two parts of the path. So recipes of a folder share an experiment. A recipe at the
    top, or stored by a run, has its own name. Several recipes have the common prefix of these names. If there is none,
    they have the name of the folder that they are all in, or all their names.
    """
    names = [*dict.fromkeys(_name(each) for each in loaded)]
    folders = {each.path.resolve().parent for each in loaded}
    same_folder = folders.pop().name if len(folders) == 1 else ""
    return os.path.commonpath(names) or same_folder or ", ".join(names[:_MOST_NAMED])


def _name(loaded: LoadedRecipe) -> str:
    path = loaded.path.resolve()
    if path.name in (_RECORDED, IN_MEMORY):
        return loaded.recipe.name
    for top in (recipes_folder().resolve(), Path.cwd()):
        if path.is_relative_to(top):
            folder = path.parent.relative_to(top).as_posix()
            return path.stem if folder == "." else folder
    return "/".join(path.parent.parts[1:][-2:]) or path.stem


Ids = Collection[tuple[str, int | None]]


@contextmanager
def printing_what_is_left(
    loaded: Sequence[LoadedRecipe], suite: Suite, seeds: Sequence[int] | None, ids: Ids
) -> Iterator[None]:
    """Print on exit, for whatever reason, the commands for runs that are not done.

    Args:
        loaded: all recipes, in the order in which they run, each with all seeds.
        suite: how they run.
        seeds: None for a recipe's own.
        ids: gets the name and the seed of every finished run. Without a seed a name is a group of seeds.
    """
    try:
        yield
    finally:
        total, done = len(loaded) * len(seeds or [0]), sum(seed is not None for _, seed in ids)
        if total > 1 and done < total:
            commands = "; ".join(left(loaded, suite, seeds, ids))
            message = f"pipebench: {done} of {total} runs done; the others: {commands}"
            print(message, file=sys.stderr, flush=True)


def left(loaded: Sequence[LoadedRecipe], suite: Suite, seeds: Sequence[int] | None, ids: Ids) -> list[str]:
    """Return the commands for all runs but those in `ids`; see `printing_what_is_left`."""
    parts = []
    for each in loaded:
        undone = [seed for seed in seeds or [each.recipe.train.seed] if (each.run_name, seed) not in ids]
        if undone:
            parts.append((each, tuple(undone if seeds else ())))
    commands = []
    for (_, words, some), group in groupby(parts, key=_shared):
        together = [each for each, _ in group]
        recipes = dict.fromkeys(str(each.path) for each in together)
        given = [word for word in suite.overrides if word.partition("=")[0] not in together[0].varied]
        options = ["--seeds", ",".join(map(str, some))] if some else []
        commands.append(shlex.join(["pipebench", "run", *recipes, *given, *words, *_last_list(together), *options]))
    return commands


def _shared(part: tuple[LoadedRecipe, tuple[int, ...]]) -> tuple[Path | None, tuple[str, ...], tuple[int, ...]]:
    """Return what runs of one command have in common: in a sweep, all keys but the one that varies fastest."""
    loaded, seeds = part
    return loaded.path if loaded.words else None, loaded.words[:-1], seeds


def _last_list(runs: Sequence[LoadedRecipe]) -> list[str]:
    """Return the last word of a sweep's runs, with the values of all runs; nothing without a sweep."""
    words = [each.words[-1] for each in runs if each.words]
    values = "".join(word.partition("=")[2] for word in words)
    # A single element stays a list, `depth=4,`, so that its run has its name in the sweep.
    return [f"{words[0].partition('=')[0]}={values if len(words) == 1 else values[:-1]}"] if words else []
