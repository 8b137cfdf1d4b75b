"""Training runs of a study, each kept in a file: what is there, made by the same recipe, is not made again."""

import hashlib
import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from pipebench import files
from pipebench.model.device import environment, torch_settings
from pipebench.recipe.load import LoadedRecipe
from pipebench.recipe.named import OPTIMIZER, filled
from pipebench.recipe.schema import OptimizerRecipe, Recipe
from pipebench.show.progress import Silent
from pipebench.train.engines import on_virtual_clock
from pipebench.train.job import Job
from pipebench.train.loop import TrainingLoop
from pipebench.train.prepare import prepare
from pipebench.train.result import RunResult


def trained(loaded: LoadedRecipe) -> tuple[RunResult, Job, dict[str, str]]:
    """Train a recipe; return what came of it, what was trained, and the versions and the device that it was made by."""
    with torch_settings(loaded.recipe.engine):
        job = prepare(loaded.recipe, loaded.cluster)
        result, _ = TrainingLoop(job, on_virtual_clock(job), Silent(), lambda point: None).run()
        return result, job, environment(job.setup.device)


def keep(path: Path, recipe: Recipe, **made: Any) -> None:
    """Write what a recipe's run came to, aside first: it is there whole or not at all."""
    path.parent.mkdir(exist_ok=True)
    files.replace(path, f"{json.dumps({'key': recipe_key(recipe), **made})}\n".encode())


def kept(path: Path, recipe: Recipe) -> dict[str, Any] | None:
    """Return what is kept of a run; None if it isn't there, or was made by another recipe."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"key": None}
    return found if found["key"] == recipe_key(recipe) else None


def recipe_key(recipe: Recipe) -> str:
    """Return a name for all that a recipe says but for what is as it would be unsaid."""
    return hashlib.sha256(json.dumps(_given(recipe), sort_keys=True).encode()).hexdigest()[:16]


def _given(value: Any) -> Any:
    """Return what of a recipe differs from the defaults, so that a new key with a default changes no run's identity."""
    if not is_dataclass(value):
        return value
    unsaid = {
        each.name: each.default_factory() if callable(each.default_factory) else each.default for each in fields(value)
    }
    if isinstance(value, OptimizerRecipe):  # a recipe that is loaded has its class's defaults written out
        unsaid |= filled({**unsaid, "name": value.name}, OPTIMIZER) | {"name": unsaid["name"]}
    found = {each.name: getattr(value, each.name) for each in fields(value)}
    return {name: _given(each) for name, each in found.items() if each != unsaid[name]}
