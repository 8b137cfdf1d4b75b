"""The section `search` of recipes: its keys, and the rules for their values."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from omegaconf import MISSING

from pipebench.errors import RecipeError, choice
from pipebench.extensions.search.trace_file import load_trace
from pipebench.recipe.draft import Problems
from pipebench.recipe.engines import ENGINES
from pipebench.recipe.ranges import COUNT, FROM_ZERO
from pipebench.recipe.rules_zoo import EVAL_LOSS

OLDEST, WORST = "oldest", "worst"  # which individual a child replaces


@dataclass(frozen=True)
class SearchRecipe:
    """Lets the model's architecture change as it trains: which cells are trained when. See docs/search.md.

    An individual is trained from one evaluation to the next, whose result is its score. All individuals share one set
    of weights; those of cells that an individual leaves out stay as they are.

    Attributes:
        cells: modules that can be left out, by name or pattern such as `cells.*`; one that is left out passes on its
            input.
        first: cells of the first individual; null: all.
        metric: the score, a metric of the data set or `eval_loss`; null: the target's metric, or the data set's first.
        population: number of individuals that live at a time. Until there are so many, cells are drawn at random.
        tournament: number of living individuals that are drawn; the fittest of them becomes a parent.
        mutations: number of cells that a child adds or drops.
        smallest: fewest cells of an individual.
        removes: which individual a child replaces: the `oldest` (AmoebaNet's search) or the `worst` of a tournament
            (the Evolved Transformer's).
        hurdles: most hurdles; an individual that passes one is trained until another evaluation.
        trace: a file that says which cells there are when, instead of evolution: `trace.json`, or the artifact
            `search.json` of another run, to train the same individuals again.
    """

    cells: list[str] = MISSING
    first: list[str] | None = None
    metric: str | None = None
    population: int = 8
    tournament: int = 3
    mutations: int = 1
    smallest: int = 0
    removes: str = OLDEST
    hurdles: int = 0
    trace: str | None = None


def _cells(search: Mapping[str, Any] | None) -> Problems:
    if search is not None and search["cells"] == []:
        yield "search.cells", "got an empty list, allowed are names or patterns of modules: there is nothing to search"


def _scored(search: Mapping[str, Any] | None, kind: str) -> Problems:
    """Check that an engine that trains nothing, and so has no scores, has a trace.

    The seconds of a trace need a simulation: an engine that trains can't know beforehand which minibatch they are in.
    """
    if search is None:
        return
    given, trains = search["trace"], ENGINES[kind].trains
    if given is None:
        if not trains:
            why = f"is missing, and engine {kind} trains nothing that could be scored"
            yield "search.trace", f"{why}: give a trace, or another engine.kind"
        return
    try:
        trace = load_trace(given)
    except RecipeError as error:
        yield from (("search.trace", str(fault)) for fault in error.faults)
        return
    if trains and any(event.second is not None for event in trace.changes):
        why = f"got changes at seconds, which engine {kind} can't know beforehand"
        yield "search.trace", f"{why}: allowed are minibatches, or engine.kind: simulated"


def _metric_of_search(search: Mapping[str, Any] | None, metrics: Mapping[str, str]) -> Problems:
    metric = None if search is None else search["metric"]
    if metric is not None and metric not in (*metrics, EVAL_LOSS):
        yield "search.metric", choice(metric[:60], (*metrics, EVAL_LOSS))


def _written_score(search: Mapping[str, Any] | None, kind: str, dataset: Any) -> Problems:
    if search is not None and ENGINES[kind].trains and dataset.generates_with is not None:
        why = "got a search on a data set that scores what the whole model writes, idle cells and all"
        yield "search", f"{why}: allowed is null, or engine.kind: simulated"


CHOICES: Final = {"search.removes": (OLDEST, WORST)}
RANGES: Final = {
    "search.population": COUNT,
    "search.tournament": COUNT,
    "search.mutations": COUNT,
    "search.smallest": FROM_ZERO,
    "search.hurdles": FROM_ZERO,
}
RULES: Final[tuple[tuple[tuple[str, ...], Callable[..., Problems]], ...]] = (
    (("search",), _cells),
    (("search", "engine.kind"), _scored),
    (("search", "@metrics"), _metric_of_search),
    (("search", "engine.kind", "@dataset"), _written_score),
)
PATHS: Final = (("search", "trace"),)
