"""The recipe of every run of a report, per row and column, loaded and validated."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipebench.errors import Fault, RecipeError, nearest
from pipebench.recipe.catalog import display, find, find_cluster, recipe_names
from pipebench.recipe.load import LoadedRecipe, load_file
from pipebench.report.definition import Column, Report, Row, RunReference

SAME = ""  # in place of a column's name, for runs that are the same in all columns


@dataclass(frozen=True)
class ReportRun:
    """One run of a report; several may share a recipe."""

    row: str
    run: str
    column: str  # SAME for a run that is the same in all columns
    words: tuple[str, ...]  # command line that repeats it, from the recipe on
    loaded: LoadedRecipe  # with the seed
    largest: bool = False  # whether the largest minibatch that fits is still to be found


def report_runs(report: Report, *, whole: bool = True) -> tuple[list[ReportRun], list[Fault]]:
    """Return every run of a report, row by row, and all faults of their recipes.

    Args:
        report: some of its rows may have been left out.
        whole: whether all rows are there; if not, keys of columns that no run uses are no faults.
    """
    loader = _RecipeLoader(report)
    asked: list[ReportRun] = []
    for row in report.rows:
        for name, run in row.runs.items():
            for column in (Column(SAME, ""),) if run.same else report.columns:
                asked += loader.runs(row, name, run, column)
    return asked, [*loader.column_faults(whole=whole), *loader.faults]


class _RecipeLoader:
    """Loads each command line once and collects faults, each under the first row that has it."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._folder = report.path.absolute().parent
        self._loaded: dict[tuple[str, ...], LoadedRecipe | RecipeError] = {}
        self._fault_by_text: dict[str, Fault] = {}
        self._clusters: set[str] = set()  # of the recipes before columns change them
        self._taken: dict[tuple[str, str], bool] = {}  # by (column, optional word), whether any recipe accepts it

    @property
    def faults(self) -> list[Fault]:
        return [*self._fault_by_text.values()]

    def runs(self, row: Row, name: str, run: RunReference, column: Column) -> Iterator[ReportRun]:
        """Yield a run of a row in a column, once per seed."""
        key = f"rows.{row.name}.runs.{name}"
        try:
            path = find(run.words[0], recipe_names, self._folder) if run.words else None
            if path is None or path.is_dir():
                raise RecipeError([Fault(display(path or self._folder), "", "is a folder; one recipe is needed")])
            beside = os.path.exists(self._folder / run.words[0])
            given = (display(path) if beside else run.words[0], *run.words[1:], f"engine.kind={run.engine}")
            words = self._in_column(path, given, column)
            for seed in run.seeds or (None,):
                seeded = words if seed is None else (*words, f"train.seed={seed}")
                yield ReportRun(row.name, name, column.name, seeded, self._load(path, seeded), run.largest)
        except RecipeError as error:
            where = f" (column {column.name})" if column.name and len(self._report.columns) > 1 else ""
            for fault in error.faults:
                self._fault_by_text.setdefault(str(fault), Fault(display(self._report.path), key, f"{fault}{where}"))

    def _in_column(self, path: Path, words: tuple[str, ...], column: Column) -> tuple[str, ...]:
        """Return a recipe's command line with the changes of a column."""
        given = self._load(path, words).recipe.cluster.name
        cluster = Path(given).stem if given.endswith((".yaml", ".yml")) else given
        self._clusters.add(cluster)
        words += column.words
        if cluster in column.clusters:
            words += (f"cluster.name={self._anchored(column.clusters[cluster])}",)
        self._load(path, words)  # raises faults that are not those of the optional words
        for word in column.optional:
            self._taken.setdefault((column.name, word), False)
            try:
                self._load(path, (*words, word))
            except RecipeError as error:
                key = word.partition("=")[0]
                if all(fault.key == key and fault.problem.startswith("unknown ") for fault in error.faults):
                    continue
            self._taken[column.name, word] = True
            words += (word,)
        return words

    def _load(self, path: Path, words: tuple[str, ...]) -> LoadedRecipe:
        found = self._loaded.get((str(path), *words))
        if found is None:
            try:
                found = load_file(path, words[1:])
            except RecipeError as error:
                found = error
            self._loaded[(str(path), *words)] = found
        if isinstance(found, RecipeError):
            raise found
        return found

    def _anchored(self, cluster: str) -> str:
        """Return a cluster's name, or its file's path if it is beside the report."""
        beside = self._folder / cluster
        return display(beside) if os.path.isfile(beside) else cluster

    def column_faults(self, *, whole: bool) -> Iterator[Fault]:
        """Yield faults of columns: unknown clusters and, if all rows are there, clusters and words that no run uses."""
        file = display(self._report.path)
        for column in self._report.columns:
            for cluster, other in column.clusters.items():
                key = f"columns.{column.name}.clusters.{cluster}"
                yield from self._cluster_faults(other, key)
                if whole and self._clusters and cluster not in self._clusters:
                    allowed = ", ".join(sorted(self._clusters))
                    yield Fault(
                        file, key, f"no run is on this cluster, they are on {allowed}{nearest(cluster, self._clusters)}"
                    )
            for word in column.optional:
                if whole and not self._taken.get((column.name, word), True):
                    yield Fault(file, f"columns.{column.name}.set", f"got '?{word}', which no run's recipe takes")
        for constant in self._report.calibration.constants if self._report.calibration else ():
            yield from self._cluster_faults(constant.cluster, f"calibration.constants.{constant.name}.cluster")

    def _cluster_faults(self, cluster: str, key: str) -> Iterator[Fault]:
        try:
            find_cluster(cluster, self._folder)
        except RecipeError as error:
            yield Fault(display(self._report.path), key, "; ".join(map(str, error.faults)))
