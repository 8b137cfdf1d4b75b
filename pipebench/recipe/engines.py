"""The table of engines, which execute schedules; `pipebench.run.runner` has the function that runs each."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipebench.recipe.schema import Recipe

VIRTUAL_CLOCK, WALL_CLOCK = "virtual", "wall"


@dataclass(frozen=True)
class EngineKind:
    """Properties of an engine."""

    name: str  # in recipes
    clock: str  # `virtual` (durations come from the profile) or `wall` (durations are measured)
    trains: bool = True  # whether it computes, for which it needs weights and data
    in_processes: bool = False  # whether each worker is a process on the cluster itself

    @property
    def measures(self) -> bool:
        """Whether durations are measured, and so comparable with a prediction."""
        return self.clock == WALL_CLOCK


ENGINES: dict[str, EngineKind] = {
    kind.name: kind
    for kind in (
        EngineKind("virtual", VIRTUAL_CLOCK),
        EngineKind("simulated", VIRTUAL_CLOCK, trains=False),
        EngineKind("distributed", WALL_CLOCK, in_processes=True),
    )
}


def engine_kind(recipe: "Recipe") -> EngineKind:
    """Return the kind of engine of a validated recipe."""
    return ENGINES[recipe.engine.kind]
