"""The view of an experiment on MLflow's pages: the columns by which runs are compared, and curves over virtual time.

MLflow stores shared views as tags of the experiment, and the address of its page selects one. The tag's content is
undocumented: from 3.17 on `{name, createdAt, updatedAt, state}`, the state a JSON text; before, the state itself. The
tag here is one object with both forms. A page that can't read it shows MLflow's default columns.
"""

import json
from collections.abc import Mapping

from pipebench.tracking.entries import DESCRIPTION, VIRTUAL_TIME

VIEW = "pipebench"
VIEW_TAG = f"mlflow.sharedViewState.{VIEW}"
# Selects training in place of traces on pages without the switch between `GenAI` and `Model training` (3.8 for one).
# Those of 3.17 use the address, and the browser's last choice.
_KIND_TAG, _KIND = "mlflow.experimentKind", "custom_model_development"
_NAME = "attributes.`Run Name`"
# Kind, name, and width in pixels: MLflow's default width would cut the names.
_COLUMNS = (
    ("tags", "outcome", 90),
    ("metrics", "time_to_accuracy_s", 150),
    ("metrics", "wall_time_to_accuracy_s", 170),
    ("metrics", "speedup_over_dp", 140),
    ("metrics", "comm_bytes_per_sample", 180),
    ("metrics", "peak_memory_bytes_max", 180),
    ("metrics", "bubble_fraction", 120),
    ("metrics", "epochs_to_target", 130),
    ("metrics", "epoch_time_s", 110),
    ("metrics", "throughput_samples_per_s", 190),
    ("metrics", "wall_epoch_time_s", 130),
    ("metrics", "wall_throughput_samples_per_s", 210),
    ("tags", "mode", 110),
    ("tags", "plan", 90),
    ("tags", "engine", 90),
    ("tags", "clock", 70),
    ("params", "model.name", 110),
    ("attributes", "Dataset", 220),
)
_ALWAYS_FIRST = (_NAME, "runDateAndNestInfo", "duration")  # as MLflow's page names these columns
_TRAINS = "workflowType=machine_learning"  # without it MLflow's pages show traces, or the browser's last choice
# Plain text, as MLflow's list of experiments does not render Markdown.
_ABOUT = (
    "Runs of pipebench. The command pipebench ui prints the address of their table, the first to its target on top."
)
_MADE_MS = 1_767_225_600_000  # an arbitrary date, by which the page sorts views


def experiment_tags() -> Mapping[str, str]:
    """Return the tags by which MLflow's pages show an experiment."""
    return {VIEW_TAG: view_state(), _KIND_TAG: _KIND, DESCRIPTION: _ABOUT}


def view_state() -> str:
    """Return the value of the view's tag."""
    columns = {f"{kind}.`{name}`": width for kind, name, width in _COLUMNS}
    state = {
        "selectedColumns": [*columns],
        "columnOrder": [*_ALWAYS_FIRST, *columns],
        "columnWidths": {_NAME: 340, **columns},
        # The fastest to the target on top. MLflow's default order would fold the runs of a comparison.
        "orderByKey": "metrics.`time_to_accuracy_s`",
        "orderByAsc": True,
        "globalLineChartConfig": {"xAxisKey": "metric", "selectedXAxisMetricKey": VIRTUAL_TIME, "lineSmoothness": 0},
    }
    envelope = {"name": VIEW, "createdAt": _MADE_MS, "updatedAt": _MADE_MS, "state": json.dumps(state)}
    return json.dumps({**state, **envelope})


def runs_address(server: str, experiment_id: str) -> str:
    """Return the address of an experiment's runs in this view; `server` has no slash at the end."""
    return f"{server}/#/experiments/{experiment_id}/runs?viewStateShareKey={VIEW}&{_TRAINS}"


def run_address(server: str, experiment_id: str, run_id: str) -> str:
    """Return the address of a run's page; `server` has no slash at the end."""
    return f"{server}/#/experiments/{experiment_id}/runs/{run_id}?{_TRAINS}"
