"""Writes runs to one MLflow store."""

import getpass
import json
import logging
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from pipebench.errors import UserError
from pipebench.files import folder_problem
from pipebench.tracking.connection import StoreConnection, default_uri, shown_uri, sqlite_path
from pipebench.tracking.inputs import Inputs
from pipebench.tracking.limits import MAX_PARAM_CHARS, MAX_TAG_CHARS, clean_name
from pipebench.tracking.record import RESULTS_FOLDER
from pipebench.tracking.view import experiment_tags

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

_log = logging.getLogger(__name__)


class MetricRow(NamedTuple):
    """One value of one metric."""

    metric: str
    value: float  # finite
    timestamp_ms: int  # milliseconds since the epoch
    step: int  # samples seen


@dataclass(frozen=True)
class StoredRun:
    """A run that MLflow has."""

    start_ms: int  # when it began, milliseconds since the epoch
    params: Mapping[str, str]  # under MLflow's names, like tags
    tags: Mapping[str, str]
    metrics: Mapping[str, float]  # the last value of every metric
    last_steps: Mapping[str, int]  # the step of that value, the metric's largest


def require_writable() -> None:
    """Check that runs can be recorded: in the store, or in the folder that keeps results when the store fails.

    A server is assumed to accept runs.

    Raises:
        UserError: neither can be written.
    """
    uri = default_uri()
    if folder_problem(Path(RESULTS_FOLDER)) is None or _is_writable(uri):
        return
    raise UserError(
        f"runs would not be recorded: nothing can be written to {shown_uri(uri)}, nor to "
        f"{Path(RESULTS_FOLDER).absolute()}; run in another folder, or set MLFLOW_TRACKING_URI"
    )


def _is_writable(uri: str) -> bool:
    """Return whether a store on this machine can be written; True for a server."""
    database = sqlite_path(uri)
    if database is not None:
        return folder_problem(database.parent) is None and (not database.exists() or os.access(database, os.W_OK))
    if "://" in uri and not uri.startswith("file:"):
        return True
    return folder_problem(Path(uri.removeprefix("file:").removeprefix("//"))) is None


class Store(StoreConnection):
    """One experiment of a store, for writing."""

    def __init__(self, uri: str, suite: str) -> None:
        """Prepare for an MLflow tracking URI and the experiment named `suite`, without importing MLflow."""
        super().__init__(uri)
        self.suite = suite
        self.experiment_id: str | None = None
        self.is_connected = False  # false again after a failure: the experiment may have been deleted

    def connect(self) -> None:
        """Import MLflow, and create the database and the experiment if missing; does nothing if `is_connected`."""
        if self.is_connected:
            return
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        with self.turn() as client:
            experiment_id = self._experiment(client)
            if not experiment_id:  # runs would have no ids either, and their records would count as sent
                raise ConnectionError("its answers are empty")
            _add_tags(client, experiment_id)
            self.experiment_id = experiment_id
            self.is_connected = True

    def create_run(self, name: str, tags: Mapping[str, str], start_ms: int) -> str:
        """Create a run and return its id."""
        tags = {"mlflow.source.name": "pipebench", **_user(), **_limited(tags)}
        with self.turn() as client:
            run = client.create_run(str(self.experiment_id), start_time=start_ms, tags=tags, run_name=name)
        return str(run.info.run_id)

    def find_run(self, name: str, start_ms: int) -> str | None:
        """Return the id of the experiment's run of this name and start [ms since the epoch]; None without one."""
        with self.turn() as client:
            found = client.search_runs([str(self.experiment_id)], f"attributes.start_time = {start_ms}")
        return next((str(run.info.run_id) for run in found if run.info.run_name == name), None)

    def resume_run(self, run_id: str) -> StoredRun | None:
        """Set a run's status to RUNNING again and return the run; None if MLflow doesn't know it."""
        from mlflow.exceptions import MlflowException

        with self.turn() as client:
            try:
                run = client.get_run(run_id)
            except MlflowException as error:
                if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                    return None
                raise
            if run.info.lifecycle_stage == "deleted":  # by the user, in MLflow's UI
                client.restore_run(run_id)
            client.update_run(run_id, status="RUNNING")
        data = run.data
        steps = {each.key: int(each.step) for each in data.to_proto().metrics}
        return StoredRun(int(run.info.start_time), dict(data.params), dict(data.tags), dict(data.metrics), steps)

    def log(self, run_id: str, rows: Sequence[MetricRow], params: Mapping[str, str], tags: Mapping[str, str]) -> None:
        """Log values, params and tags, any number of each."""
        from mlflow.entities import Metric, Param, RunTag

        metrics = [Metric(clean_name(row.metric), row.value, row.timestamp_ms, row.step) for row in rows]
        entries = [Param(clean_name(name), value[:MAX_PARAM_CHARS]) for name, value in params.items()]
        labels = [RunTag(name, value) for name, value in _limited(tags).items()]
        with self.turn() as client:
            client.log_batch(run_id, metrics, entries, labels, synchronous=True)

    def tag(self, run_id: str, name: str, value: str | None) -> None:
        """Set a tag, or remove it with None."""
        with self.turn() as client:
            if value is None:
                client.delete_tag(run_id, name)
            else:
                client.set_tag(run_id, name, value[:MAX_TAG_CHARS])

    def remove_values(self, run_id: str, metrics: Sequence[str], *, after: int = -1) -> bool:
        """Remove values of metrics at steps larger than `after`; `metrics` are MLflow's names.

        Only a database that this process opens itself allows that. MLflow's client, and so every server, only adds
        values: the older ones stay in the metric's history, and the newest is shown.

        Returns:
            Whether the values were removed.
        """
        if not metrics:
            return True
        with self.turn() as client:
            sessions: Any = getattr(client._tracking_client.store, "ManagedSessionMaker", None)
            if sessions is None:
                return False
            from mlflow.store.tracking.dbmodels.models import SqlLatestMetric, SqlMetric

            table: Any = SqlMetric
            with sessions() as session:
                for name in metrics:
                    rows = session.query(table).filter_by(run_uuid=run_id, key=name)
                    rows.filter(table.step > after).delete(synchronize_session=False)
                    last = rows.order_by(table.step.desc(), table.timestamp.desc()).first()
                    shown = session.query(SqlLatestMetric).filter_by(run_uuid=run_id, key=name)
                    if last is None:
                        shown.delete(synchronize_session=False)
                    else:
                        values = {each: getattr(last, each) for each in ("value", "timestamp", "step", "is_nan")}
                        shown.update(values, synchronize_session=False)
        return True

    def log_inputs(self, run_id: str, inputs: Inputs) -> None:
        """Log the data set and the model of a run; runs of an experiment share one entry per model."""
        from mlflow.entities import Dataset, DatasetInput, InputTag, LoggedModelInput

        source = json.dumps(dict(inputs.dataset_options))
        profile = json.dumps({f"num_{split}": number for split, number in inputs.num_samples.items()})
        data = Dataset(inputs.dataset, inputs.dataset_digest, "pipebench", source, inputs.schema, profile)
        with self.turn() as client:
            client.log_inputs(run_id, [DatasetInput(data, [InputTag("mlflow.data.context", "training")])])
            try:
                client.log_inputs(run_id, models=[LoggedModelInput(self._model_id(client, inputs))])
            except Exception as error:  # not every store supports models without files
                _log.debug("run %s has no model: %s", run_id, error)

    def log_artifact(self, run_id: str, name: str, content: bytes) -> None:
        """Store a file under the run's artifacts; `name` may include folders."""
        target = PurePosixPath(name)
        folder = None if target.parent == PurePosixPath(".") else str(target.parent)
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / target.name
            path.write_bytes(content)
            with self.turn() as client:
                client.log_artifact(run_id, str(path), folder)

    def end_run(self, run_id: str, status: str, end_ms: int) -> None:
        """Set a run's final status and end time."""
        with self.turn() as client:
            client.set_terminated(run_id, status, end_ms)

    def _experiment(self, client: "MlflowClient") -> str:
        found = client.get_experiment_by_name(self.suite)
        if found is None:
            try:
                return str(client.create_experiment(self.suite, self._artifact_root()))
            except Exception:
                # Another process may have created it on the server meanwhile; any other error is raised again.
                found = client.get_experiment_by_name(self.suite)
                if found is None:
                    raise
        if found.lifecycle_stage == "deleted":  # by the user, in MLflow's UI; no other experiment can have its name
            client.restore_experiment(found.experiment_id)
        return str(found.experiment_id)

    def _model_id(self, client: "MlflowClient", inputs: Inputs) -> str:
        """Return MLflow's id of a run's model, created if missing."""
        name = re.sub(r"[/:.%\"']+", "-", f"{inputs.model}-{inputs.model_digest}")
        experiment_id = str(self.experiment_id)
        found = client.search_logged_models([experiment_id], f"name = '{name}'")
        if found:
            return str(found[0].model_id)
        options = dict(inputs.model_options)
        made = client.create_logged_model(experiment_id, name, params=options, model_type=inputs.model)
        return str(client.finalize_logged_model(made.model_id, "READY").model_id)

    def _artifact_root(self) -> str | None:
        if self.artifacts is None:
            return None
        folder = re.sub(r"[^\w.+-]+", "-", self.suite).strip("-.") or "suite"
        return (self.artifacts / folder).as_uri()


def _add_tags(client: "MlflowClient", experiment_id: str) -> None:
    """Set the tags of an experiment's view that are missing; the user may have changed the others."""
    try:
        known = client.get_experiment(experiment_id).tags
        for name, value in experiment_tags().items():
            if name not in known:
                client.set_experiment_tag(experiment_id, name, value)
    except Exception as error:
        _log.debug("the experiment has no view: %s", error)


def _user() -> dict[str, str]:
    """Return the tag that MLflow's own `start_run` sets, which its pages show as the column `User`."""
    try:
        return {"mlflow.user": getpass.getuser()}
    except (OSError, KeyError):  # a container's user may have no name
        return {}


def _limited(tags: Mapping[str, str]) -> dict[str, str]:
    return {clean_name(name): value[:MAX_TAG_CHARS] for name, value in tags.items()}
