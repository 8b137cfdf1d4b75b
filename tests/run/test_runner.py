"""Whole runs through the command line: exit codes, records, and mistakes that only the traced model shows."""

import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

import pipebench
from pipebench.cli.main import cli
from pipebench.cli.outputs import is_picture_by
from pipebench.errors import WorkersFailedError
from pipebench.run import runner
from pipebench.run.one_process import run_simulated
from pipebench.run.request import RunRequest
from pipebench.run.runner import RUNS, _record_speed_ups
from pipebench.show import memory_picture, occupancy_picture
from pipebench.show.answers import Run
from pipebench.tracking.record import read_record
from pipebench.tracking.run_log import Tracking
from tests.modes import WHOLE
from tests.results import DP, PIPEDREAM
from tests.shortcuts import evaluate_few_digits

SHORT = [
    *("model.width=0.05", "dataset.num_train=1000", "train.minibatch_size=200", "train.max_epochs=1"),
    *("train.target.value=0.999", "train.evaluate_every.minibatches=3"),
]


def invoke(*words: str) -> Result:
    return CliRunner().invoke(cli, words)


def run(*words: str) -> Result:
    return invoke("run", *words)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(autouse=True)
def _in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    evaluate_few_digits(monkeypatch, 200)  # a thousand digits take as long as SHORT trains


def test_two_seeds_are_children_of_a_run_with_their_spread(folder: Path) -> None:
    result = run("quickstart", *SHORT, "parallelism.plan=straight", "--seeds", "1,2")
    assert result.exit_code == 1, result.output
    assert "missed top1 0.999" in result.output
    with closing(sqlite3.connect(folder / "mlflow.db")) as store:
        rows = dict(store.execute("select name, run_uuid from runs"))
        seeds = "quickstart, seeds 1, 2"
        assert {seeds, "pipedream straight, seed 1", "pipedream straight, seed 2"} <= rows.keys()
        parents = store.execute("select value from tags where key = 'mlflow.parentRunId'").fetchall()
        assert parents == [(rows[seeds],)] * 2
        of_parent = "select key from metrics where run_uuid = ?"
        keys = {key for (key,) in store.execute(of_parent, (rows[seeds],))}
        assert {"throughput_samples_per_s_mean", "best_top1_std", "runs_reached", "throughput_samples_per_s"} <= keys
        notes = "select value from tags where run_uuid = ? and key = 'mlflow.note.content'"
        (note,) = next(store.execute(notes, (rows[seeds],)))
    assert note.startswith("| run | plan | reached |")
    assert "- quickstart, seed 2: missed" in note
    assert "![top1.png](get-artifact?path=top1.png" in note
    reported = result.output.splitlines()
    assert [line for line in reported if " of 2  " in line] == ["1 of 2  quickstart-seed1", "2 of 2  quickstart-seed2"]
    assert "quickstart  preparing" in reported
    assert "quickstart-seed1  training, at most 1 epoch" in reported


def test_a_run_stores_all_that_is_needed_to_repeat_it(folder: Path) -> None:
    assert run("quickstart/gpipe", *SHORT, "name=again").exit_code == 1
    (recipe,) = [path for path in folder.rglob("artifacts/recipe.yaml") if "name: again" in path.read_text()]
    artifacts = {path.name for path in recipe.parent.iterdir()}
    wanted = {"environment.yaml", "plan.json", "profile.json", "result.json", "run.log", "timeline.png", "trace.json"}
    assert wanted | {"memory.png", "occupancy.png", "plan.png", "curves.png"} <= artifacts
    assert min(artifacts) == "about.html"
    assert (recipe.parent / "about.html").read_text().count("data:image/png;base64,") == 4
    events = json.loads((recipe.parent / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "C"} == {0, 1, 2, 3}
    first = json.loads((recipe.parent / "result.json").read_text())
    assert run(str(recipe), "name=twin").exit_code == 1
    (twin,) = [path for path in folder.rglob("artifacts/result.json") if '"name": "twin"' in path.read_text()]
    second = json.loads(twin.read_text())
    assert second["points"] == first["points"], "same recipe, same seed, same curve"


def test_a_finished_run_s_weights_are_exported(folder: Path, tmp_path: Path) -> None:
    """On the virtual engine, too: export said that there was no run."""
    done = run("quickstart/dp", *SHORT, "name=weighed")
    reported = [line for line in done.output.splitlines() if line.startswith("  weights  pipebench export weighed-")]
    assert len(reported) == 1, done.output
    exported = CliRunner().invoke(cli, ["export", "weighed", "--out", str(tmp_path / "weights.pt")])
    assert exported.exit_code == 0, exported.output
    assert torch.load(tmp_path / "weights.pt", weights_only=True)
    assert run("quickstart/dp", *SHORT, "name=weightless", "train.checkpoint_keep=0").exit_code == 1
    assert not [*folder.glob("pipebench-runs/weightless-*")]


def test_training_on_a_virtual_clock_does_not_wait_for_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Tracking] = []
    monkeypatch.setattr(Tracking, "wait_until_ready", waited.append)
    assert run("quickstart/dp", *SHORT, "name=unwaited").exit_code == 1
    assert not waited, "its clock doesn't show what MLflow's import takes"


def test_a_run_names_the_layers_whose_backwards_are_not_split() -> None:
    split = run("small/gnmt8/zero-bubble", "engine.kind=simulated")
    assert split.exit_code == 0, split.output
    said = " ".join(split.stdout.split())
    assert "backwards that can't be split run whole, in the input part: bidirectional (BidirectionalLSTM), " in said
    assert "classifier" not in said
    assert "can't be split" not in run("quickstart/gpipe", "parallelism.backward=split", "engine.kind=simulated").stdout


def test_a_simulated_run_trains_nothing() -> None:
    result = run("quickstart/dp", "engine.kind=simulated")
    assert result.exit_code == 0
    assert "nothing was trained" in result.output


def test_a_simulated_run_reports_its_peak_memory_and_where_it_exceeds_the_limit(folder: Path) -> None:
    assert "memory           30.3 MB at most on a worker\n" in run("quickstart", "engine.kind=simulated").stdout
    text = Path(pipebench.__file__).parent.parent.joinpath("recipes/clusters/cluster-a.yaml").read_text()
    (folder / "small.yaml").write_text(re.sub(r"(?m)^memory: .*", "memory: {value: 20 MB, assumed: small}", text))
    words = [
        "quickstart",
        "engine.kind=simulated",
        "parallelism.plan=straight",
        f"cluster.name={folder / 'small.yaml'}",
    ]
    result = run(*words)
    assert result.exit_code == 0, result.output
    said = " ".join(result.stdout.split())
    assert re.search(
        r"memory 30.3 MB at most on a worker; out of memory at [\d.]+ [mu]s, in 0F2@0: worker 0 \(stage 0\) needs "
        r"22.6 MB of the 20.0 MB of a V100 \(activations 22.4 MB, .*\), and later it needs 30.3 MB; what would fit: "
        r"parallelism.recompute: true, or parallelism.depth: 2\b",
        said,
    ), said
    for change in ("parallelism.recompute=true", "parallelism.depth=2"):
        again = run(*words, change)
        assert again.exit_code == 0
        assert "out of memory" not in again.stdout
    assert "out of memory" in run(*words, "parallelism.depth=3").stdout


def test_memory_and_occupancy_are_drawn_without_a_run(folder: Path) -> None:
    drawn = invoke("draw", "quickstart/dp", "--picture", "memory.png")
    assert invoke("draw", "quickstart/dp", "--picture", "occupancy.png", "--of", "occupancy").exit_code == 0
    assert drawn.exit_code == 0, drawn.output
    said = r"[\d.]+ MB at most on worker 0 \(stage 0 replica 0\), in 0B\d+\+\d+@\d+, 0\.1% of the 16.0 GB of a device\n"
    assert re.match(said, drawn.stdout), drawn.stdout
    assert is_picture_by(memory_picture.MADE_BY, folder / "memory.png")
    assert is_picture_by(occupancy_picture.MADE_BY, folder / "occupancy.png")
    (folder / "notes.png").write_text("mine")
    refused = invoke("draw", "quickstart/dp", "--picture", "notes.png")
    assert refused.exit_code == 2
    assert (
        "--picture: notes.png is there and isn't a picture of memory over time, so it is left alone" in refused.output
    )


def test_a_cut_that_does_not_exist_stops_every_recipe_before_the_first_runs() -> None:
    result = run(
        "quickstart/model",
        "quickstart/gpipe",
        "parallelism.plan=straight",
        "parallelism.cuts=[features.7,features.300,classifier.1]",
    )
    assert result.exit_code == 2
    assert "recipes/quickstart/model.yaml: parallelism.cuts: the model has no layer 'features.300'" in result.output
    assert "epoch 1" not in result.output


def test_a_run_whose_mode_the_planner_chose_records_the_other_modes(folder: Path) -> None:
    result = run("modes/auto", *SHORT, "engine.kind=simulated")
    assert result.exit_code == 0, result.output
    (path,) = folder.rglob("modes.json")
    reported, plan = json.loads(path.read_text()), json.loads(path.with_name("plan.json").read_text())
    seconds = [each["predicted_minibatch_s"] for each in reported["compared"]]
    assert len(seconds) + len(reported["refused"]) == len(WHOLE)
    assert seconds == sorted(seconds)
    assert plan["mode"] == reported["compared"][0]["mode"]


def test_a_run_that_is_not_in_mlflow_yet_keeps_its_speed_up(tmp_path: Path) -> None:
    """Those of runs that were sent after an outage of MLflow were missing for good."""
    elsewhere = Tracking("suite", lambda limit_s: True)
    parent, run = (
        elsewhere.start(name, params={}, tags={}, folder=tmp_path / name) for name in ("dp, pipedream", "pipedream")
    )
    run.finish(PIPEDREAM)
    _record_speed_ups(parent, [DP, PIPEDREAM], {(PIPEDREAM.name, 0): run.run_id or run.folder})
    kept = read_record(tmp_path / "pipedream")
    assert kept is not None
    assert kept.metrics == {"speedup_over_dp": 3.0, "epoch_speedup_over_dp": 1.0}


def test_seeds_of_several_recipes_are_a_row_per_recipe(folder: Path) -> None:
    """0.1.0 printed a row per seed, all under the recipe's name."""
    result = run("quickstart/dp", "quickstart/pipedream", "engine.kind=simulated", "--seeds", "0,1")
    assert result.exit_code == 0, result.output
    comparison = result.output[result.output.rindex("vs dp") :].splitlines()
    assert [line.split()[0] for line in comparison if "%" in line] == ["pipedream", "dp"]
    assert "4 of 4  quickstart-pipedream-seed1" in result.output
    with closing(sqlite3.connect(folder / "mlflow.db")) as store:
        found = "select name, round(value, 6) from runs natural join metrics where key = 'epoch_speedup_over_dp'"
        speed_ups = dict(store.execute(found))
        named = "select name from runs where name like 'dp, pipedream, 20__-__-__ __:__'"
        assert len(store.execute(named).fetchall()) == 1, "what is compared, and when"
    shared = {"dp 4, seed 0": 1.0, "dp 4, seed 1": 1.0, "quickstart-dp, seeds 0, 1": 1.0}
    assert speed_ups.items() >= shared.items()
    others = {name: value for name, value in speed_ups.items() if name not in shared}
    rows = {f"pipedream straight, seed {seed}" for seed in (0, 1)} | {"quickstart-pipedream, seeds 0, 1"}
    assert others.keys() == rows
    assert len({*others.values()}) == 1 < others.popitem()[1]


def test_seeds_that_ended_before_one_that_failed_are_in_the_comparison(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(request: RunRequest, tracking: Tracking) -> Run:
        if request.name.endswith("seed1"):
            raise WorkersFailedError(3)
        return run_simulated(request, tracking)

    monkeypatch.setitem(RUNS, "simulated", run)
    given = ("quickstart/dp", "quickstart/model", "engine.kind=simulated", "name=failing-${parallelism.mode}")
    assert invoke("run", *given, "--seeds", "0,1").exit_code == 3
    with closing(sqlite3.connect(folder / "mlflow.db")) as store:
        parents = "name like 'dp, model, 20%' or name like 'failing-dp, seeds%'"
        found = store.execute(f"select name, artifact_uri from runs where {parents}")
        pages = {name.split(",")[0]: Path(uri.removeprefix("file:")) for name, uri in found}
    assert pages.keys() == {"dp", "failing-dp"}
    for page in pages.values():
        assert "simulated" in (page / "comparison.md").read_text()


def test_a_sweep_is_one_comparison_with_a_child_per_element(folder: Path) -> None:
    result = run("quickstart/pipedream", *SHORT, "parallelism.plan=straight", "parallelism.depth=2,4")
    assert result.exit_code == 1, result.output
    comparison = result.output[result.output.rindex("time to accuracy") :].splitlines()
    assert [line.split()[:2] for line in comparison if "missed" in line] == [
        ["depth=2", "straight"],
        ["depth=4", "straight"],
    ]
    with closing(sqlite3.connect(folder / "mlflow.db")) as store:
        rows = dict(store.execute("select name, run_uuid from runs"))
        of_run = "select value from {} where run_uuid = ? and key = ?"
        parents = set()
        for depth in (2, 4):
            child = rows[f"pipedream straight, depth={depth}, seed 0"]
            assert store.execute(of_run.format("params"), (child, "parallelism.depth")).fetchone() == (str(depth),)
            parents.add(store.execute(of_run.format("tags"), (child, "mlflow.parentRunId")).fetchone()[0])
            (resolved,) = folder.rglob(f"{child}/artifacts/recipe.yaml")
            assert f"depth: {depth}\n" in resolved.read_text(), "the run's own recipe holds its element"
        (parent,) = parents
        (note,) = store.execute(of_run.format("tags"), (parent, "mlflow.note.content")).fetchone()
    assert "| depth=2 | straight |" in note
    assert "![top1.png](get-artifact?path=top1.png" in note


def test_only_the_comparison_of_many_simulated_runs_has_pictures(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_MOST_DRAWN", 1)
    result = run("quickstart/dp", "cluster.servers=1,2", "engine.kind=simulated", "name=undrawn")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("2 simulated runs: of so many none has pictures")
    recipes = [path for path in folder.rglob("artifacts/recipe.yaml") if "name: undrawn" in path.read_text()]
    assert len(recipes) == 2
    for recipe in recipes:
        artifacts = {path.name for path in recipe.parent.iterdir()}
        assert artifacts >= {"about.html", "plan.json", "result.json"}
        assert not [name for name in artifacts if name.endswith(".png") or name == "trace.json"]
    monkeypatch.setattr(runner, "_MOST_DRAWN", 2)
    assert "simulated runs:" not in run("quickstart/dp", "cluster.servers=1,2", "engine.kind=simulated").stdout


def test_seeds_of_a_sweep_are_a_row_per_element() -> None:
    result = run("quickstart/dp", "cluster.servers=1,2", "engine.kind=simulated", "--seeds", "0,1")
    assert result.exit_code == 0, result.output
    assert "4 of 4  quickstart-dp-servers=2-seed1" in result.output
    assert "efficiency" in result.output


@pytest.mark.slow
def test_runs_whose_slices_are_chosen_are_recorded_with_their_devices(folder: Path) -> None:
    """0.2.0: a traceback at the end of such a run, `int("auto")`."""
    text = {
        "name": "chosen",
        "model": {"name": "gpt2", "num_layers": 1, "width": 256, "num_heads": 4, "vocabulary": 10_000},
        "dataset": {"name": "synthetic_text", "columns": 17, "vocabulary": 10_000},
        "train": {"minibatch_size": 1, "optimizer": {"lr": 0.1}, "max_epochs": 1},
        "cluster": {"name": "cluster-b", "servers": 1, "count": 4, "memory": "18 MB"},  # too little for one
        "parallelism": {"mode": "auto", "tensor": "auto"},
        "engine": {"kind": "simulated"},
    }
    path = folder / "chosen.yaml"
    path.write_text(json.dumps(text))
    result = run(str(path), "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["metrics"]["num_devices"] == 4
    assert found["metrics"]["num_workers"] < 4
