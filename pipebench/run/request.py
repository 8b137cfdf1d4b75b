"""One run that a command asks for: which recipe, under which name, as a part of what."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from omegaconf import OmegaConf

from pipebench.recipe.load import LoadedRecipe
from pipebench.run import folder as run_folder
from pipebench.run.folder import RunFacts, RunFolder
from pipebench.run.suite import Suite
from pipebench.tracking import RunLog
from pipebench.train.job import Decision


@dataclass(frozen=True)
class RunRequest:
    """One run.

    Attributes:
        loaded: the recipe, with the run's seed.
        name: what the run is called.
        suite: how the command runs its recipes.
        parent: the comparison or the group of seeds it belongs to, or MLflow's id of that.
        decision: what was decided for the run before; None where one process runs it.
    """

    loaded: LoadedRecipe
    name: str
    suite: Suite
    parent: RunLog | str | None = None
    decision: Decision | None = None

    @property
    def words(self) -> Sequence[str]:
        """The recipe and its overrides, or only these in a run that goes on, for another process's command line."""
        reference = () if self.suite.resumed is not None else (str(self.loaded.path),)
        return (*reference, *self.suite.overrides, *self.loaded.words)

    def make_folder(self, *, parent_mlflow_run_id: str | None = None) -> RunFolder:
        """Make the folder of a new run.

        Raises:
            UserError: nothing can be written to the working directory.
        """
        facts = RunFacts(
            run_id=run_folder.new_run_id(self.loaded.recipe.name),
            name=self.name,
            suite=self.suite.name,
            seed=self.loaded.recipe.train.seed,
            words=tuple(self.words),
            parent_mlflow_run_id=parent_mlflow_run_id,
            verbose=self.suite.verbose,
            started_at_s=None,
            code_folders=tuple(map(str, self.loaded.folders)),
        )
        return run_folder.create(facts, recipe_yaml(self.loaded))


def with_seed(loaded: LoadedRecipe, seed: int) -> LoadedRecipe:
    """Return a recipe with a run's seed; its `config` stays that of the recipe."""
    recipe = replace(loaded.recipe, train=replace(loaded.recipe.train, seed=seed))
    return replace(loaded, recipe=recipe, flat={**loaded.flat, "train.seed": str(seed)})


def recipe_yaml(loaded: LoadedRecipe) -> str:
    """Return a recipe of its own with everything filled in, and the run's seed.

    Microbatches that the recipe doesn't give follow from the plan, and still do when the run goes on under another.
    """
    train = {**loaded.plain["train"], "seed": loaded.recipe.train.seed}
    parallelism = {**loaded.plain["parallelism"]}
    if "parallelism.microbatches" not in loaded.origins:
        del parallelism["microbatches"]
    return OmegaConf.to_yaml(OmegaConf.create({**loaded.plain, "train": train, "parallelism": parallelism}))
