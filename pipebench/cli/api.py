"""The commands as functions for scripts and notebooks: `pipebench.run`, `plan` and others.

A recipe is a name from `pipebench ls recipes`, a file, or a dict. Keyword arguments change its keys:
`train={"max_epochs": 1}` or `**{"train.max_epochs": 1}`. A model may be a `torch.nn.Module` or a function that makes
one, and a data set two torch data sets or loaders, to train on and to evaluate on. A mistake raises a `UserError` with
the sentence that the command would print. Calls in several threads of a process run one after another.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipebench.cli import planning, profiling
from pipebench.cli.references import load_all
from pipebench.cli.turns import in_turn, of_this_turn
from pipebench.distributed.launch import INTERRUPTED
from pipebench.errors import RecipeError, UserError, WorkersFailedError
from pipebench.recipe.engines import engine_kind
from pipebench.recipe.leaves import COMMAND_LINE
from pipebench.recipe.load import IN_MEMORY, LoadedRecipe, load, load_mapping, only_one
from pipebench.recipe.objects import with_names
from pipebench.recipe.preflight import preflight
from pipebench.recipe.users_code import as_users
from pipebench.run import runner
from pipebench.run.folder import records
from pipebench.run.preflight_all import faults_together, preflight_all
from pipebench.run.suite import Suite, suite_name
from pipebench.show.answers import ModelProfile, PlanAnswer, Run, RunComparison
from pipebench.show.answers import recorded as side_by_side

Recipe = str | os.PathLike[str] | Mapping[str, Any] | LoadedRecipe
OnProgress = Callable[[dict[str, Any]], None] | None


@in_turn
def load_recipe(recipe: Recipe, /, **keys: Any) -> LoadedRecipe:
    """Return a recipe, validated, with defaults filled in: `.recipe` has its values, `.plain` the same as a dict.

    Args:
        recipe: a name, a file, a dict, or what this function returned.
        keys: keys of the recipe and their values.

    Raises:
        UserError: a mistake in the recipe; one sentence per fault.
    """
    return only_one(_loaded(recipe, keys, lambda references, texts: [load(references[0], texts)]))


@in_turn
def run(recipe: Recipe, /, *, on_progress: OnProgress = None, **keys: Any) -> Run:
    """Train a recipe to its target, record the run in MLflow, and return its result.

    Args:
        recipe: a name, a file, a dict, or what `load_recipe` returned.
        on_progress: called with a mapping per evaluation, and about every second with one on how far training is; for
            runs in processes it is called in another thread. Without it, progress is printed.
        keys: keys of the recipe and their values.

    Raises:
        UserError: a mistake in the recipe, or in the code that it names.
        KeyboardInterrupt: Ctrl-C before training begins. In training it ends the run, which is returned with the
            outcome `interrupted`; of a run in processes a second Ctrl-C ends these, without a result.
        WorkersFailedError: processes of the run failed, and so there is no result; they have printed why.
    """
    return _run([load_recipe(recipe, **keys)], keys, on_progress=on_progress).runs[0]


@in_turn
def simulate(recipe: Recipe, /, **keys: Any) -> Run:
    """Simulate a recipe: return durations, bytes and memory without training, as with `engine.kind: simulated`.

    Args:
        recipe: a name, a file, a dict, or what `load_recipe` returned.
        keys: keys of the recipe and their values.

    Raises:
        UserError: a mistake in the recipe.
    """
    return run(recipe, **{**keys, "engine.kind": "simulated"})


@in_turn
def compare(
    *recipes: Recipe, seeds: Sequence[int] | None = None, on_progress: OnProgress = None, **keys: Any
) -> RunComparison:
    """Run recipes one after another, record them as one comparison, and return them side by side.

    If a run fails, the others go on, and its error is raised at the end; `recorded` has those that are done.

    Args:
        recipes: names, files, folders of recipes, or dicts.
        seeds: run each once per seed.
        on_progress: as for `run`.
        keys: keys of every recipe; a list of values makes a run of each: `parallelism={"mode": ["dp", "gpipe"]}`. Only
            for an argument of a `target` a list is the value itself. To compare arguments, give a recipe for each:
            `compare(*(load_recipe(recipe, name=f"width-{width}", model={"width": width}) for width in (16, 32)))`.

    Raises:
        UserError: a mistake in a recipe, found before anything runs.
        KeyboardInterrupt, WorkersFailedError: as for `run`.
    """
    loaded = [each for recipe in recipes for each in _loaded(recipe, keys, load_all)]
    if not loaded:
        raise UserError('name at least one recipe, for example: pipebench.compare("quickstart/dp", "quickstart/gpipe")')
    if faults := faults_together(loaded):
        raise RecipeError(faults)
    return _run(loaded, keys, seeds=seeds, on_progress=on_progress)


@in_turn
def recorded(*runs: str) -> RunComparison:
    """Return recorded runs side by side, and what differs in their recipes, as `pipebench compare` prints them.

    Args:
        runs: MLflow's ids or names of runs, names of their folders in `pipebench-runs/`, or beginnings of ids; or one
            comparison's.

    Raises:
        UserError: there is no such run, or several have that name.
    """
    if not runs:
        raise UserError('name a comparison, or two runs at least, such as pipebench.recorded("06a675db", "1acc9300")')
    return side_by_side(runs, records())


@in_turn
def plan(recipe: Recipe, /, *, others: bool = True, **keys: Any) -> PlanAnswer:
    """Return the best plan of a recipe: which layers make a stage, how many workers run it, and why.

    Args:
        recipe: a name, a file, a dict, or what `load_recipe` returned.
        others: plan the other modes, too.
        keys: keys of the recipe and their values.

    Raises:
        UserError: a mistake in the recipe, or nothing fits in memory.
    """
    loaded = load_recipe(recipe, **keys)
    with _mistakes():
        preflight(loaded, trains=False)
        return PlanAnswer(planning.findings(loaded, others=others))


@in_turn
def profile(recipe: Recipe, /, *, samples: int | None = None, **keys: Any) -> ModelProfile:
    """Return the costs of every layer of a recipe's model, or in a profile's file (`.json`, or a `graph.txt`).

    Args:
        recipe: a name, a file, a dict, or what `load_recipe` returned; or a profile's file.
        samples: the number of samples to show, one of those profiled; by default the largest.
        keys: keys of the recipe and their values.

    Raises:
        UserError: a mistake in the recipe, or a file that is no profile.
    """
    if isinstance(recipe, str | os.PathLike) and os.fspath(recipe).endswith((".json", ".txt")):
        return profiling.profile(Path(recipe), samples)
    loaded = load_recipe(recipe, **keys)
    with _mistakes():
        preflight(loaded, trains=False)
        return profiling.profile(loaded, samples)


def _run(
    loaded: Sequence[LoadedRecipe],
    keys: Mapping[str, Any],
    *,
    seeds: Sequence[int] | None = None,
    on_progress: OnProgress = None,
) -> RunComparison:
    if seeds is not None and not _are_seeds(seeds):
        raise UserError(f"seeds: got {seeds!r}, allowed are different whole numbers from 0 on, such as [0, 1, 2]")
    if on_progress is not None and not callable(on_progress):
        raise UserError(f"on_progress: got {on_progress!r}, allowed is a function that takes a dict")
    for each in loaded:
        if engine_kind(each.recipe).in_processes and each.path.name == IN_MEMORY:
            raise UserError(
                f"engine.kind: {each.recipe.engine.kind} starts processes, which read the recipe themselves: give its "
                "file and the keys here, not a dict or what load_recipe returned, and in the file targets, "
                "module:function, for its model and data set"
            )
    hear = None if on_progress is None else of_this_turn(on_progress)
    suite = Suite(suite_name(loaded), _texts(with_names(keys)[0]), silent=True, on_progress=hear)
    with _mistakes():
        preflight_all(loaded, seeds=seeds)
        return runner.run_all(loaded, suite, seeds=seeds)


def _are_seeds(seeds: object) -> bool:
    listed = [*seeds] if isinstance(seeds, Sequence) and not isinstance(seeds, str) else []
    return bool(listed) and len({*listed}) == len(listed) and all(type(each) is int and each >= 0 for each in listed)


def _loaded(
    recipe: Recipe, keys: Mapping[str, Any], read: Callable[[Sequence[str], Sequence[str]], list[LoadedRecipe]]
) -> list[LoadedRecipe]:
    """Return a recipe, once per combination of its lists; `read` loads recipes that are names or files."""
    if isinstance(recipe, LoadedRecipe):
        if keys:
            raise UserError(f"{next(iter(keys))}: a loaded recipe stays as it is: give load_recipe this key, too")
        return [replace(recipe, path=Path.cwd() / IN_MEMORY)]  # no file has its overrides
    if not isinstance(recipe, Mapping | str | os.PathLike):
        raise UserError(
            f"recipe: got an object of type {type(recipe).__name__}, allowed is a name, a file, a dict or what "
            "load_recipe returned: "
            "several are arguments of `pipebench.compare`, a model is given as model=..., beside a recipe"
        )
    plain, own = with_names(keys)
    try:
        if isinstance(recipe, Mapping):
            loaded = load_mapping(with_names(recipe)[0], _texts(plain), without=own)
        elif own:
            loaded = load_mapping({"extends": os.fspath(recipe)}, _texts(plain), without=own)
        else:
            loaded = read([os.fspath(recipe)], _texts(plain))
    except RecipeError as error:
        raise RecipeError(replace(fault, file=_file(fault.file)) for fault in error.faults) from None
    return [replace(each, origins={key: _file(file) for key, file in each.origins.items()}) for each in loaded]


def _file(given: str) -> str:
    """Return the name of a key's source for messages: here, words of a command line come from arguments."""
    return "arguments" if given == COMMAND_LINE else given


def _texts(keys: Mapping[str, Any]) -> tuple[str, ...]:
    """Return keys as words of a command line, which the processes of a run get."""
    flat = {
        f"{section}.{name}" if name else section: value
        for section, given in keys.items()
        for name, value in (given.items() if isinstance(given, Mapping) and given else [("", given)])
    }
    return tuple(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in flat.items())


@contextmanager
def _mistakes() -> Iterator[None]:
    """Raise exceptions of the user's own code as a `UserError` with the sentence that the command line prints.

    Ctrl-C to processes is a KeyboardInterrupt, too.
    """
    try:
        yield
    except WorkersFailedError as error:
        if error.exit_code == INTERRUPTED:
            raise KeyboardInterrupt from None
        raise
    except Exception as error:
        theirs = as_users(error)
        if theirs is None:
            raise
        raise theirs from error
