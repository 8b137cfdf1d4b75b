"""Curves by TensorBoard and Weights & Biases, read back by their own readers where they are installed."""

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipebench.cli.main import cli
from pipebench.errors import RecipeError
from pipebench.recipe import preflight as preflight_module
from pipebench.recipe.load import load
from pipebench.recipe.preflight import preflight
from pipebench.tracking import writers
from pipebench.tracking.identity import recipe_hash
from pipebench.tracking.writers import RunDescription, Writers
from tests.recipes import uniform_recipe
from tests.tracking.records import RESULT

RUN = RunDescription(
    "small/gnmt8", "pipedream straight, seed 0", "pipedream 2026-11-22 15.31", {"train.seed": "0"}, True
)


def written(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one writer write the curves and the result of a run."""
    monkeypatch.chdir(folder)
    found = Writers(["mlflow", name], RUN)
    for point in RESULT.points:
        found.point(point)
    found.finish(replace(RESULT, clock="wall"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_back_curves_and_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    written("tensorboard", tmp_path, monkeypatch)
    assert capsys.readouterr().err == ""
    (folder,) = (tmp_path / "tensorboard" / "small" / "gnmt8").iterdir()
    events = accumulators.EventAccumulator(str(folder)).Reload()
    curve = events.Scalars("curves/top1")
    assert [(each.step, each.value) for each in curve] == [
        (point.samples, pytest.approx(point.metrics["top1"])) for point in RESULT.points
    ]
    assert [each.value for each in events.Scalars("curves/virtual_time_s")] == [1.5, 3.0, 4.5, 6.0]
    assert [each.value for each in events.Scalars("wall_time_to_accuracy_s")] == [4.5]
    assert events.PluginTagToContent("hparams")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_gets_the_curves_of_a_run_with_printed_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only those whose progress was printed had curves there."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    Path("small.yaml").write_text(uniform_recipe(8, 2000, 250, minibatch_size=250))
    words = ["run", "small.yaml", "train.max_epochs=1", "tracking=[mlflow,tensorboard]", "--json-lines"]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.output
    (folder,) = (tmp_path / "tensorboard").glob("*/*")
    assert len(accumulators.EventAccumulator(str(folder)).Reload().Scalars("curves/eval_loss")) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_resumed_run_has_one_folder_and_each_point_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its second process had a folder of its own, with the points of the first one again."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    Path("small.yaml").write_text(uniform_recipe(4, 200, 50, minibatch_size=50))
    for words in (["small.yaml", "tracking=[mlflow,tensorboard]"], ["--resume", "small", "train.max_epochs=3"]):
        done = CliRunner().invoke(cli, ["run", *words])
        assert done.exit_code == 0, done.output
    (folder,) = (tmp_path / "tensorboard").glob("*/*")
    files = sorted(folder.glob("events*"), key=lambda file: file.stat().st_mtime_ns)
    steps = [
        [each.step for each in found.Scalars("curves/eval_loss")]
        for found in (accumulators.EventAccumulator(str(file)).Reload() for file in files)
        if "curves/eval_loss" in found.Tags()["scalars"]
    ]
    assert steps == [[200], [400, 600]]
    (record,) = tmp_path.glob("pipebench-runs/*/record/record.jsonl")
    assert record.read_text().count('"point": {') == 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_hides_abandoned_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.chdir(tmp_path)
    first, second = Writers(["tensorboard"], RUN), Writers(["tensorboard"], RUN._replace(samples_done=2000))
    for point in RESULT.points:
        first.point(point)  # and is killed
    second.point(replace(RESULT.points[2], metrics={"top1": 0.25}))
    (folder,) = (tmp_path / "tensorboard").glob("*/*/*")
    curve = accumulators.EventAccumulator(str(folder)).Reload().Scalars("curves/top1")
    assert [(each.step, each.value) for each in curve] == [(1000, 0.5), (2000, pytest.approx(0.8)), (3000, 0.25)]
    for each in (first, second):
        each.finish(None)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_wandb_keeps_a_run_on_disk_and_sends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    written("wandb", tmp_path, monkeypatch)
    assert "failed" not in capsys.readouterr().err
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    content = file.read_bytes()
    assert all(word in content for word in (b"curves/top1", b"wall_time_to_accuracy_s", b"train.seed"))


class Failing:
    def __init__(self, run: RunDescription) -> None:
        self.written = 0

    def values(self, values: object, samples: int) -> None:
        raise OSError("disk full")

    def finish(self, result: object) -> None:
        raise AssertionError("it failed before")


def test_a_writer_that_fails_is_reported_once_and_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(writers._KINDS, "tensorboard", Failing)
    found = Writers(["mlflow", "tensorboard"], RUN)
    for point in RESULT.points:
        found.point(point)
    found.finish(RESULT)
    message = "pipebench: tensorboard failed (disk full); MLflow has the run, which goes on\n"
    assert capsys.readouterr().err == message


def test_a_missing_package_is_reported_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight_module, "find_spec", lambda name: None if name == "tensorboard" else name)
    loaded = load("quickstart", ["tracking=[mlflow,tensorboard]"])
    preflight(loaded, trains=False)  # a plan records nothing
    sentence = r"tracking: got tensorboard, which needs the package tensorboard: pip install tensorboard"
    with pytest.raises(RecipeError, match=sentence):
        preflight(loaded)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("[mlflow,tensorbord]", "tracking: got 'tensorbord', allowed are .*; did you mean 'tensorboard'"),
        ("[tensorboard]", r"tracking: got \['tensorboard'\], mlflow has to be among them: .* read runs from it"),
        ("tensorboard", "tracking: "),
    ],
)
def test_a_wrong_list_is_refused(given: str, sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence):
        load("quickstart", [f"tracking={given}"])


def test_writers_do_not_change_a_recipe_s_hash() -> None:
    plain, more = load("quickstart"), load("quickstart", ["tracking=[mlflow,wandb]"])
    assert recipe_hash(plain) == recipe_hash(more)
