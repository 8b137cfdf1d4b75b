"""A comparison in MLflow: its runs' modes, its summary and its table."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipebench.cli.main import cli
from pipebench.run.story import PAGE


def test_a_comparison_is_tagged_and_summarised_by_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.1.0 tagged it with the wall clock, and its row in MLflow's table was empty."""
    from mlflow.tracking import MlflowClient

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name in ("dp", "gpipe"):
        Path(f"my-{name}.yaml").write_text(f"extends: quickstart/{name}.yaml\nname: my-{name}\n")
    done = CliRunner().invoke(cli, ["run", "my-dp.yaml", "my-gpipe.yaml", "engine.kind=simulated"])
    assert done.exit_code == 0, done.output
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name(tmp_path.name)
    assert experiment is not None, "named by the folder"
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = [run for run in runs if run.data.tags["kind"] == "comparison"]
    children = {run.data.params["parallelism.mode"]: run for run in runs if run is not parent}
    wanted = {"mode": "dp, gpipe", "plan": "4, straight", "engine": "simulated", "clock": "virtual"}
    assert wanted.items() <= parent.data.tags.items()
    assert parent.data.params["model.name"] == "vgg16"
    assert "parallelism.mode" not in parent.data.params
    for mode, child in children.items():
        assert child.data.metrics["epoch_time_s"] > 0
        assert child.data.tags["called"] == f"my-{mode}"
    assert parent.data.metrics == {"runs_total": 2, "runs_reached": 0}, "else charts of one bar hide the curves"
    (shown,) = json.loads(parent.data.tags["mlflow.loggedArtifacts"])
    table = json.loads(Path(client.download_artifacts(parent.info.run_id, shown["path"])).read_text())
    assert [row[0] for row in table["data"]] == ["dp", "gpipe"]
    assert {len(row) for row in table["data"]} == {len(table["columns"])}

    assert min(each.path for each in client.list_artifacts(parent.info.run_id)) == PAGE
    page = Path(client.download_artifacts(parent.info.run_id, PAGE)).read_text()
    for text in (f"pipebench compare {parent.info.run_id}", "dp has the highest throughput", "parallelism.mode"):
        assert text in page, text
    for child in children.values():
        assert f"http://127.0.0.1:5000/#/experiments/{child.info.experiment_id}/runs/{child.info.run_id}?" in page
