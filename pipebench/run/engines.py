"""How runs with each kind of engine are made: an object per row of the table of engines."""

from collections.abc import Mapping

from pipebench.recipe.load import LoadedRecipe
from pipebench.run.one_process import EngineRuns, SimulatedRuns, VirtualRuns
from pipebench.run.processes import DistributedRuns

RUNS: Mapping[str, EngineRuns] = {
    "virtual": VirtualRuns(),
    "simulated": SimulatedRuns(),
    "distributed": DistributedRuns(),
}


def runs_of(loaded: LoadedRecipe) -> EngineRuns:
    """Return how runs of a recipe are made."""
    return RUNS[loaded.recipe.engine.kind]
