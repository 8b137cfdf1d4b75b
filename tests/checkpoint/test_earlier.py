"""Runs of an earlier version: 0.1.0 of 22 November 2026, before extensions had their package.

Each of the folders in `of_0_1_0/` is a run of two epochs with its last checkpoint and its result.
"""

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipebench.cli.main import cli
from pipebench.run.folder import RunFolder
from pipebench.train.result import RunResult

RUNS = {path.name.partition("-")[0]: path for path in Path(__file__).parent.joinpath("of_0_1_0").iterdir()}


def run(*words: str) -> RunResult:
    """Run a command; return the result in the newest run's folder."""
    answer = CliRunner().invoke(cli, ["run", *words])
    assert answer.exit_code == 0, answer.output
    newest = max(Path("pipebench-runs").iterdir(), key=lambda path: (path / "record" / "result.json").stat().st_mtime)
    found = RunFolder(newest).result()
    assert found is not None
    return found


def test_earlier_runs_exist() -> None:
    assert RUNS.keys() == {"moved", "pushed"}


@pytest.mark.parametrize("name", RUNS)
def test_an_earlier_run_is_read_and_resumed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clock, curve, bytes and weights equal those of an uninterrupted run."""
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(shutil.copytree(RUNS[name], Path("pipebench-runs", RUNS[name].name)))
    before = folder.result()
    assert before is not None
    shutil.copy(folder.recipe_path, "recipe.yaml")
    resumed, whole = run("--resume", folder.run_id, "train.max_epochs=3"), run("recipe.yaml", "train.max_epochs=3")
    assert resumed.points[:2] == before.points
    assert len(resumed.points) == 3
    for ours, theirs in zip(resumed.points, whole.points, strict=True):
        assert ours.clock_s == pytest.approx(theirs.clock_s)
        assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-3)
    same = [metric for metric in whole.metrics if metric.startswith(("comm_bytes", "repartitions", "staleness"))]
    assert len(same) > 4
    assert {metric: resumed.metrics[metric] for metric in same} == {metric: whole.metrics[metric] for metric in same}
    assert resumed.metrics.get("repartitions") == (1 if name == "moved" else None)
