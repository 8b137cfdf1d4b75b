"""How a command runs its recipes."""

from dataclasses import dataclass

from pipebench.run_folder import RunFolder


@dataclass(frozen=True)
class Suite:
    """How a command runs its recipes.

    Attributes:
        name: names the MLflow experiment.
        overrides: of every recipe, as words of the command line.
        verbose: log every instruction, with worker and time.
        resumed: the folder of the one run to go on with; None for new runs.
    """

    name: str
    overrides: tuple[str, ...] = ()
    verbose: bool = False
    resumed: RunFolder | None = None
