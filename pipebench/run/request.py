"""One run requested by a command: recipe, name and group."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from omegaconf import OmegaConf

from pipebench.recipe.load import LoadedRecipe
from pipebench.run import folder as run_folder
from pipebench.run.folder import RunFacts, RunFolder
from pipebench.run.suite import Suite
from pipebench.tracking.run_log import RunLog
from pipebench.train.job import Decision


@dataclass(frozen=True)
class RunRequest:
    """One run."""

    loaded: LoadedRecipe  # with the run's seed
    name: str
    suite: Suite
    parent: RunLog | str | None = None  # the comparison or group of seeds, or its MLflow id
    decision: Decision | None = None  # plan and profile of a run in several processes; None if one process runs it

    @property
    def is_one_of_many(self) -> bool:
        """Whether it is a run of a sweep or one of several seeds, whose numbers are in a table printed at the end."""
        return self.suite.resumed is None and (bool(self.loaded.varied) or self.name != self.loaded.run_name)

    @property
    def words(self) -> Sequence[str]:
        """Command line for another process: recipe and overrides, or only overrides in a resumed run."""
        reference = () if self.suite.resumed is not None else (str(self.loaded.path),)
        return (*reference, *self.loaded.listed_words_with(self.suite.overrides))

    def make_folder(self, *, parent_mlflow_run_id: str | None = None) -> RunFolder:
        """Create the folder of a new run; raises a UserError if the working directory isn't writable."""
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
            silent=self.suite.silent,
        )
        return run_folder.create(facts, recipe_yaml(self.loaded))


def with_seed(loaded: LoadedRecipe, seed: int) -> LoadedRecipe:
    """Return a recipe with a run's seed."""
    recipe = replace(loaded.recipe, train=replace(loaded.recipe.train, seed=seed))
    return replace(loaded, recipe=recipe, flat={**loaded.flat, "train.seed": str(seed)})


def recipe_yaml(loaded: LoadedRecipe) -> str:
    """Return a self-contained recipe with the run's seed.

    A number of microbatches that the recipe doesn't give follows from the plan. It is left out, so that the run may be
    resumed under another plan.
    """
    train = {**loaded.plain["train"], "seed": loaded.recipe.train.seed}
    parallelism = {**loaded.plain["parallelism"]}
    if "parallelism.microbatches" not in loaded.origins:
        del parallelism["microbatches"]
    return OmegaConf.to_yaml(OmegaConf.create({**loaded.plain, "train": train, "parallelism": parallelism}))
