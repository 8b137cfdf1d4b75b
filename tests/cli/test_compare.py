"""`pipebench compare` on runs in a real store and on records that aren't in MLflow."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import pipebench
from pipebench.cli.main import cli
from pipebench.cli.outputs import is_picture_by
from pipebench.show import figures
from pipebench.show.differences import labelled
from pipebench.tracking.record import LogEntry, RecordFolder, Start
from pipebench.tracking.results import Recorded
from pipebench.tracking.run_log import RunLog, Tracking
from pipebench.train.result import INTERRUPTED, Point, RunResult
from tests.results import DP, PIPEDREAM

RECIPE = {"name": "quickstart-dp", "train.seed": "0", "train.optimizer.lr": "0.08", "parallelism.mode": "dp"}
POINTS = tuple(Point(4000 * i, 1.5 * i, {"train_loss": 2.0 / i, "top1": 0.3 * i}) for i in (1, 2, 3))


def result(of: RunResult, changes: Mapping[str, str], seed: int = 0) -> RunResult:
    recipe = {**RECIPE, "name": of.name, "train.seed": str(seed), **changes}
    return replace(of, seed=seed, recipe=recipe, points=POINTS)


DP_RUN = result(DP, {})
PIPEDREAM_RUN = result(PIPEDREAM, {"train.optimizer.lr": "0.02", "parallelism.mode": "pipedream"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


@pytest.fixture(autouse=True)
def _in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture(scope="module")
def runs(folder: Path) -> list[RunLog]:
    """Three runs in MLflow, two of one recipe, one that is only on the disk, and one that still runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        tracking = Tracking("suite")
        logs = []
        for name, each in (("dp 4", DP_RUN), ("pipedream", PIPEDREAM_RUN), ("dp 4, seed 1", result(DP, {}, seed=1))):
            tags = {"kind": "run", "called": f"printed-{name.replace(' ', '-')}"}
            log = tracking.start(name, params={"name": each.name}, tags=tags)
            log.finish(each)
            logs.append(log)
        goes_on = tracking.start("goes on", params={"name": "unfinished"}, tags={"kind": "run"})
        assert goes_on.wait_for_id()
        parent = tracking.start("dp, pipedream", params={}, tags={"kind": "comparison"})
        parent.finish(None, status="FINISHED")
    record = RecordFolder(folder / "pipebench-runs" / "gpipe-0a1b2c3d" / "record")
    record.append(LogEntry(start=Start("gpipe straight", virtual=True), params={"name": "gpipe"}))
    record.append(
        LogEntry(result=result(replace(PIPEDREAM, name="gpipe", mode="gpipe"), {"parallelism.mode": "gpipe"}))
    )
    return logs


def compare(*words: str) -> Result:
    return CliRunner().invoke(cli, ["compare", *words])


def test_runs_are_compared_with_their_recipes_differences(folder: Path, runs: list[RunLog]) -> None:
    (folder / "out").mkdir()
    done = compare("printed-dp-4", "quickstart-pipedream", "gpipe-0a", "--out", "out")
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.output.splitlines()]
    assert ["key", "quickstart-dp", "quickstart-pipedream", "gpipe"] in lines
    assert ["train.optimizer.lr", "0.08", "0.02", "0.08"] in lines
    assert ["parallelism.mode", "dp", "pipedream", "gpipe"] in lines
    assert not [line for line in lines if line[:1] in (["name"], ["train.seed"])], "what is the same, or only a name"
    (row,) = [line for line in lines if line[:2] == ["quickstart-pipedream", "straight"]]
    assert row[4:7] == ["2.00", "s", "3.00x"]
    page = (folder / "out" / "comparison.md").read_text()
    assert "| train.optimizer.lr | 0.08 | 0.02 | 0.08 |" in page
    assert "![curves](curves.png)" in page
    assert is_picture_by(figures.MADE_BY, folder / "out" / "curves.png")
    assert compare(str(runs[0].run_id), "quickstart-pipedream", "--out", "out").exit_code == 0, (
        "its own may be replaced"
    )


@pytest.mark.usefixtures("runs")
def test_other_files_are_not_overwritten(folder: Path) -> None:
    (folder / "mine").mkdir()
    (folder / "mine" / "comparison.md").write_text("mine")
    done = compare("dp 4", "pipedream", "--out", "mine")
    assert done.exit_code == 2
    assert (
        "--out: mine/comparison.md is there and isn't a page of `pipebench compare`, so it is left alone" in done.output
    )
    assert (folder / "mine" / "comparison.md").read_text() == "mine"
    assert "--out: got none/comparison.md, but there is no folder none" in compare("a", "b", "--out", "none").output


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("dp 4", "pipdream"), r"run: got 'pipdream', allowed are ids, .*\(dp 4\).*; did you mean 'pipedream'\?"),
        (("quickstart-dp", "pipedream"), r"got 'quickstart-dp', which matches 2 runs: .*\(dp 4, seed 1\), .*\(dp 4\)"),
        (("pipedream", "quickstart-pipedream"), r"'quickstart-pipedream' and 'pipedream' are the same run, "),
        (("pipedream", "goes on"), r"\(goes on\) has no result: it is running, or ended without one"),
        (("pipedream", ""), r"got '', allowed are ids"),
        (("dp, pipedream", "pipedream"), r"comparison: \w{8} \(dp, pipedream\) has no run with a result"),
        (("pipedream",), r"comparison: got a run, \w{8} \(pipedream\); allowed are a comparison, or at least two runs"),
    ],
)  # fmt: skip
def test_runs_that_cannot_be_compared_are_one_sentence(words: tuple[str, ...], sentence: str) -> None:
    done = compare(*words)
    assert done.exit_code == 2
    (line,) = [line for line in done.output.splitlines() if "rror: " in line]
    assert re.search(sentence, line), line


def test_a_folder_without_runs_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = compare("a", "b")
    assert done.exit_code == 2
    assert f"run: got 'a', but no run is recorded at sqlite:///{tmp_path}/mlflow.db or in the working" in done.output
    assert not any(tmp_path.iterdir())


def test_seeds_of_a_recipe_are_one_row_and_other_runs_have_unique_names() -> None:
    def named(*results: RunResult) -> list[str]:
        ids = [f"{index:08x}{'f' * 24}" for index in range(len(results))]
        return [each.name for each in labelled([Recorded(i, "1", r, 0, "") for i, r in zip(ids, results, strict=True)])]

    second = result(DP, {}, seed=1)
    assert named(DP_RUN, second, PIPEDREAM_RUN) == ["quickstart-dp", "quickstart-dp", "quickstart-pipedream"]
    slower = result(DP, {"train.optimizer.lr": "0.01"})
    assert named(DP_RUN, slower) == ["quickstart-dp 00000000", "quickstart-dp 00000001"]
    assert named(DP_RUN, DP_RUN) == ["quickstart-dp 00000000", "quickstart-dp 00000001"], "measured twice"
    swept = [replace(result(DP, {}, seed=seed), name=f"seed={seed}") for seed in (0, 1)]
    assert named(*swept) == ["seed=0", "seed=1"], "of a sweep over train.seed, where all but the first had an id, too"


def test_a_sweep_and_the_rest_of_it_are_one_table(folder: Path, runs: list[RunLog]) -> None:
    """An interrupted sweep could be compared by naming each of its runs only."""
    tracking = Tracking("suite")
    began, ends = result(DP, {"model.width": "2"}), result(DP, {"model.width": "2"}, seed=1)
    parents = []
    for name, made in (("first half", (began, replace(ends, outcome=INTERRUPTED))), ("second half", (ends,))):
        parent = tracking.start(name, params={}, tags={"kind": "comparison"}, virtual=False)
        for each in made:
            log = tracking.start("dp", params={"name": each.name}, tags={"kind": "run"}, parent=parent)
            log.finish(each)
        parent.finish(None, status="FINISHED")
        parents.append(str(parent.run_id))
    alone = compare(parents[1])
    assert "The recipes are the same" not in alone.output, "it has one run"
    found = pipebench.recorded(*parents)
    assert [(run.result.name, run.result.seed) for run in found.runs] == [(DP.name, 0), (DP.name, 1)]
    (row,) = found.rows()
    assert (row["num_reached"], row["num_targeted"]) == (2, 2)
    assert len(pipebench.recorded(*parents, str(runs[1].run_id), str(log.run_id)).runs) == 3


def test_past_runs_are_listed_and_a_comparison_is_shown_by_its_id(folder: Path, runs: list[RunLog]) -> None:
    tracking = Tracking("suite")
    parent = tracking.start("both, by day", params={}, tags={"kind": "comparison"}, virtual=False)
    group = tracking.start("dp, seeds", params={}, tags={"kind": "seeds"}, parent=parent, virtual=False)
    for name, each, above in (("dp again", DP_RUN, group), ("pipedream again", PIPEDREAM_RUN, parent)):
        tracking.start(name, params={"name": each.name}, tags={"kind": "run"}, parent=above).finish(each)
    for log in (group, parent):
        log.finish(None, status="FINISHED")
    tracking.start("n" * 60, params={"name": "r" * 60}, tags={"kind": "run"}).finish(DP_RUN)
    listed = CliRunner().invoke(cli, ["runs"])
    assert listed.exit_code == 0, listed.output
    headings = [line.split()[0] for line in listed.output.splitlines() if "began" in line]
    assert headings == ["id"], "a line a run, for grep"
    assert "gpipe-0a1b2c3d" in listed.output, "MLflow hasn't taken it"
    rows = [line.split() for line in CliRunner().invoke(cli, ["runs", "by day"]).output.splitlines() if "again" in line]
    assert [(" ".join(row[3:5]), *row[5:7]) for row in rows] == [
        ("dp again", "quickstart-dp", "reached"),
        ("pipedream again", "quickstart-pipedream", "reached"),
    ]
    of_recipe = CliRunner().invoke(cli, ["runs", "quickstart-pipedream"]).output
    assert "pipedream again" in of_recipe, "found by its recipe's name"
    assert "gpipe-0a1b2c3d" not in of_recipe
    Path("out").mkdir(exist_ok=True)
    assert len(pipebench.recorded(str(parent.run_id)[:10]).runs) == 2
    shown = compare(str(parent.run_id)[:10], "--out", "out")
    assert shown.exit_code == 0, shown.output
    assert "quickstart-pipedream is first to" in shown.output or "pipedream is first to" in shown.output
    assert "no run is recorded with 'zebra'" in CliRunner().invoke(cli, ["runs", "zebra"]).output
    wrong = compare("both, by dey")
    assert wrong.exit_code == 2
    assert "comparison: got 'both, by dey', allowed are ids" in wrong.output
    assert "did you mean 'both, by day'?" in wrong.output
