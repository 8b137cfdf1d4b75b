"""Reads recorded results back from MLflow and from record folders."""

import logging
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pipebench.errors import UserError, nearest, print_notice
from pipebench.files import FileError
from pipebench.formats import listed
from pipebench.garbage import without_collector
from pipebench.metrics import on_its_clock
from pipebench.tracking.connection import StoreConnection, default_uri, reason_of, shown_uri
from pipebench.tracking.identity import RECIPE_TAG, VERSION_TAG
from pipebench.tracking.rebuilt import rebuilt
from pipebench.tracking.record import ENTRIES, RECORD, RESULT_FILE, mlflow_run_id, read_record
from pipebench.train.result import INTERRUPTED, RunResult
from pipebench.typed_json import JsonError, read

if TYPE_CHECKING:
    from mlflow.entities import Experiment, Run
    from mlflow.store.entities import PagedList
    from mlflow.tracking import MlflowClient

_log = logging.getLogger(__name__)
_Item = TypeVar("_Item")
_LISTED = 5  # runs named in a message
_LONGEST = 80  # characters of a user's text in a message
_MLFLOW_ID = re.compile(r"[0-9a-f]{32}")
_ID_CHARS = 8  # of an MLflow id in lists
_TIMES = ("time_to_accuracy_s", "throughput_samples_per_s")
_PARENT = "mlflow.parentRunId"  # MLflow's tag of a run's parent
_PAGE = 1000  # runs, or experiments, in the answer to one request


@dataclass(frozen=True)
class Recorded:
    """A run with a result.

    Attributes:
        run_id: MLflow's; the folder's name for a run that MLflow lacks.
        experiment_id: MLflow's; "" for a run that MLflow lacks.
        result: whole, or `rebuilt`.
        ended_ms: milliseconds since the epoch.
        name: the run's name in MLflow.
        lacks: why the result could only be `rebuilt`; "" if it is whole.
    """

    run_id: str
    experiment_id: str
    result: RunResult
    ended_ms: int
    name: str
    lacks: str = ""

    @property
    def text(self) -> str:
        """The run's name in lists."""
        return f"{short_id(self.run_id)} ({self.name})"


@dataclass(frozen=True)
class PastRun:
    """A run, or a comparison of runs."""

    # MLflow's id, and the name of its folder; for a run that MLflow lacks, the folder's name first
    ids: tuple[str, ...]
    parent_id: str | None  # MLflow's id of its comparison
    kind: str  # `run`, or `comparison`, `seeds` or `report`, which have runs
    # MLflow's name; for a run also its recipe's name and, in a sweep, its name on the console: `small-depth=4`
    names: tuple[str, ...]
    recipe: str  # the recipe's name; "" for a comparison of several recipes
    began_ms: int  # milliseconds since the epoch; for a run that MLflow lacks, the time of its last entry
    outcome: str  # `reached`, ...; for a comparison the number of each; without an outcome MLflow's status
    time_to_accuracy_s: float | None  # on the run's clock; None if no target was reached
    throughput_samples_per_s: float | None  # None if unknown
    load: Callable[[], Recorded | None]  # returns the run with its result, None without one

    @property
    def text(self) -> str:
        """The run's name in lists."""
        return f"{short_id(self.ids[0])} ({self.names[0]})"


class RecordedRuns:
    """The runs of one MLflow store. Not thread-safe."""

    def __init__(self, uri: str | None = None, local: Mapping[str, Path] | None = None) -> None:
        """Prepare to read a store, without importing MLflow.

        Args:
            uri: MLflow's tracking URI, by default `default_uri()`.
            local: records on this disk, by MLflow's id of their runs.
        """
        self._connection = StoreConnection(uri or default_uri())
        self._local = local or {}

    def newest(self, recipe_hash: str, version: str, tags: Mapping[str, str] | None = None) -> Recorded | None:
        """Return the latest run of this recipe and code that has a result; None without one.

        Interrupted runs don't count, nor runs resumed with another recipe or code. Diverged runs do, as they would
        diverge again.

        Args:
            recipe_hash: by `identity.recipe_hash`.
            version: by `identity.source_version`.
            tags: that the run must have; if durations are measured, those of the machine.

        Raises:
            UserError: MLflow can't be read.
        """
        asked = {RECIPE_TAG: recipe_hash, VERSION_TAG: version}
        tagged = [f"tags.{tag} = '{value}'" for tag, value in asked.items()]
        ended = [f"tags.outcome != '{INTERRUPTED}'", "attributes.status != 'RUNNING'"]
        wanted = {**asked, **(tags or {})}
        for run in self._search(" and ".join([*tagged, *ended])):
            known = run.data.tags
            is_other = any(known.get(tag) != value or f"resumed.{tag}" in known for tag, value in wanted.items())
            result = None if is_other else self.result_of(run.info.run_id)
            if result is not None:
                return _recorded(run, result)
        return None

    def result_of(self, run_id: str) -> RunResult | None:
        """Return a run's result; None if its artifact is missing or invalid.

        Raises:
            UserError: MLflow can't be read.
        """
        with self._asking() as client:
            found = _result(client, run_id)
            return None if isinstance(found, str) else found

    def past(self) -> list[PastRun]:
        """Return all runs and comparisons; raises a UserError if MLflow can't be read."""
        found = []
        for run in self._search("tags.kind LIKE '%'"):
            tags, params = run.data.tags, run.data.params
            parent_id = tags.get(_PARENT)
            time_s, rate = (on_its_clock(run.data.metrics, name) for name in _TIMES)
            past = PastRun(
                ids=(run.info.run_id,),
                parent_id=parent_id if parent_id != run.info.run_id else None,  # the tag may have been edited
                kind=tags["kind"],
                names=_names(run.info.run_name, params, tags),
                recipe=params.get("name", ""),
                began_ms=run.info.start_time,
                outcome=tags.get("outcome", run.info.status.lower()),
                time_to_accuracy_s=time_s,
                throughput_samples_per_s=rate,
                load=partial(self._loaded, run),
            )
            found.append(past)
        return found

    def _search(self, question: str) -> "Iterator[Run]":
        """Yield the runs that match a filter, the latest first."""
        if not self._connection.is_there:
            return

        def ask_experiments(token: str | None) -> "PagedList[Experiment]":
            with self._asking() as client:
                return client.search_experiments(max_results=_PAGE, page_token=token)

        def ask_runs(token: str | None) -> "PagedList[Run]":
            # Garbage collection would take two thirds of the time, as a run is a hundred objects.
            with self._asking() as client, without_collector():
                return client.search_runs(
                    experiments, question, max_results=_PAGE, order_by=["attributes.end_time DESC"], page_token=token
                )

        experiments = [each.experiment_id for each in _all_pages(ask_experiments)]
        yield from _all_pages(ask_runs)

    def _loaded(self, run: "Run") -> Recorded | None:
        """Return a run with its result: the artifact, else a copy on this disk, else rebuilt from MLflow's metrics."""
        run_id = run.info.run_id
        with self._asking() as client:
            found = _result(client, run_id)
            whole = self._result_here(run_id) if isinstance(found, str) else found
            if whole is not None:
                return _recorded(run, whole)
            result = rebuilt(client, run)
            return None if result is None else replace(_recorded(run, result), lacks=str(found))

    def _result_here(self, run_id: str) -> RunResult | None:
        """Return a run's result from its record, or from the artifacts beside a SQLite file that was moved.

        For a moved file, MLflow has the artifacts' old address.
        """
        folder, artifacts = self._local.get(run_id), self._connection.artifacts
        with suppress(OSError, FileError, JsonError):
            if folder is not None and (record := read_record(folder)) is not None:
                return record.result
            for path in artifacts.glob(f"*/{run_id}/artifacts/{RESULT_FILE}") if artifacts is not None else ():
                return read(RunResult, path.read_bytes())
        return None

    @contextmanager
    def _asking(self) -> "Iterator[MlflowClient]":
        try:
            with self._connection.turn() as client:
                yield client
        except Exception as error:  # any exception of MLflow, SQLAlchemy, the disk or the network
            store = shown_uri(self._connection.uri)
            raise UserError(f"MLflow at {store} can't be read: {reason_of(error)}") from error


def _all_pages(ask: "Callable[[str | None], PagedList[_Item]]") -> Iterator[_Item]:
    """Yield the items of all pages of an answer; `ask` returns the page of a token, the first for None."""
    token = None
    while token != "":
        page = ask(token)
        yield from page
        token = page.token or ""


def find_runs(references: Sequence[str], folders: Iterable[Path]) -> list[Recorded]:
    """Return the runs that a user names, each with its result.

    Args:
        references: ids, beginnings of ids, or unique names, MLflow's or the recipe's. Ids are MLflow's, or names of
            `folders`. A reference that matches a comparison and no run stands for all runs of the comparison.
        folders: records on this disk, of which MLflow may lack some.

    Raises:
        UserError: a reference matches no run or several, or the run has no result; the message lists the matching
            runs, or the nearest name.
    """
    past = past_runs(folders)
    known, found = [run for run in past if run.kind == "run"], list[Recorded]()
    chosen = [
        _chosen(each, known if _matching(each, known) or not _matching(each, past) else past) for each in references
    ]
    for run in chosen:
        if run.kind != "run":
            found += _runs_below(run, past)
            continue
        recorded = run.load()
        if recorded is None:
            raise UserError(f"run: {run.text} has no result: it is running, or ended without one")
        found.append(recorded)
    return found


def past_runs(folders: Iterable[Path]) -> list[PastRun]:
    """Return all runs and comparisons, the newest first: MLflow's, and those recorded in `folders` that it lacks.

    If MLflow can't be read, a notice is printed, and only the recorded ones are returned.

    Raises:
        UserError: MLflow can't be read, and there is no record.
    """
    ids = {folder: _ids_of(folder) for folder in folders}
    sent = {each[1]: folder for folder, each in ids.items() if len(each) > 1}
    past, problem = list[PastRun](), None
    try:
        past = RecordedRuns(local=sent).past()
    except UserError as unread:
        problem = unread
    there = {run.ids[0] for run in past}
    # Records of runs that MLflow has are not read: a long run's has thousands of system samples.
    unknown = (folder for folder, own in ids.items() if not there & {*own})
    local = [run for folder in unknown if (run := _past_of(folder)) is not None]
    if problem is not None and not local:
        raise problem
    if problem is not None:
        print_notice(f"{problem}; only runs with a record on this disk are found")
    stored = [replace(run, ids=ids[sent[run.ids[0]]][::-1]) if run.ids[0] in sent else run for run in past]
    return sorted([*stored, *local], key=lambda run: -run.began_ms)


def runs_of(reference: str, folders: Iterable[Path]) -> list[Recorded]:
    """Return the runs of a comparison, named by its id, the beginning of its id, or its name in MLflow.

    Raises:
        UserError: the reference matches no comparison, several, or a run of MLflow's or in `folders`; or the comparison
            has no run with a result.
    """
    past = past_runs(folders)
    known = [run for run in past if run.kind != "run"]
    if not _matching(reference, known) and (found_runs := _matching(reference, past)):
        texts = listed([run.text for run in found_runs], _LISTED)
        raise UserError(f"comparison: got a run, {texts}; allowed are a comparison, or at least two runs")
    return _runs_below(_chosen(reference, known, "comparison"), past)


def _runs_below(comparison: PastRun, past: Sequence[PastRun]) -> list[Recorded]:
    """Return a comparison's runs that have results, in the order of their start; runs in groups of seeds, too."""
    below: dict[str | None, list[PastRun]] = {}
    for run in reversed(past):
        below.setdefault(run.parent_id, []).append(run)

    # A comparison's runs may be in groups of seeds, which are comparisons themselves.
    def found_in(run: PastRun) -> Iterator[Recorded]:
        if run.kind == "run" and (loaded := run.load()) is not None:
            yield loaded
        for child in below.pop(run.ids[0], ()):  # popped, as edited parent tags may form a cycle
            yield from found_in(child)

    found = list(found_in(comparison))
    if not found:
        raise UserError(f"comparison: {comparison.text} has no run with a result")
    return found


def _chosen(reference: str, known: Sequence[PastRun], what: str = "run") -> PastRun:
    """Return the only run or comparison that a reference matches; `what` names their kind in messages."""
    found = _matching(reference, known)
    if len(found) == 1:
        return found[0]
    got = f"{what}: got {reference[:_LONGEST]!r}"
    names = listed([run.text for run in found or known], _LISTED)
    if found:
        raise UserError(f"{got}, which matches {len(found)} {what}s: {names}; name one by the beginning of its id")
    if not known:
        raise UserError(f"{got}, but no {what} is recorded at {shown_uri(default_uri())} or in the working directory")
    close = nearest(reference[:_LONGEST], (each for run in known for each in (*run.names, *run.ids)))
    raise UserError(f"{got}, allowed are ids, beginnings of ids and names of recorded {what}s: {names}{close}")


def _matching(reference: str, known: Sequence[PastRun]) -> list[PastRun]:
    """Return the runs with the reference as an id or a name or, without any, those whose id begins with it."""
    exact = [run for run in known if reference and reference in (*run.ids, *run.names)]
    return exact or [run for run in known if reference and any(each.startswith(reference) for each in run.ids)]


def short_id(run_id: str) -> str:
    """Return the first characters of MLflow's id of a run; a folder's name stays whole."""
    return run_id[:_ID_CHARS] if _MLFLOW_ID.fullmatch(run_id) else run_id


def _ids_of(folder: Path) -> tuple[str, ...]:
    """Return the ids of the run recorded in a folder: the folder's name, and MLflow's id if there is one."""
    name = folder.parent.name if folder.name == RECORD else folder.name
    return tuple(filter(None, (name, mlflow_run_id(folder))))


def _past_of(folder: Path) -> PastRun | None:
    """Return the run recorded in a folder; None if it can't be read."""
    ids = _ids_of(folder)
    try:
        record = read_record(folder)
        ended_ms = round((folder / ENTRIES).stat().st_mtime * 1000)
    except (OSError, FileError):
        return None
    if record is None:
        return None
    result = record.result
    recorded = Recorded(ids[0], "", result, ended_ms, record.name) if result is not None else None
    time_s, rate = (None if result is None else on_its_clock(result.metrics, each) for each in _TIMES)
    return PastRun(
        ids=ids,
        parent_id=None,
        kind=record.tags.get("kind", "run"),
        names=_names(record.name, record.params, record.tags),
        recipe=record.params.get("name", ""),
        began_ms=ended_ms,
        outcome=(record.status or "unfinished").lower() if result is None else result.outcome,
        time_to_accuracy_s=time_s,
        throughput_samples_per_s=rate,
        load=lambda: recorded,
    )


def _names(name: str, params: Mapping[str, str], tags: Mapping[str, str]) -> tuple[str, ...]:
    """Return a run's names; a comparison has only its own, although its params may name its only recipe."""
    others = (params.get("name"), tags.get("called")) if tags.get("kind", "run") == "run" else ()
    return tuple(dict.fromkeys((name, *filter(None, others))))


def _recorded(run: "Run", result: RunResult) -> Recorded:
    info = run.info
    return Recorded(info.run_id, info.experiment_id, result, int(info.end_time or info.start_time), info.run_name)


def _result(client: "MlflowClient", run_id: str) -> RunResult | str:
    """Return a run's result artifact, or why it can't be read."""
    with tempfile.TemporaryDirectory() as scratch:
        try:
            return read(RunResult, Path(client.download_artifacts(run_id, RESULT_FILE, scratch)).read_bytes())
        except Exception as error:  # every artifact store has its own exception for a missing file
            _log.debug("the result of run %s can't be read: %s", run_id, error)
            return reason_of(error)
