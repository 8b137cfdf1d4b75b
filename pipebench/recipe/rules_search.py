"""Rules on architecture searches: what can be searched, and what engines can search without training."""

from collections.abc import Mapping
from typing import Any

from pipebench.errors import RecipeError
from pipebench.recipe.draft import Problems, rule
from pipebench.recipe.engines import ENGINES
from pipebench.recipe.search_trace import load_trace


@rule("search")
def _cells(search: Mapping[str, Any] | None) -> Problems:
    if search is not None and search["cells"] == []:
        yield "search.cells", "got an empty list, allowed are names or patterns of modules: there is nothing to search"


@rule("search", "engine.kind")
def _scored(search: Mapping[str, Any] | None, kind: str) -> Problems:
    """Without training, a search has no score; with a real clock, the times of its changes are not known before."""
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
    if trains and any(event.second is not None for event in trace.events):
        why = f"got changes at seconds, which engine {kind} can't know beforehand"
        yield "search.trace", f"{why}: allowed are minibatches, or engine.kind: simulated"
