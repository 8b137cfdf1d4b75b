"""Runs recorded in a real SQLite store."""

import getpass
import json
import math
import re
import socket
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from unittest.mock import Mock

import pytest

from pipebench.errors import UserError
from pipebench.formats import number
from pipebench.recipe.load import load
from pipebench.recipe.make import make_dataset
from pipebench.tracking.connection import default_uri
from pipebench.tracking.entries import description, logged_params, shown_value
from pipebench.tracking.inputs import Inputs
from pipebench.tracking.record import ENTRIES
from pipebench.tracking.run_log import RunLog, Tracking
from pipebench.tracking.store import Store
from pipebench.tracking.summary import least_losses, seed_medians, summarise_seeds
from pipebench.tracking.ui import choose_port, newest_experiments, open_ui
from pipebench.tracking.view import VIEW_TAG, run_address, runs_address
from pipebench.train.result import COMPLETED, DIVERGED, INTERRUPTED, MISSED, REACHED, Point, RunResult
from pipebench.typed_json import read, write
from tests.patience import wait_for
from tests.tracking.records import RESULT, fetch, history


@pytest.fixture(scope="module")
def finished(tracking: Tracking) -> RunLog:
    """One run as the runner records it, with a parent, long params and a point that is not finite."""
    parent = tracking.start("comparison", params={}, tags={})
    run = tracking.start(
        "pipedream",
        params={"train.minibatch_size": "32", "notes": "x" * 7000},
        tags={"mode": "pipedream"},
        parent=parent,
    )
    PARENTS[run.name] = parent
    for point in RESULT.points:
        run.point(point)
    run.point(Point(5000, 6.0, {"train_loss": math.nan, "top1": 0.9}))
    run.text("plan/plan.txt", "straight")
    run.finish(RESULT)
    parent.metrics(summarise_seeds([RESULT, RESULT]) | seed_medians([RESULT, RESULT]))
    parent.text("top1 curve.png", "a picture")
    parent.describe("| run |\n| --- |\n" + "| row |\n" * 2000, ["top1 curve.png"])
    parent.finish(None, status="FINISHED")
    return run


PARENTS: dict[str, RunLog] = {}


def comparison_of(run: RunLog) -> RunLog:
    return PARENTS[run.name]


def test_curves_have_samples_as_steps_and_wall_timestamps_and_the_virtual_clock_is_a_metric(finished: RunLog) -> None:
    """A scale per run made MLflow's durations rank runs wrongly; wall times are the same for all of them."""
    run = fetch(finished)
    rows = history(finished, "curves/top1")
    assert [row.step for row in rows] == [1000, 2000, 3000, 4000, 5000]
    assert [row.value for row in history(finished, "curves/virtual_time_s")] == [1.5, 3.0, 4.5, 6.0, 6.0]
    assert (run.data.tags["clock"], run.data.tags["timestamps"]) == ("virtual", "wall")
    now_ms = time.time() * 1000
    assert run.info.start_time <= rows[0].timestamp <= rows[-1].timestamp <= run.info.end_time <= now_ms


def test_best_values_are_separate_metrics(finished: RunLog) -> None:
    metrics = fetch(finished).data.metrics
    assert (metrics["best_top1"], metrics["best_train_loss"]) == (0.96, 0.25)
    assert metrics["time_to_accuracy_s"] == 4.5
    assert "best_virtual_time_s" not in metrics


def test_the_best_of_a_score_follows_its_data_set_s_direction(tracking: Tracking) -> None:
    """0.2.0 guessed from the name: the best `mse`, or word error rate, in MLflow was the worst."""
    run = tracking.start("mse", params={}, tags={})
    errors = [0.3, 0.1, 0.2]
    points = tuple(
        Point(n, float(n), {"mse": each, "eval_loss": each, "loss_scale": 2.0}) for n, each in enumerate(errors)
    )
    run.finish(replace(RESULT, metrics={"best_mse": 0.1}, points=points))
    metrics = fetch(run).data.metrics
    assert {name: metrics[name] for name in metrics if name.startswith("best_")} == {
        "best_mse": 0.1,
        "best_eval_loss": 0.1,
    }


def test_a_run_has_few_metrics_and_all_documented_ones(tracking: Tracking) -> None:
    """The rest, per worker and per cause, is in result.json."""
    details = {
        "final_top1": 0.9,
        "evaluation_time_s": 1.0,
        "comm_bytes_buffers": 1.0,
        "comm_bytes_activation": 1.0,
        "comm_transfers_activation_server": 1.0,
        "comm_time_level_server_s": 1.0,
        "waiting_norm_s": 1.0,
    }
    promised = {
        "time_to_accuracy_s",
        "epoch_time_s",
        "throughput_samples_per_s",
        "comm_bytes_total",
        "comm_bytes_per_sample",
        "comm_bytes_per_sample_activation",
        "comm_bytes_level_server",
        "epochs_to_target",
        "samples_per_update",
        "weight_versions_max",
        "comm_stall_fraction",
        "bubble_fraction",
        "prediction_error",
        "waiting_s",
    }
    workers = tuple({"worker": i, "compute_s": float(i), "bubble_fraction": 0.5} for i in range(16))
    stages = tuple({"index": i, "peak_memory_bytes": i, "samples_per_update": 32} for i in range(12))
    metrics = {**details, **dict.fromkeys(promised, 1.0), "best_top1": 0.96}
    result = replace(RESULT, metrics=metrics, workers=workers, stages=stages)
    run = tracking.start("lean", params={}, tags={})
    for point in RESULT.points:
        run.point(point)
    run.finish(result)
    logged = [*fetch(run).data.metrics]
    curves = {"curves/train_loss", "curves/top1", "curves/virtual_time_s"}
    assert {*logged} == promised | curves | {"target_reached", "best_train_loss", "best_top1"}
    single = [name for name in logged if name not in curves]
    assert single[:4] == ["target_reached", "time_to_accuracy_s", "comm_bytes_per_sample", "bubble_fraction"]


def test_single_values_are_not_curves_and_are_rounded(tracking: Tracking) -> None:
    """MLflow draws whatever has a step as a curve, and prints all digits of a double.

    0.2.0 had six, of which `pipebench runs` made 58,436 samples/s where `pipebench compare` had 58,437.
    """
    assert number(shown_value(58436.5432)) == number(58436.5432) == "58,437"
    metrics = {"time_to_accuracy_s": 0.23683526496969884, "comm_bytes_total": 2453971968.0, "bubble_fraction": math.nan}
    run = tracking.start("digits", params={}, tags={})
    run.finish(replace(RESULT, metrics=metrics))
    (row,) = history(run, "time_to_accuracy_s")
    assert (row.step, row.value) == (0, 0.236835265)
    assert fetch(run).data.metrics["comm_bytes_total"] == 2453971968.0
    assert fetch(run).data.tags["non_finite.bubble_fraction"] == "nan at 0 samples"


@pytest.mark.parametrize(("outcome", "reached"), [(REACHED, 1), (MISSED, 0), (COMPLETED, None), (DIVERGED, None)])
def test_whether_the_target_was_reached_is_a_number(tracking: Tracking, outcome: str, reached: int | None) -> None:
    run = tracking.start(outcome, params={}, tags={})
    run.finish(replace(RESULT, outcome=outcome))
    assert fetch(run).data.metrics.get("target_reached") == reached


def test_a_comparison_may_add_metrics_to_its_runs(tracking: Tracking) -> None:
    """A comparison knows how much faster than data parallelism each of its runs was."""
    child, parent = (tracking.start(name, params={}, tags={}) for name in ("child", "parent"))
    child.finish(RESULT)
    parent.metrics({"speedup_over_dp": 1.5671234567}, about=child.run_id)
    parent.metrics({"runs_total": 2.0})
    parent.finish(None, status="FINISHED")
    assert fetch(child).data.metrics["speedup_over_dp"] == 1.56712346
    assert fetch(parent).data.metrics == {"runs_total": 2.0}


def test_data_set_and_model_are_the_run_s_inputs(tracking: Tracking) -> None:
    """One model stands for all runs that take it; a run that goes on names both once."""
    from mlflow.tracking import MlflowClient

    loaded = load("quickstart")
    inputs = Inputs.of(loaded, make_dataset(loaded.recipe.dataset))
    runs = [tracking.start("inputs", params={}, tags={}) for _ in range(2)]
    for run in runs:
        run.inputs(inputs)
        run.inputs(inputs)
        run.finish(RESULT)
    found = [fetch(run).inputs for run in runs]
    (given,) = found[0].dataset_inputs
    data = given.dataset
    assert (data.name, data.digest) == ("mnist5k", inputs.dataset_digest)
    assert {tag.key: tag.value for tag in given.tags} == {"mlflow.data.context": "training"}
    assert json.loads(data.profile) == {"num_train": 4000, "num_eval": 1000}
    (image,) = json.loads(json.loads(data.schema)["mlflow_tensorspec"]["features"])
    assert image["tensor-spec"] == {"dtype": "float32", "shape": [-1, 1, 32, 32]}
    (model_id,) = {each.model_id for one in found for each in one.model_inputs}
    model = MlflowClient(default_uri()).get_logged_model(model_id)
    assert model.name == f"vgg16-{inputs.model_digest}"
    assert model.params["width"] == "0.125"


def test_inputs_are_identified_by_the_recipe_s_options() -> None:
    def of(*overrides: str) -> Inputs:
        loaded = load("quickstart", overrides)
        return Inputs.of(loaded, make_dataset(loaded.recipe.dataset))

    plain, wide, few = of(), of("model.width=0.25"), of("dataset.num_train=1000")
    assert plain.model_digest == few.model_digest != wide.model_digest
    assert plain.dataset_digest == wide.dataset_digest != few.dataset_digest


def test_null_keys_are_not_params() -> None:
    assert logged_params({"train.streams": "null", "train.seed": "0"}) == {"train.seed": "0"}


def test_a_comparison_s_description_begins_with_its_table(finished: RunLog) -> None:
    parent = comparison_of(finished)
    text = fetch(parent).data.tags["mlflow.note.content"]
    assert text.startswith("| run |\n| --- |\n| row |\n")
    assert len(text) <= 8000
    link = f"![top1 curve.png](get-artifact?path=top1%20curve.png&run_uuid={parent.run_id})"
    assert text.endswith(f"| row |\n\n(The artifacts hold the rest.)\n\n{link}")
    assert description("short", []) == "short"


def test_an_experiment_has_a_view_which_the_user_may_change(tracking: Tracking) -> None:
    from mlflow.tracking import MlflowClient

    client, store = MlflowClient(default_uri()), tracking.store
    tags = client.get_experiment(str(store.experiment_id)).tags
    view = json.loads(tags[VIEW_TAG])
    assert len(tags[VIEW_TAG]) < 5000, "MLflow's limit"
    assert view["name"] == "pipebench"
    state = json.loads(view["state"])
    assert {key: view[key] for key in state} == state, "older pages read the state itself"
    wanted = {"time_to_accuracy_s", "throughput_samples_per_s", "comm_bytes_per_sample", "bubble_fraction"}
    assert {f"metrics.`{name}`" for name in wanted} | {"tags.`mode`", "tags.`plan`"} <= set(state["selectedColumns"])
    assert state["globalLineChartConfig"]["selectedXAxisMetricKey"] == "curves/virtual_time_s"
    assert tags["mlflow.experimentKind"] == "custom_model_development"
    assert {"tags.`engine`", "tags.`clock`"} <= set(state["selectedColumns"])
    assert not re.search(r"[\[\]()`#*]", tags["mlflow.note.content"]), "the list of experiments shows it unrendered"
    client.set_experiment_tag(str(store.experiment_id), VIEW_TAG, "mine")
    Store(default_uri(), "suite").connect()
    assert client.get_experiment(str(store.experiment_id)).tags[VIEW_TAG] == "mine"
    client.set_experiment_tag(str(store.experiment_id), VIEW_TAG, tags[VIEW_TAG])


def test_a_run_is_recorded_if_its_experiment_has_no_view(monkeypatch: pytest.MonkeyPatch, tracking: Tracking) -> None:
    def fail(*_: object) -> None:
        raise OSError("no tags here")

    monkeypatch.setattr("mlflow.tracking.MlflowClient.set_experiment_tag", fail)
    store = Store(default_uri(), "without a view")
    store.connect()
    assert store.experiment_id is not None


def test_each_stage_has_its_memory_in_a_table(finished: RunLog, folder: Path) -> None:
    """As an artifact: metrics of single values per stage were charts of one point each."""
    artifacts = folder / "mlartifacts" / "suite" / str(finished.run_id) / "artifacts"
    assert (artifacts / "stages.csv").read_text() == "index,peak_memory_bytes,samples_per_update\n0,100,32\n1,60,\n"
    assert not [name for name in fetch(finished).data.metrics if "/stage_" in name]


def test_a_run_names_its_user(finished: RunLog, tracking: Tracking, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a team's server the column `User` was empty."""
    assert fetch(finished).data.tags["mlflow.user"] == getpass.getuser()
    monkeypatch.setattr(getpass, "getuser", Mock(side_effect=OSError("no name")))
    nobodys = tracking.start("nobody's", params={}, tags={})
    nobodys.finish(RESULT)
    assert "mlflow.user" not in fetch(nobodys).data.tags


def test_outcome_status_and_parent(finished: RunLog) -> None:
    run = fetch(finished)
    assert run.info.status == "FINISHED"
    assert run.data.tags["outcome"] == REACHED
    assert run.data.tags["mode"] == "pipedream"
    assert run.data.tags["mlflow.parentRunId"] == comparison_of(finished).run_id


def test_a_value_that_is_not_finite_becomes_a_tag(finished: RunLog) -> None:
    run = fetch(finished)
    assert run.data.tags["non_finite.train_loss"] == "nan at 5000 samples"
    assert len(history(finished, "curves/train_loss")) == 4


def test_a_long_param_is_cut_and_kept_whole_as_an_artifact(finished: RunLog, folder: Path) -> None:
    run = fetch(finished)
    assert run.data.params["train.minibatch_size"] == "32"
    assert len(run.data.params["notes"]) == 6000
    artifacts = folder / "mlartifacts" / "suite" / str(finished.run_id) / "artifacts"
    assert json.loads((artifacts / "params.json").read_text())["notes"] == "x" * 7000
    assert (artifacts / "plan" / "plan.txt").read_text() == "straight"
    assert read(RunResult, (artifacts / "result.json").read_text()) == RESULT


def test_the_parent_has_mean_and_spread(finished: RunLog) -> None:
    metrics = fetch(comparison_of(finished)).data.metrics
    assert (metrics["time_to_accuracy_s_mean"], metrics["time_to_accuracy_s_std"]) == (4.5, 0.0)
    assert metrics["time_to_accuracy_s"] == 4.5, "the median, in the column of single runs"
    assert "comm_bytes_total_mean" not in metrics
    assert (metrics["runs_reached"], metrics["runs_total"]) == (2, 2)


def test_the_command_to_open_the_run_is_printed(finished: RunLog) -> None:
    assert finished.where() == "pipebench ui   (experiment suite, run pipedream)"


@pytest.mark.parametrize(
    ("outcome", "status"),
    [(DIVERGED, "FAILED"), (INTERRUPTED, "KILLED"), (MISSED, "FINISHED"), (COMPLETED, "FINISHED")],
)
def test_the_outcome_decides_the_status(tracking: Tracking, outcome: str, status: str) -> None:
    run = tracking.start(outcome, params={}, tags={})
    run.finish(replace(RESULT, outcome=outcome))
    assert (fetch(run).info.status, fetch(run).data.tags["outcome"]) == (status, outcome)


def test_an_interrupted_run_keeps_its_logged_values(tracking: Tracking) -> None:
    run = tracking.start("interrupted", params={}, tags={})
    run.point(RESULT.points[0])
    run.finish(None, status="KILLED")
    assert fetch(run).info.status == "KILLED"
    assert [row.value for row in history(run, "curves/top1")] == [0.5]


def test_a_wall_clock_run_ends_now_and_has_no_virtual_time(tracking: Tracking) -> None:
    run = tracking.start("wall", params={}, tags={}, virtual=False)
    run.point(RESULT.points[0])
    run.finish(RESULT)
    assert abs(fetch(run).info.end_time - time.time() * 1000) < 60_000
    assert "virtual_time_s" not in fetch(run).data.metrics


def test_seconds_of_two_clocks_are_never_in_one_column(tracking: Tracking) -> None:
    """0.1.0 ranked a simulated V100's epochs with this machine's, under one name."""
    metrics = {"time_to_accuracy_s": 4.5, "epoch_time_s": 2.0, "throughput_samples_per_s": 8.0, "bubble_fraction": 0.5}
    found = []
    for clock in ("virtual", "wall"):
        run = tracking.start(clock, params={}, tags={}, virtual=clock == "virtual")
        run.finish(replace(RESULT, clock=clock, metrics=metrics))
        found.append({*fetch(run).data.metrics} - {"target_reached", "best_top1", "best_train_loss"})
    virtual, wall = found
    assert virtual == {*metrics}
    assert wall == {"wall_time_to_accuracy_s", "wall_epoch_time_s", "wall_throughput_samples_per_s", "bubble_fraction"}


def test_more_values_than_one_request_holds_are_sent(tracking: Tracking) -> None:
    run = tracking.start("long", params={f"key{i}": str(i) for i in range(150)}, tags={})
    for i in range(1200):
        run.point(Point(i, float(i), {"train_loss": 1.0}))
    run.finish(None, status="FINISHED")
    assert len(history(run, "curves/train_loss")) == 1200
    assert len(fetch(run).data.params) == 150


def test_logging_a_point_costs_microseconds(tracking: Tracking) -> None:
    run = tracking.start("cheap", params={}, tags={})
    begin_s = time.thread_time()  # of the processor, which others may be using
    for i in range(1000):
        run.point(Point(i, float(i), {"train_loss": 1.0, "top1": 0.5}))
    each_s = (time.thread_time() - begin_s) / 1000
    run.finish(None, status="FINISHED")
    assert each_s < 1e-3  # about 5 us on an idle machine


def test_a_deleted_experiment_is_used_again(tracking: Tracking) -> None:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(default_uri())
    client.delete_experiment(client.create_experiment("deleted"))
    store = Store(default_uri(), "deleted")
    store.connect()
    experiment = client.get_experiment_by_name("deleted")
    assert experiment is not None
    assert experiment.lifecycle_stage == "active"


def test_an_experiment_that_is_deleted_during_a_run_is_restored(tracking: Tracking) -> None:
    """The rest of the run and its end were refused, and it stayed running for ever."""
    from mlflow.tracking import MlflowClient

    run = tracking.start("deleted meanwhile", params={}, tags={})
    run.point(RESULT.points[0])
    tracking.wake()
    wait_for(lambda: run._sender.is_empty)
    MlflowClient(default_uri()).delete_experiment(str(tracking.store.experiment_id))
    run.finish(RESULT)
    assert fetch(run).info.status == "FINISHED"
    assert len(history(run, "curves/top1")) == 1


def test_mlflow_prints_nothing(tracking: Tracking, capfd: pytest.CaptureFixture[str]) -> None:
    run = tracking.start("silent", params={}, tags={})
    run.finish(RESULT)
    assert capfd.readouterr() == ("", "")


def num_samples(run: RunLog, tracking: Tracking) -> int:
    """Return how many samples of this host a run's record has, and have the next taken."""
    tracking.wake()
    assert run.folder is not None
    return (run.folder / ENTRIES).read_text().count("system/cpu_utilization_percentage")


def test_system_metrics_are_sampled_and_counted_on(
    tracking: Tracking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipebench.tracking.system.SAMPLE_EVERY_S", 0.0)
    names = [f"system/{name}" for name in ("cpu_utilization_percentage", "system_memory_usage_megabytes")]
    names += ["system/disk_usage_percentage"]
    seen = 0
    for _ in range(2):
        run = tracking.start("system", params={}, tags={}, virtual=False, folder=tmp_path, system_metrics=True)
        wait_for(lambda: num_samples(run, tracking) >= seen + 2)  # noqa: B023
        run.finish(None, status="FINISHED")
        seen = num_samples(run, tracking)  # of what is being sampled at the end there is no entry
        assert run.where().startswith("pipebench ui")
    for name in names:
        rows = history(run, name)
        assert [row.step for row in rows] == list(range(seen))
        assert all(row.value > 0 for row in rows if "cpu" not in name)
        assert abs(rows[-1].timestamp - time.time() * 1000) < 60_000


def test_a_host_without_counters_has_no_system_metrics(tracking: Tracking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipebench.tracking.system.SAMPLE_EVERY_S", 0.0)
    monkeypatch.setattr("pipebench.tracking.system._FOLDER", "no_such_package")
    run = tracking.start("no system", params={}, tags={}, system_metrics=True)
    run.finish(RESULT)
    assert fetch(run).info.status == "FINISHED"
    assert not [name for name in fetch(run).data.metrics if name.startswith("system/")]


def test_old_results_without_workers_can_be_read() -> None:
    data = json.loads(write(RESULT))
    del data["workers"]
    assert read(RunResult, json.dumps(data)) == RESULT


def test_every_worker_has_its_seconds_in_the_result() -> None:
    workers = tuple({"worker": i, "rank": i, "compute_s": float(i), "bubble_fraction": 0.5} for i in range(11))
    result = replace(RESULT, workers=workers)
    assert read(RunResult, write(result)) == result


def test_seeds_that_missed_count_as_infinitely_slow() -> None:
    missed = replace(RESULT, outcome=MISSED, metrics={"time_to_accuracy_s": 99.0, "epoch_time_s": 3.0})
    reached = [replace(RESULT, metrics={"time_to_accuracy_s": value, "epoch_time_s": 2.0}) for value in (1.0, 2.0, 6.0)]
    summary = summarise_seeds([*reached, missed])
    assert (summary["runs_reached"], summary["runs_total"]) == (3, 4)
    assert (summary["time_to_accuracy_s_min"], summary["time_to_accuracy_s_median"]) == (1.0, 4.0), "it is infinite"
    assert not summary.keys() & {f"time_to_accuracy_s_{each}" for each in ("mean", "std", "max")}
    assert summary["epoch_time_s_max"] == 3.0
    assert seed_medians([*reached, missed]) == {"epoch_time_s": 2.0, "time_to_accuracy_s": 4.0}
    assert seed_medians([*reached, *[missed] * 3]) == {"epoch_time_s": 2.5}, "half of the seeds missed"
    assert seed_medians(reached)["time_to_accuracy_s"] == 2.0
    assert summarise_seeds(reached)["time_to_accuracy_s_mean"] == 3.0
    assert summarise_seeds(reached)["time_to_accuracy_s_std"] == pytest.approx(math.sqrt(7))


def test_one_seed_has_no_spread_and_none_reached_no_time() -> None:
    assert "epoch_time_s_std" not in summarise_seeds([replace(RESULT, metrics={"epoch_time_s": 2.0})])
    assert "time_to_accuracy_s_mean" not in summarise_seeds([replace(RESULT, outcome=MISSED)])


def test_curves_ignore_values_that_are_not_finite() -> None:
    points = [Point(1, 1.0, {"train_loss": 2.0}), Point(2, 2.0, {"train_loss": math.inf})]
    assert least_losses(points) == {"best_train_loss": 2.0}


class _Experiments(BaseHTTPRequestHandler):
    """Answers requests for experiments like MLflow's server."""

    def do_POST(self) -> None:
        seen = {"name": "small/gnmt8", "experiment_id": "7", "tags": [{"key": VIEW_TAG, "value": "{}"}]}
        body = json.dumps({"experiments": [seen, {"name": "Default", "experiment_id": "0"}]}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_request(self, *_: object) -> None:
        """Say nothing."""


def test_the_ui_prints_the_address_of_every_experiment_with_a_view() -> None:
    with HTTPServer(("127.0.0.1", 0), _Experiments) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        assert newest_experiments(address) == [("small/gnmt8", "7")]
    assert newest_experiments(address) == [], "a server that doesn't answer costs no page"
    expected = f"{address}/#/experiments/7/runs?viewStateShareKey=pipebench&workflowType=machine_learning"
    assert runs_address(address, "7") == expected
    assert run_address(address, "7", "abc") == f"{address}/#/experiments/7/runs/abc?workflowType=machine_learning"


def test_a_taken_port_is_reported() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} is taken"):
            choose_port(port)


def test_no_runs_to_look_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no runs are recorded"):
        open_ui()
