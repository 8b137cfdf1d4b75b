"""Record what stands above runs in MLflow: a comparison, or the seeds of one recipe, described by its runs."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from pipebench.recipe.engines import engine_kind
from pipebench.recipe.load import LoadedRecipe
from pipebench.show.answers import Run
from pipebench.show.comparison import groups, headings, rows, short_names
from pipebench.show.verdict import comparison_markdown
from pipebench.tracking import RunLog, Tracking, logged_params, summarise_rows
from pipebench.train.result import RunResult

_TABLE = "comparison.json"
# Artifacts that MLflow shows as tables, as its own `log_table` writes them.
_TABLES_TAG = "mlflow.loggedArtifacts"


def start_parent(
    tracking: Tracking, title: str, kind: str, loaded: Sequence[LoadedRecipe], parent: RunLog | str | None = None
) -> RunLog:
    """Begin the record of runs of these recipes: params are the keys that they share, tags list those they don't."""
    shared = {
        key: value for key, value in loaded[0].flat.items() if all(each.flat.get(key) == value for each in loaded)
    }
    kinds = [engine_kind(each.recipe) for each in loaded]
    tags = {
        "kind": kind,
        "mode": _listed(each.recipe.parallelism.mode for each in loaded),
        "engine": _listed(each.name for each in kinds),
        "clock": _listed(each.clock for each in kinds),
    }
    return tracking.start(title, params=logged_params(shared), tags=tags, parent=parent, virtual=False)


def finish_parent(parent: RunLog, runs: Sequence[Run], *, complete: bool) -> None:
    """Record table, curves, summary and page of runs, and close the record."""
    results = [run.result for run in runs]
    if results:
        tags = {
            "mode": _listed(each.mode for each in results),
            "plan": _listed(each.plan for each in results),
            "outcome": _outcomes(results),
            _TABLES_TAG: json.dumps([{"path": _TABLE, "type": "table"}]),
        }
        for name, value in tags.items():
            parent.tag(name, value)
        if len(compared := _by_row(results)) > 1:
            parent.metrics(summarise_rows(compared))
        markdown = comparison_markdown(results)
        parent.text("comparison.md", markdown)
        parent.text(_TABLE, _table_json(results))
        from pipebench.run.drawings import record_comparison  # late: imports matplotlib

        parent.describe(markdown, record_comparison(parent, runs))
    parent.finish(None, status="FINISHED" if complete else "KILLED")


def _by_row(results: Sequence[RunResult]) -> Mapping[str, list[RunResult]]:
    """Return the runs of every row of a comparison, by the row's short name."""
    names = short_names(list(dict.fromkeys(result.name for result in results)))
    return {short: [each for each in results if each.name == name] for name, short in names.items()}


def _table_json(results: Sequence[RunResult]) -> str:
    """Return a comparison's table in the form that MLflow shows; groups that can't be compared have a first column."""
    found = groups(results)
    titled = len(found) > 1
    lines = [[*([group.title] if titled else []), *row] for group in found for row in rows(results, group)]
    return json.dumps({"columns": [*(["group"] if titled else []), *headings(results)], "data": lines})


def _listed(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))


def _outcomes(results: Sequence[RunResult]) -> str:
    """Count outcomes as text: `3 reached, 1 missed`."""
    counts = Counter(result.outcome for result in results)
    return ", ".join(f"{number} {outcome}" for outcome, number in counts.most_common())
