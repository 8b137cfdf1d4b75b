"""Written plans are run: from `pipebench plan --out`, edited by hand, and from a run's artifacts."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pipebench.cli.main import cli
from pipebench.recipe.clusters import load_cluster
from pipebench.recipe.load import load
from pipebench.train.prepare import prepare
from tests.patience import without_phases
from tests.recipes import uniform_recipe


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIPEBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "small.yaml").write_text(uniform_recipe(8, 2000, 250, minibatch_size=250))  # planned as 2-2
    return tmp_path


def invoke(*words: str, code: int = 0) -> Result:
    result = CliRunner().invoke(cli, list(words))
    assert result.exit_code == code, result.output
    return result


def edit(path: Path, change: Any) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def move_a_layer(data: dict[str, Any]) -> None:
    """Move the first stage's last layer to the second, and turn the devices round."""
    first, second = data["stages"][0]["layers"], data["stages"][1]["layers"]
    name, policy = first.popitem()
    data["stages"][1]["layers"] = {name: policy, **second}
    for stage in data["stages"]:
        stage["devices"] = [3 - device for device in stage["devices"]]


def test_a_written_plan_is_run(project: Path) -> None:
    invoke("plan", "small.yaml", "--out", "plan.json")
    words = ["parallelism.plan=plan.json"]
    recipe = load("small.yaml", words).recipe
    cluster = load_cluster(recipe.cluster.name, recipe.cluster.servers)
    before = prepare(recipe, cluster, trains=False).setup
    assert [*json.loads(Path("plan.json").read_text())["stages"][0]["layers"]] == [
        layer.name for layer in before.graph.layers[: before.plan.stages[0].stop]
    ]
    edit(project / "plan.json", move_a_layer)
    edited = prepare(recipe, cluster, trains=False).setup
    assert edited.plan.stages[0].stop == before.plan.stages[0].stop - 1
    assert edited.devices == tuple(3 - device for device in before.devices)
    invoke("draw", "small.yaml", *words)
    shown = json.loads(invoke("plan", "small.yaml", *words, "--json").stdout)
    assert shown["recipe_plan"]["is_simulated"]
    for kind in ("simulated", "virtual"):
        invoke("run", "small.yaml", *words, f"engine.kind={kind}")


@pytest.mark.slow
def test_processes_run_the_edited_plan(project: Path) -> None:
    invoke("plan", "small.yaml", "--out", "plan.json")
    edit(project / "plan.json", move_a_layer)
    # In a process of its own, which imports torch once for all workers: they are copies of it.
    words = ["run", "small.yaml", "parallelism.plan=plan.json", "engine.kind=distributed"]
    subprocess.run([sys.executable, "-m", "pipebench", *words], check=True, capture_output=True)
    (kept,) = project.glob("pipebench-runs/*/plan.json")
    assert json.loads(kept.read_text()) == json.loads(Path("plan.json").read_text())


def test_recomputation_is_per_stage(project: Path) -> None:
    invoke("plan", "small.yaml", "--out", "plan.json")

    def recompute_the_first(data: dict[str, Any]) -> None:
        layers = data["stages"][0]["layers"]
        data["stages"][0]["layers"] = dict.fromkeys(layers, "recompute")

    words = ["parallelism.plan=plan.json"]
    recipe = load("small.yaml", words).recipe
    cluster = load_cluster(recipe.cluster.name, recipe.cluster.servers)
    kept = prepare(recipe, cluster, trains=False).setup.costs.stages
    edit(project / "plan.json", recompute_the_first)
    found = prepare(recipe, cluster, trains=False).setup
    first, *others = ({*stage.memory} for stage in found.plan.stages)
    assert first == {"recompute"}
    assert all(each == {"keep"} for each in others)
    again = found.costs.stages
    assert again[0].backward_s[250] == kept[0].backward_s[250] + kept[0].forward_s[250]
    assert again[1].backward_s == kept[1].backward_s
    shown = json.loads(invoke("plan", "small.yaml", *words, "--json").stdout)
    assert shown["recipe_plan"]["minibatch_s"] > 0


def test_a_run_s_artifacts_run_again_with_its_plan(project: Path) -> None:
    """The planner would plan otherwise: the plan was edited before the first run."""
    invoke("plan", "small.yaml", "--out", "plan.json")
    edit(project / "plan.json", move_a_layer)
    invoke("run", "small.yaml", "parallelism.plan=plan.json")
    (artifacts,) = {path.parent for path in project.rglob("artifacts/recipe.yaml")}
    first = json.loads((artifacts / "result.json").read_text())
    (project / "plan.json").unlink()
    overrides = [f"parallelism.plan={artifacts / 'plan.json'}", f"engine.timing={artifacts / 'profile.json'}"]
    invoke("run", str(artifacts / "recipe.yaml"), *overrides)
    others = [path for path in project.rglob("artifacts/result.json") if path.parent != artifacts]
    second = json.loads(others[0].read_text())
    assert second["points"] == first["points"]
    assert (others[0].parent / "plan.json").read_text() == (artifacts / "plan.json").read_text()


def test_a_run_keeps_the_file_of_its_order(project: Path) -> None:
    words = ["train.target=null", "train.max_epochs=1", "engine.kind=simulated"]
    invoke("draw", "modes/order-of-a-file", "--out", "mine.csv")
    given = Path("mine.csv").read_text()
    invoke("run", "modes/order-of-a-file", *words, "parallelism.order=mine.csv")
    Path("mine.csv").unlink()
    (artifacts,) = {path.parent for path in project.rglob("artifacts/recipe.yaml")}
    assert (artifacts / "order.csv").read_text() == given
    invoke("run", str(artifacts / "recipe.yaml"), f"parallelism.order={artifacts / 'order.csv'}")


def test_faults_come_out_before_anything_runs(project: Path) -> None:
    invoke("plan", "small.yaml", "--out", "plan.json")

    def spoil(data: dict[str, Any]) -> None:
        first, second = data["stages"][0]["layers"], data["stages"][1]["layers"]
        first["classifier_00"] = first.pop("layer0")
        second["layer1"] = first.pop("layer1")

    edit(project / "plan.json", spoil)
    for command in ("run", "plan", "draw"):
        said = without_phases(invoke(command, "small.yaml", "parallelism.plan=plan.json", code=2).stderr).splitlines()
        assert len(said) == 3, said
        assert "stages[0].layers: got 'classifier_00', and the model has no such layer" in said[0]
        assert "stages[1].layers: got 'layer1' out of order, in the model it comes after 'layer0'" in said[1]
        assert "stages: missing are 'layer0', allowed is every layer of the model once" in said[2]


def test_out_does_not_overwrite_other_files(project: Path) -> None:
    (project / "mine.json").write_text("{}")
    said = invoke("plan", "small.yaml", "--out", "mine.json", code=2).stderr
    assert "--out: mine.json is there and isn't a plan's file, so it is left alone; name another" in said
    said = invoke("plan", "small.yaml", "--out", "no/plan.json", code=2).stderr
    assert "--out: got no/plan.json, but there is no folder no" in said
    said = invoke("plan", "--profile", "x.json", "--levels", "4@1e9", "--out", "plan.json", code=2).stderr
    assert "--out goes with a recipe: " in said
    invoke("plan", "small.yaml", "--out", "plan.json")
    invoke("plan", "small.yaml", "--out", "plan.json")
