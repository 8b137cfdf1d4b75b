"""The view of an experiment that MLflow opens with: the columns by which people compare runs, curves over virtual time.

MLflow keeps shared views as tags of the experiment; its page takes a view, and that runs are trained and not traced,
from its address alone. What a tag holds is MLflow's own (3.17: `{name, createdAt, updatedAt, state}`, the state a JSON
text; before: the state itself), documented nowhere: both forms are in one object. A page that can't read it shows its
own columns.
"""

import json

VIEW = "pipebench"
VIEW_TAG = f"mlflow.sharedViewState.{VIEW}"
# Kind, name, and width in pixels: MLflow's own would hide the names.
_COLUMNS = (
    ("tags", "mode", 110),
    ("tags", "plan", 90),
    ("tags", "outcome", 100),
    ("metrics", "time_to_accuracy_s", 160),
    ("metrics", "epochs_to_target", 140),
    ("metrics", "throughput_samples_per_s", 190),
    ("metrics", "comm_bytes_per_sample", 190),
    ("metrics", "peak_memory_bytes_max", 190),
    ("metrics", "bubble_fraction", 130),
)
_ALWAYS_FIRST = ("attributes.`Run Name`", "runDateAndNestInfo", "duration")  # the page's own names of its columns
_TRAINS = "workflowType=machine_learning"  # MLflow's pages are for traces unless the address or the browser says so
_MADE_MS = 1_767_225_600_000  # any moment: the page sorts views by it


def view_state() -> str:
    """Return the value of the tag."""
    columns = {f"{kind}.`{name}`": width for kind, name, width in _COLUMNS}
    state = {
        "selectedColumns": [*columns],
        "columnOrder": [*_ALWAYS_FIRST, *columns],
        "columnWidths": columns,
        # The first to the target on top; in any order but MLflow's own the runs of a comparison are not folded away.
        "orderByKey": "metrics.`time_to_accuracy_s`",
        "orderByAsc": True,
        "globalLineChartConfig": {
            "xAxisKey": "metric",
            "selectedXAxisMetricKey": "virtual_time_s",
            "lineSmoothness": 0,
        },
    }
    envelope = {"name": VIEW, "createdAt": _MADE_MS, "updatedAt": _MADE_MS, "state": json.dumps(state)}
    return json.dumps({**state, **envelope})


def runs_address(server: str, experiment_id: str) -> str:
    """Return the address at which MLflow shows an experiment's runs as this view.

    Args:
        server: where MLflow is, without a slash at the end.
        experiment_id: MLflow's id.
    """
    return f"{server}/#/experiments/{experiment_id}/runs?viewStateShareKey={VIEW}&{_TRAINS}"


def run_address(server: str, experiment_id: str, run_id: str) -> str:
    """Return the address of a run's page; for the arguments see `runs_address`."""
    return f"{server}/#/experiments/{experiment_id}/runs/{run_id}?{_TRAINS}"
