"""The table of engines: what plays a schedule; `pipebench.run.runner` makes runs of each."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipebench.recipe.schema import Recipe

VIRTUAL_CLOCK, WALL_CLOCK = "virtual", "wall"


@dataclass(frozen=True)
class EngineKind:
    """What kind of engine it is.

    Attributes:
        name: as a recipe names it.
        clock: `virtual` (durations come from the profile) or `wall` (they are measured while it runs).
        trains: whether it computes: then it needs weights and data.
        in_processes: whether every worker is a process of its own, on the cluster itself.
    """

    name: str
    clock: str
    trains: bool = True
    in_processes: bool = False

    @property
    def measures(self) -> bool:
        """Whether durations are measured, so that they can be compared with a prediction."""
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
