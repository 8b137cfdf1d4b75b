"""From a loaded recipe to a job, with progress shown, and what doesn't work told as faults of the recipe."""

from typing import Any

from pipebench.recipe.load import LoadedRecipe, faults_of
from pipebench.run.deciding import decided_apart, measures_on_gpu
from pipebench.show.progress import preparing
from pipebench.train.prepare import Job, prepare


def prepare_job(loaded: LoadedRecipe, *, apart: bool = False, tells: bool = False, **how: Any) -> Job:
    """Prepare a recipe, showing progress.

    Args:
        loaded: the recipe.
        apart: this process isn't to touch a GPU: where the profile is measured on one, another process decides.
        tells: say so in plain lines where there is no terminal.
        how: see `prepare`.

    Raises:
        RecipeError: the model doesn't allow it.
        WorkersFailedError: the process that decides ended without an answer.
    """
    recipe, cluster = loaded.recipe, loaded.cluster
    with faults_of(loaded), preparing(recipe.name, tells=tells) as on_progress:
        if apart and measures_on_gpu(recipe, cluster):
            how["kept"] = decided_apart(recipe, cluster, on_progress)
        return prepare(recipe, cluster, on_progress, **how)
