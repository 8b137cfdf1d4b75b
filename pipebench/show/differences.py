"""Recorded runs side by side: the differences between their recipes, as rows and as a page."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pipebench.files import start_of
from pipebench.show.comparison import markdown_table
from pipebench.show.sweep_lines import sweeps_of
from pipebench.show.verdict import comparison_markdown
from pipebench.tracking.results import Recorded, short_id
from pipebench.train.result import RunResult

_SEED, _NAME, _NULL = "train.seed", "name", "null"
_FIRST_LINE = "<!-- pipebench compare -->"


def labelled(runs: Sequence[Recorded]) -> list[RunResult]:
    """Return the results under names that identify their recipes: runs share a name if only their seeds differ.

    Comparisons treat runs of one name as the seeds of one recipe, but recorded runs of one name may differ in any key.
    """
    asked: dict[tuple[str, tuple[tuple[str, str], ...]], list[Recorded]] = {}
    for run in runs:
        asked.setdefault((run.result.name, _but_seed(run)), []).append(run)
    names = [name for name, _ in asked]

    def is_one_row(run: Recorded) -> bool:
        alike = asked[run.result.name, _but_seed(run)]
        return names.count(run.result.name) == 1 and len({each.result.seed for each in alike}) == len(alike)

    named = ((run, f"{run.result.name} {short_id(run.run_id)}") for run in runs)
    return [run.result if is_one_row(run) else replace(run.result, name=name) for run, name in named]


def differences(results: Sequence[RunResult]) -> list[tuple[str, ...]]:
    """Return a row per key in which recipes differ, except the name: the key, then its text in every run."""
    keys = dict.fromkeys(key for result in results for key in result.recipe if key != _NAME)
    # A key may be missing: MLflow's params have no null values, and older recipes lack later keys.
    table = [(key, *(result.recipe.get(key, _NULL) for result in results)) for key in keys]
    return [row for row in table if len({*row[1:]}) > 1]


def markdown(results: Sequence[RunResult], picture: str | None) -> str:
    """Return the comparison as a Markdown page; `picture` is the file of curves beside it, None without curves."""
    rows = differences(results)
    table = markdown_table(("key", *(f"{result.name}, seed {result.seed}" for result in results)), rows)
    parts = [_FIRST_LINE, comparison_markdown(results).rstrip()]
    parts.append(f"What differs in the recipes:\n\n{table}" if rows else "The recipes are the same.")
    parts += [f"![curves]({picture})"] if picture else []
    return "\n\n".join(parts) + "\n"


def is_our_page(path: Path) -> bool:
    """Return whether a file is a page made by `markdown`."""
    return start_of(path, len(_FIRST_LINE)) == _FIRST_LINE.encode()


def curves_of(results: Sequence[RunResult]) -> list[str]:
    """Return the names of the metrics that have curves, scores before losses."""
    metrics = {name for result in results for point in result.points for name in point.metrics}
    return sorted(metrics, key=lambda name: ("loss" in name, name))


def has_picture(results: Sequence[RunResult]) -> bool:
    """Return whether there are curves, or a sweep over a quantity, to draw."""
    return bool(curves_of(results) or sweeps_of(results))


def _but_seed(run: Recorded) -> tuple[tuple[str, str], ...]:
    return tuple((key, value) for key, value in run.result.recipe.items() if key != _SEED and value != _NULL)
