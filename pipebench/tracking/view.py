"""How MLflow's pages show an experiment: the columns by which people compare runs, curves over virtual time.

MLflow stores shared views as tags of the experiment; its page's address selects a view, and training rather than
traces. The tag's content is MLflow's own and undocumented (3.17: `{name, createdAt, updatedAt, state}`, the state a
JSON text; before: the state itself): both forms are in one object. A page that can't read it shows its own columns.
"""

import json
from collections.abc import Mapping

from pipebench.tracking.entries import DESCRIPTION, VIRTUAL_TIME

VIEW = "pipebench"
VIEW_TAG = f"mlflow.sharedViewState.{VIEW}"
# Pages before the switch between `GenAI` and `Model training` (3.8 for one) go by it; 3.17's go by the address, and by
# what the browser remembers.
_KIND_TAG, _KIND = "mlflow.experimentKind", "custom_model_development"
_NAME = "attributes.`Run Name`"
# Kind, name, and width in pixels: MLflow's own would hide the names.
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
_ALWAYS_FIRST = (_NAME, "runDateAndNestInfo", "duration")  # the page's own names of its columns
_TRAINS = "workflowType=machine_learning"  # MLflow's pages are for traces unless the address or the browser says so
# Plain: MLflow's list of experiments shows Markdown as it is written.
_ABOUT = (
    "Runs of pipebench. The command pipebench ui prints the address of their table, the first to its target on top."
)
_MADE_MS = 1_767_225_600_000  # any moment: the page sorts views by it


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
        # The first to the target on top; in any order but MLflow's own the runs of a comparison are not folded away.
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
