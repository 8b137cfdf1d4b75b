"""Training runs of a study, each stored in a JSON file with a hash of its recipe, so that it isn't repeated."""

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
    """Train a recipe on the virtual clock; return the result, the job, and the versions and device that trained it."""
    with torch_settings(loaded.recipe.engine):
        job = prepare(loaded.recipe, loaded.cluster)
        result, _ = TrainingLoop(job, on_virtual_clock(job), Silent(), lambda point: None).run()
        return result, job, environment(job.setup.device)


def keep(path: Path, recipe: Recipe, **made: Any) -> None:
    """Write the facts `made` of a recipe's run, atomically."""
    path.parent.mkdir(exist_ok=True)
    files.replace(path, f"{json.dumps({'key': recipe_key(recipe), **made})}\n".encode())


def kept(path: Path, recipe: Recipe) -> dict[str, Any] | None:
    """Return the stored facts of a run; None if there are none, or of another recipe only."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"key": None}
    return found if found["key"] == recipe_key(recipe) else None


def recipe_key(recipe: Recipe) -> str:
    """Return a hash of the recipe's values that differ from the defaults."""
    return hashlib.sha256(json.dumps(_given(recipe), sort_keys=True).encode()).hexdigest()[:16]


def _given(value: Any) -> Any:
    """Return the part of a recipe that differs from the defaults: a new key with a default changes no recipe's hash."""
    if not is_dataclass(value):
        return value
    defaults = {
        each.name: each.default_factory() if callable(each.default_factory) else each.default for each in fields(value)
    }
    if isinstance(value, OptimizerRecipe):  # loading has filled in the defaults of the optimizer's class
        defaults |= filled({**defaults, "name": value.name}, OPTIMIZER) | {"name": defaults["name"]}
    found = {each.name: getattr(value, each.name) for each in fields(value)}
    return {name: _given(each) for name, each in found.items() if each != defaults[name]}
