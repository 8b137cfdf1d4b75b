"""Results read back from where they were recorded: the only file that asks MLflow what runs came to."""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipebench.errors import UserError
from pipebench.tracking.connection import Connection, default_uri, shown_uri
from pipebench.tracking.identity import RECIPE_TAG, VERSION_TAG
from pipebench.tracking.record import RESULT_FILE
from pipebench.train.result import INTERRUPTED, RunResult
from pipebench.typed_json import read

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

_log = logging.getLogger(__name__)
_PAGE = 1000  # runs, or experiments, that one question is answered with


@dataclass(frozen=True)
class Recorded:
    """A run that has come to a result.

    Attributes:
        run_id: MLflow's.
        experiment_id: MLflow's.
        result: what it came to.
        ended_ms: when, milliseconds since the epoch.
        name: what the run is called in MLflow.
    """

    run_id: str
    experiment_id: str
    result: RunResult
    ended_ms: int
    name: str


class RecordedRuns:
    """The runs of one MLflow store, for any number of questions. Not safe for several threads."""

    def __init__(self, uri: str | None = None) -> None:
        """Prepare, without touching MLflow.

        Args:
            uri: an MLflow tracking URI; by default where runs are recorded.
        """
        self._connection = Connection(uri or default_uri())

    def newest(self, recipe_hash: str, version: str) -> Recorded | None:
        """Return the run that ended last of those that a recipe came to with some code; None if there is none.

        A run that was interrupted doesn't count, nor one that went on with another recipe or other code. One that
        diverged does: it would again.

        Args:
            recipe_hash: as `identity.recipe_hash` returns.
            version: as `identity.source_version` returns.

        Raises:
            UserError: MLflow can't be asked.
        """
        asked = {RECIPE_TAG: recipe_hash, VERSION_TAG: version}
        for run in self._ended(" and ".join(f"tags.{tag} = '{value}'" for tag, value in asked.items())):
            changed = any(f"resumed.{tag}" in run.data.tags for tag in asked)
            recorded = None if changed else self._recorded(run)
            if recorded is not None:
                return recorded
        return None

    def result_of(self, run_id: str) -> RunResult | None:
        """Return what a run came to; None if it has no result that can be read.

        Raises:
            UserError: MLflow can't be asked.
        """
        with self._asking() as client:
            return _result(client, run_id)

    def _ended(self, question: str) -> "Iterator[Run]":
        """Yield the runs that answer a question and have ended with a result, the last one first."""
        if not self._connection.is_there:
            return
        question = f"{question} and tags.outcome != '{INTERRUPTED}' and attributes.status != 'RUNNING'"
        with self._asking() as client:
            experiments = [each.experiment_id for each in client.search_experiments(max_results=_PAGE)]
            found = client.search_runs(experiments, question, order_by=["attributes.end_time DESC"])
        yield from found

    def _recorded(self, run: "Run") -> Recorded | None:
        result = self.result_of(run.info.run_id)
        if result is None:
            return None
        info = run.info
        return Recorded(info.run_id, info.experiment_id, result, int(info.end_time or info.start_time), info.run_name)

    @contextmanager
    def _asking(self) -> "Iterator[MlflowClient]":
        try:
            with self._connection.turn() as client:
                yield client
        except Exception as error:  # whatever MLflow, SQLAlchemy, the disk or the network can think of
            store = shown_uri(self._connection.uri)
            raise UserError(f"MLflow at {store} can't be read: {' '.join(str(error).split())}") from error


def newest_run(recipe_hash: str, version: str) -> Recorded | None:
    """Return the newest result of a recipe in the store where runs are recorded; see `RecordedRuns.newest`."""
    return RecordedRuns().newest(recipe_hash, version)


def _result(client: "MlflowClient", run_id: str) -> RunResult | None:
    """Return a run's artifact; None where it isn't there any more, or was changed."""
    with tempfile.TemporaryDirectory() as scratch:
        try:
            return read(RunResult, Path(client.download_artifacts(run_id, RESULT_FILE, scratch)).read_bytes())
        except Exception as error:  # every kind of artifact store has an exception of its own for what isn't there
            _log.debug("the result of run %s can't be read: %s", run_id, error)
            return None
