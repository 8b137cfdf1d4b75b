"""Runs that are resumed: from a copy of their folder, in another mode, after an edit of their code."""

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pipebench.cli.main import cli
from pipebench.run.folder import RunFolder
from tests.patience import without_phases

RECIPE = """\
name: small
model: {target: "MODULE:net"}
dataset: {name: mnist5k, image_size: 28}
train:
  minibatch_size: 500
  optimizer: {name: sgd, lr: 0.1, momentum: 0.9}
  target: null
  max_epochs: 1
  checkpoint_every: {minibatches: 4}
cluster: {name: cluster-a}
parallelism: {mode: gpipe, plan: 1-1}
engine: {kind: virtual, device: cpu}
"""
MODULE = """\
from torch import nn
import MODULE_parts

def net():
    return nn.Sequential(nn.Flatten(), MODULE_parts.shape(nn.Linear(784, 8)), nn.Linear(8, 10))
"""
PARTS = """\
from torch import nn

def shape(layer):
    return nn.Sequential(layer, nn.Tanh())
"""


@pytest.fixture
def run_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> RunFolder:
    """A run of a model of its user's own, in a working directory of its own; modules stay imported, so names differ."""
    name = f"own_{request.node.name}"
    folder = tmp_path / "project"
    (folder / "code").mkdir(parents=True)
    (folder / "code" / "small.yaml").write_text(RECIPE.replace("MODULE", name))
    (folder / "code" / f"{name}.py").write_text(MODULE.replace("MODULE", name))
    (folder / "code" / f"{name}_parts.py").write_text(PARTS)
    monkeypatch.chdir(folder)
    done = CliRunner().invoke(cli, ["run", "code/small.yaml"])
    assert done.exit_code == 0, done.output
    (path,) = (folder / "pipebench-runs").iterdir()
    return RunFolder(path)


def resume(folder: RunFolder, *words: str) -> Result:
    return CliRunner().invoke(cli, ["run", "--resume", folder.run_id, "train.max_epochs=2", *words])


def test_a_copy_of_a_project_resumes_with_its_own_code(
    run_of: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.1.0 kept the folders of the code as absolute paths: a copy ran the original's."""
    shutil.copytree(tmp_path / "project", tmp_path / "copy")
    copy = RunFolder(tmp_path / "copy" / "pipebench-runs" / run_of.run_id)
    monkeypatch.chdir(tmp_path / "copy")
    folders = copy.recipe().folders
    assert tmp_path / "copy" / "code" == folders[0]
    assert not any(each.is_relative_to(tmp_path / "project") for each in folders)
    monkeypatch.chdir(tmp_path / "project")
    assert run_of.recipe().folders[0] == tmp_path / "project" / "code"


def test_code_outside_the_working_directory_is_found_where_it_was(
    run_of: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    answer = CliRunner().invoke(cli, ["run", "../project/code/small.yaml"])
    assert answer.exit_code == 0, answer.output
    (path,) = (tmp_path / "other" / "pipebench-runs").iterdir()
    assert RunFolder(path).read().code_folders[0] == str(tmp_path / "project" / "code")


def test_default_microbatches_do_not_prevent_resuming_in_another_mode(run_of: RunFolder) -> None:
    """0.1.0 stored the default that it had filled in, and refused it in a mode without microbatches."""
    assert "microbatches:" not in run_of.recipe_path.read_text()
    assert run_of.recipe().recipe.parallelism.microbatches == 2
    answer = resume(run_of, "parallelism.mode=dp", "parallelism.plan=2")
    assert answer.exit_code == 0, answer.output
    executed, goes_on = without_phases(answer.stderr).splitlines()
    assert ": executes " in executed
    assert goes_on == f"pipebench: {run_of.run_id} goes on from minibatch 8"


def test_a_run_resumes_in_another_precision(run_of: RunFolder) -> None:
    """It was refused as another run's wherever inputs aren't ids: their rounding was taken for other data."""
    again = resume(run_of, "train.precision=bf16")
    assert again.exit_code == 0, again.stderr
    assert f"{run_of.run_id} goes on from minibatch 8" in again.stderr


def test_changed_code_is_reported_and_the_run_resumes(run_of: RunFolder, tmp_path: Path) -> None:
    """The shapes are the same; 0.1.0 said nothing."""
    (helper,) = (tmp_path / "project" / "code").glob("*_parts.py")
    helper.write_text(PARTS.replace("Tanh", "ReLU"))
    answer = resume(run_of)
    assert answer.exit_code == 0, answer.output
    said = f"pipebench: code has changed since the checkpoint of step 8 was written: {helper.stem}"
    goes_on = f"pipebench: {run_of.run_id} goes on from minibatch "
    lines = [line for line in without_phases(answer.stderr).splitlines() if ": executes " not in line]
    assert lines == [said, f"{goes_on}8"]
    again = CliRunner().invoke(cli, ["run", "--resume", run_of.run_id, "train.max_epochs=3"])
    assert again.exit_code == 0
    lines = [line for line in without_phases(again.stderr).splitlines() if ": executes " not in line]
    assert lines == [f"{goes_on}16"]


def test_fewer_epochs_than_were_trained_are_refused_and_the_record_stays(run_of: RunFolder) -> None:
    assert resume(run_of).exit_code == 0
    before = {path: path.read_bytes() for path in run_of.path.rglob("*") if path.is_file()}
    answer = CliRunner().invoke(cli, ["run", "--resume", run_of.run_id, "train.max_epochs=1"])
    assert answer.exit_code == 2
    said = f"command line: train.max_epochs: got 1, but run {run_of.run_id} has trained 2 epochs already"
    assert f"{said}; allowed is 2 or more" in answer.stderr
    assert {path: path.read_bytes() for path in run_of.path.rglob("*") if path.is_file()} == before


def test_a_finished_run_is_not_resumed_with_other_keys(run_of: RunFolder) -> None:
    """Its record would name a plan that trained nothing, with the numbers of the other one."""
    assert resume(run_of).exit_code == 0
    before = {path: path.read_bytes() for path in run_of.path.rglob("*") if path.is_file()}
    answer = resume(run_of, "parallelism.mode=dp", "parallelism.plan=4")
    assert answer.exit_code == 2
    assert f"--resume: run {run_of.run_id} has trained all it had to, 2 epochs: nothing is left" in answer.stderr
    assert {path: path.read_bytes() for path in run_of.path.rglob("*") if path.is_file()} == before
