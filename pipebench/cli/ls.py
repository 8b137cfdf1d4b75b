"""`pipebench ls`: lists what a recipe can name, without importing torch, which takes seconds."""

from collections.abc import Iterator, Mapping
from typing import Any

import click

from pipebench.cli.json_output import json_flag, print_json
from pipebench.cli.parameters import Choice
from pipebench.errors import UserError, shown
from pipebench.recipe.catalog import cluster_names, find_cluster, recipe_names, recipes_folder, summary
from pipebench.recipe.clusters import sources
from pipebench.recipe.named import KINDS, OPTIMIZER, SCHEDULE
from pipebench.schedule.modes import MODES
from pipebench.zoo.registry import DATASETS, MODELS

LISTS = ("models", "datasets", "optimizers", "schedules", "clusters", "modes", "cost-models", "recipes")


@click.command
@click.argument("what", type=Choice(LISTS), required=False)
@click.argument("word", required=False)
@json_flag
def ls(what: str | None, word: str | None, as_json: bool) -> None:
    """List what a recipe can name, one line each; with a WORD, only lines that have it.

    With --json, prints an object per list, from name to description.

    \b
    Examples:
      pipebench ls
      pipebench ls clusters
      pipebench ls recipes gnmt
    """
    if as_json:
        print_json({heading: _rows_with(word, heading) for heading in (LISTS if what is None else (what,))})
        return
    for index, heading in enumerate(LISTS if what is None else (what,)):
        if what is None:
            click.echo(f"{chr(10) if index else ''}{heading}:")
        lines = [*_lines(word, heading, indent="" if what else "  ")]
        if what and not lines:
            raise UserError(f"none of the {what} has {word!r} in its name or its description")
        for line in lines:
            click.echo(line)


def _lines(word: str | None, what: str, indent: str = "") -> Iterator[str]:
    """Yield a line with name and description for every entry of a list that has a word in them."""
    rows = _rows_with(word, what)
    width = max((len(name) for name in rows), default=0)
    for name, about in rows.items():
        yield f"{indent}{name:<{width}}  {about}".rstrip()


def _rows_with(word: str | None, what: str) -> dict[str, str]:
    rows = _rows(what)
    return {name: about for name, about in rows.items() if (word or "").lower() in f"{name} {about}".lower()}


def _rows(what: str) -> dict[str, str]:
    if what == "modes":
        return {name: mode.summary for name, mode in MODES.items()}
    if what == "cost-models":
        from pipebench.planner.cost_models import COST_MODELS  # late: imports numpy

        return {name: model.summary for name, model in COST_MODELS.items()}
    if what == "clusters":
        found = {name: find_cluster(name) for name in cluster_names()}
        return {name: f"{summary(path)}; {sources(path)}" for name, path in found.items()}
    if what == "recipes":
        return {name: summary(recipes_folder() / f"{name}.yaml") for name in recipe_names()}
    if what in ("optimizers", "schedules"):
        return _classes(what)
    registry: Mapping[str, Any] = {"models": MODELS, "datasets": DATASETS}[what]
    return {name: entry.summary for name, entry in registry.items()}


def _classes(what: str) -> dict[str, str]:
    """Return the parameters of optimizers or schedules by name, with their defaults, or `...` if required."""
    kind = KINDS[OPTIMIZER if what == "optimizers" else SCHEDULE]
    rows = {name: kind.about[name] for name in kind.ours}
    for name in (name for name in kind.names() if name not in kind.ours):
        needed = [key for key, each in kind.parameters(name).items() if each.default is each.empty]
        given = [f"{key}: {shown(value)}" for key, value in kind.defaults(name).items()]
        rows[name] = ", ".join([f"{key}: ..." for key in needed] + given)
    return rows
