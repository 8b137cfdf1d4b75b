"""What to try after a run, from its result: a reason and the command that does it."""

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from decimal import ROUND_CEILING, ROUND_FLOOR, Context

from pipebench.errors import RecipeError
from pipebench.formats import percent
from pipebench.recipe.catalog import display, recipes_folder
from pipebench.recipe.load import LoadedRecipe, load_each
from pipebench.recipe.schema import Recipe
from pipebench.schedule.modes import AUTO
from pipebench.train.result import COMPLETED, DIVERGED, MISSED, REACHED, RunResult

_MUCH_BUBBLE, _MUCH_STALL, _MUCH_EVALUATION = 0.2, 0.1, 0.25  # fractions of the time from which advice is given
_OF_OPTION = {"--seeds": "train.seed"}  # the key that an option replaces
_Step = tuple[str, list[str]]  # the reason, and words to add to the command


def advice(loaded: LoadedRecipe, recipe: Recipe, result: RunResult, overrides: Sequence[str]) -> list[tuple[str, str]]:
    """Return what to try next, as reasons and commands; only commands that the recipe accepts.

    Args:
        loaded: the run's recipe.
        recipe: the same with its mode resolved.
        result: the run's.
        overrides: those of the run's command.
    """
    given = loaded.words_with(overrides)
    found = []
    for why, words in _steps(recipe, result):
        # The final dot makes a key match itself and the keys inside it, but no longer name.
        keys = tuple(f"{_OF_OPTION.get(word, word.partition('=')[0])}." for word in words)
        changed = [*(word for word in given if not f"{word.partition('=')[0]}.".startswith(keys)), *words]
        try:
            load_each(loaded.path, [word for word in changed if "=" in word])
        except RecipeError:
            continue
        found.append((why, command("run", loaded, changed)))
    return [*found, ("Other ways of parallelising the same training, predicted.", command("plan", loaded, given))]


def command(name: str, loaded: LoadedRecipe, words: Sequence[str]) -> str:
    """Return a command line about a recipe, by its short name or path."""
    shipped, path = recipes_folder().resolve(), loaded.path.resolve()
    is_shipped = path.is_relative_to(shipped)
    reference = path.relative_to(shipped).with_suffix("").as_posix() if is_shipped else str(display(path))
    return shlex.join(["pipebench", name, reference, *words])


def _steps(recipe: Recipe, result: RunResult) -> Iterator[_Step]:
    train, metrics = recipe.train, result.metrics
    if result.engine == "simulated":
        yield "Nothing was trained: train it.", ["engine.kind=virtual"]
    if result.outcome == MISSED:
        yield "The target was missed: train for twice as many epochs.", [f"train.max_epochs={2 * train.max_epochs}"]
    if result.outcome == DIVERGED:
        yield "It diverged: halve the learning rate.", [f"train.optimizer.lr={train.optimizer.lr / 2:g}"]
    if result.outcome == COMPLETED and (scored := _scored(result)):
        metric, best = scored
        target = f"train.target={{metric: {metric}, value: {best}}}"
        yield "Without a target there is no time to accuracy: give one, such as this run's best.", [target]
    if result.outcome == REACHED:
        yield "One seed is one draw: a median and a range of three.", ["--seeds", "0,1,2"]
    evaluated = metrics.get("evaluation_time_s", 0.0) / (metrics.get("total_time_s") or 1.0)
    if evaluated > _MUCH_EVALUATION:
        unit, count = next((name, n) for name, n in asdict(train.evaluate_every).items() if n is not None)
        words = [f"train.evaluate_every={{{unit}: {2 * count}}}"]
        yield f"Evaluations take {percent(evaluated)} of the time: evaluate half as often.", words
    yield from _of_waiting(recipe, result)


def _of_waiting(recipe: Recipe, result: RunResult) -> Iterator[_Step]:
    """Yield what to try against idle workers."""
    metrics, parallelism = result.metrics, recipe.parallelism
    bubble, stall = metrics.get("bubble_fraction", 0.0), metrics.get("comm_stall_fraction", 0.0)
    doubled = 2 * parallelism.microbatches
    if bubble - stall > _MUCH_BUBBLE and parallelism.row.flush and recipe.train.minibatch_size % doubled == 0:
        words = [f"parallelism.microbatches={doubled}"]
        yield f"Workers are idle for {percent(bubble)} of the time: more microbatches fill the pipeline better.", words
    if stall > _MUCH_STALL:
        summed = metrics.get("comm_bytes_all_reduce", 0.0) > metrics.get("comm_bytes_total", 0.0) / 2
        why = f"Workers wait for bytes for {percent(stall)} of the time, "
        if summed:
            words = [f"train.minibatch_size={2 * recipe.train.minibatch_size}"]
            yield f"{why}most of them sums of gradients: larger minibatches need fewer.", words
        elif _replanned(recipe):
            yield f"{why}which another plan may send less of: the planner's.", _replanned(recipe)


def _replanned(recipe: Recipe) -> list[str]:
    """Return the words that leave a recipe's plan to the planner; none if the recipe already does."""
    parallelism = recipe.parallelism
    planned = [] if parallelism.plan == AUTO else [f"parallelism.plan={AUTO}"]
    return [*planned, *([] if parallelism.cuts is None else ["parallelism.cuts=null"])]


def _scored(result: RunResult) -> tuple[str, float] | None:
    """Return the first score with a curve and its best value, rounded to three digits that this run reaches."""
    scores = (name for point in result.points for name in point.metrics if f"best_{name}" in result.metrics)
    metric = next((name for name in scores if "loss" not in name), None)
    if metric is None:
        return None
    best = float(result.metrics[f"best_{metric}"])
    values = (point.metrics.get(metric, best) for point in result.points)
    others = [value for value in values if value != best and not math.isnan(value)]
    if not others:  # nothing says which direction is better
        return metric, best
    rounds = Context(prec=3, rounding=ROUND_CEILING if others[0] > best else ROUND_FLOOR)
    return metric, float(rounds.create_decimal(repr(best)))
