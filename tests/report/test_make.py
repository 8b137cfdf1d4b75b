"""Making a report from its file to its page: known results are reused, and an interrupted report resumes."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from matplotlib.figure import Figure

from pipebench.cli.main import cli
from pipebench.recipe.catalog import find_cluster
from pipebench.report import catalog, collect, plots
from pipebench.report.recipes import ReportRun
from pipebench.show import progress
from pipebench.tracking.results import find_runs
from tests.patience import without_phases
from tests.report.conftest import RECIPE, Write, changed
from tests.report.pages import MADE, lines_of
from tests.shortcuts import evaluate_few_digits
from tests.show.test_lasting import Elapsed

ROOT = Path(__file__).parents[2]
Make = Callable[..., tuple[int, str]]


def save_nothing(figure: Figure, path: Path) -> None:
    """Write a stand-in for a figure: `test_plots.py` and `test_rendered.py` test real ones."""
    for kind in ("png", "svg"):
        path.with_name(f"{path.name}.{kind}").touch()


@pytest.fixture
def make(write: Write, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Make:
    """Return a function that makes a report as the command line does; gives exit code and output."""
    write()
    monkeypatch.setenv("COLUMNS", "200")
    evaluate_few_digits(monkeypatch, 200)
    monkeypatch.setattr(plots, "_save", save_nothing)

    def make_report(*words: str) -> tuple[int, str]:
        code = cli.main(["report", *words], standalone_mode=False)
        captured = capfd.readouterr()
        return code, captured.out + captured.err

    return make_report


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets row, run and column of everything that runs."""
    names: list[str] = []
    run_one = collect.run_one

    def noting(asked: ReportRun, *others: object) -> collect.RecipeOutcome:
        names.append(f"{asked.row} {asked.run} {asked.column}")
        return run_one(asked, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(collect, "run_one", noting)
    return names


def test_known_results_are_not_run_again(make: Make, ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = make("small.yaml", "--only", "first")
    assert code == 0, said
    assert "4 runs: 4 to run (about" in said
    assert ran == ["first dp ideal", "first dp slow", "first straight ideal", "first straight slow"]
    page = Path("rendered/small/report.md").read_text()
    assert page.startswith("`pipebench report small.yaml --only first`")
    (recorded,) = find_runs(["first straight, slow: pipedream straight, seed 0"], [])
    assert recorded.result.plan == "straight"

    with monkeypatch.context() as patch:
        patch.setattr(progress, "Timer", Elapsed)
        code, said = make("small.yaml", "--only", "first")
    assert code == 0
    assert "4 runs: 4 recorded in MLflow with this version, nothing to run" in said
    assert len(ran) == 4
    for phase in ("small.yaml  loading recipes", "small  looking up results", "small  drawing pictures and writing"):
        assert phase in said
    assert lines_of(Path("rendered/small/report.md").read_text()) == lines_of(page)

    del ran[:]
    assert make("small.yaml", "--only", "first", "--fresh")[0] == 0
    assert len(ran) == 4

    del ran[:]
    Path("dp.yaml").write_text(RECIPE.replace("mode: dp", "mode: dp-asp"))
    assert "2 recorded in MLflow with this version, 2 to run" in make("small.yaml", "--only", "first")[1]
    assert ran == ["first dp ideal", "first dp slow"]

    del ran[:]
    monkeypatch.setattr(collect, "source_version", lambda: "0.1.0+other")
    assert "0 of 12 results" in make("--list", "small.yaml")[1]


def test_runs_that_are_the_same_recipe_are_one(make: Make, write: Write, ran: list[str]) -> None:
    twin = {"name": "twin", "runs": {"dp": "dp.yaml train.minibatch_size=32", "straight": "straight.yaml name=other"}}
    rows = [changed()["rows"][0], twin]
    write(changed(rows=rows, pictures=None))
    code, said = make("small.yaml")
    assert code == 0, said
    assert len(ran) == 4
    assert "| twin |" in Path("rendered/small/report.md").read_text()


def test_an_interrupted_report_is_resumed(make: Make, ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    noting = collect.run_one

    def interrupted(*given: object) -> collect.RecipeOutcome:
        if len(ran) == 2:
            raise KeyboardInterrupt
        return noting(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(collect, "run_one", interrupted)
    code, said = make("small.yaml", "--only", "first")
    assert code == 130
    assert "2 of 4 runs are done and recorded; the same command goes on" in said
    assert not Path("rendered").exists()
    monkeypatch.setattr(collect, "run_one", noting)
    code, said = make("small.yaml", "--only", "first")
    assert code == 0
    assert "2 recorded in MLflow with this version, 2 to run" in said
    assert ran == ["first dp ideal", "first dp slow", "first straight ideal", "first straight slow"]


def test_pages_are_written_below_the_working_directory(make: Make) -> None:
    """They were beside the report's file: in an installed package, or over a checkout's own pages."""
    files = [path for path in Path().iterdir() if path.is_file()]
    Path("mine").mkdir()
    for path in files:
        path.rename(Path("mine", path.name))
    code, said = make("mine/small.yaml", "--only", "first")
    assert code == 0, said
    assert "written: rendered/small/report.md\n" in said
    assert Path("rendered/small/report.md").is_file()
    assert not Path("mine/rendered").exists()


def test_nothing_is_written_into_the_checkout_from_elsewhere(make: Make) -> None:
    shipped = catalog.find_report("quickstart")
    before = {path: path.stat().st_mtime_ns for path in shipped.parent.rglob("*")}
    code, said = make("quickstart", "--keep")
    assert code == 2
    assert "only a command that runs there writes to" in said
    assert {path: path.stat().st_mtime_ns for path in shipped.parent.rglob("*")} == before


def test_nothing_is_stored_inside_the_installed_package(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = Path("site-packages/pipebench")
    installed.mkdir(parents=True)
    Path("small.yaml").rename(installed / "small.yaml")
    monkeypatch.setattr("pipebench.__file__", str(installed / "__init__.py"))
    code, said = make(str(installed / "small.yaml"), "--keep")
    assert code == 2
    assert "--keep: site-packages/pipebench/small.yaml is a part of the installed package" in said


@pytest.mark.parametrize("folder", ["small.yaml", "small.yaml/below"])
def test_a_read_only_folder_is_reported_before_anything_runs(make: Make, ran: list[str], folder: str) -> None:
    code, said = make("small.yaml", "--out", folder)
    assert (code, ran) == (2, [])
    there = Path("small.yaml").absolute()
    assert f"{folder}: needed is a folder that can be written to, but {there} is a file; --out names another" in said


@pytest.mark.slow
def test_a_killed_report_is_resumed(make: Make, ran: list[str]) -> None:
    killed = """\
import os, signal
from pipebench.recipe.catalog import find_cluster
from pipebench.report import catalog, collect
run_one, done = collect.run_one, []
def killed(*given):
    if len(done) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    done.append(run_one(*given))
    return done[-1]
collect.run_one = killed
from pipebench.cli.main import cli
cli(["report", "small.yaml", "--only", "first"])
"""
    found = subprocess.run([sys.executable, "-c", killed], env={"PYTHONPATH": str(ROOT), "HOME": str(Path.cwd())})
    assert found.returncode == -9
    code, said = make("small.yaml", "--only", "first")
    assert code == 0
    assert "3 recorded in MLflow with this version, 1 to run" in said
    assert ran == ["first straight slow"]


HOW = "## How every cell was obtained"
TRAINED = """\
title: Trained
columns:
  a: {}
  b: {clusters: {cluster-a: cluster-c}, set: [cluster.servers=4]}
measures:
  epochs: {unit: none, value: dp.epochs_to_target}
  speedup: {unit: x, value: dp.epoch_time_s / straight.epoch_time_s}
rows:
  - name: one
    runs:
      dp:
        recipe: dp.yaml model.width=0.03125 dataset.num_train=1000 train.minibatch_size=500
        engine: virtual
        seeds: [0, 1]
        columns: same
      straight: straight.yaml
"""


@pytest.mark.slow
def test_trained_results_are_stored_for_other_checkouts(
    make: Make, write: Write, ran: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write(TRAINED)
    code, said = make("small.yaml", "--keep")
    assert code == 0, said
    assert "4 runs: 4 to run (about 3.00 s and 2 trainings)" in said
    assert "kept: 2 results of runs that trained, in kept/" in said
    kept = [yaml.safe_load(path.read_text()) for path in Path("kept").iterdir()]
    assert sorted(each["result"]["seed"] for each in kept) == [0, 1]
    page = Path("rendered/small/report.md").read_text()

    # Elsewhere, with other code, where simulations have to run and recipes may have learnt new keys.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/other.db")
    monkeypatch.setattr(collect, "source_version", lambda: "0.2.0+other")
    for path in Path("kept").iterdir():
        assert '"parallelism.recompute": "null",' in path.read_text()
        path.write_text(path.read_text().replace('"parallelism.recompute": "null",', ""))
    del ran[:]
    code, said = make("small.yaml")
    assert code == 0
    assert "4 runs: 2 kept beside the report, 2 to run" in said
    assert ran == ["one straight a", "one straight b"]
    again = Path("rendered/small/report.md").read_text()
    before, after = (
        [line for line in text.splitlines() if line and "virtual" not in line and not line.startswith(MADE)]
        for text in (page.split(HOW)[0], again.split(HOW)[0])  # below it is what trained a kept result
    )
    assert [line for line in after if "kept" not in line] == before

    # A third seed isn't trained: it is left out, and the page says so.
    Path("small.yaml").write_text(Path("small.yaml").read_text().replace("seeds: [0, 1]", "seeds: [0, 1, 2]"))
    code, said = make("small.yaml", "--no-training")
    assert code == 0
    assert "2 kept beside the report, 2 to run (about 3.00 s)" in said
    page = Path("rendered/small/report.md").read_text()
    assert "dp: 2 of 3 seeds are trained" in page
    assert "| 0, 1 of 3 |" in page
    assert "Trained with:\n\n1. tree " in page
    for path in Path("kept").iterdir():
        path.write_text(re.sub(r'"made": \{[^}]*\}', '"made": {}', path.read_text()))
    make("small.yaml", "--no-training")
    assert "trained by an earlier release, which named no tree" in Path("rendered/small/report.md").read_text()

    Path("dp.yaml").write_text(RECIPE.replace("lr: 0.02", "lr: 0.03"))  # what is kept answers another recipe
    assert "0 of 5 results" in make("--list", "small.yaml")[1]
    assert "5 runs: 2 to run" in make("small.yaml", "--no-training")[1]
    assert "not trained" in Path("rendered/small/report.md").read_text()


def test_a_run_that_does_not_fit_is_a_problem_of_its_cells(make: Make, write: Write) -> None:
    rows = [changed()["rows"][0]]
    rows[0]["runs"]["straight"] = "straight.yaml parallelism.cuts=[nowhere,never,not]"
    write(changed(rows=rows, pictures=None, columns={"ideal": {}}, calibration=None))
    code, said = make("small.yaml")
    assert code == 0
    assert "no value: first, speedup, ideal: " in said
    assert "nowhere" in said


def test_files_of_runs_are_checked_before_anything_runs(make: Make, write: Write, ran: list[str]) -> None:
    rows = [changed()["rows"][0]]
    data = "dataset='{name: imagenet, root: nowhere}' model.in_channels=3 model.num_classes=1000"
    rows[0]["runs"]["dp"] = {"recipe": f"dp.yaml {data}", "engine": "virtual"}
    write(changed(rows=rows, pictures=None))
    code, said = make("small.yaml")
    assert code == 2
    assert "nowhere" in said
    assert ran == []


def test_a_schedule_is_drawn_as_text(make: Make, write: Write) -> None:
    pictures = [{"kind": "schedule", "run": "straight", "row": "first"}]
    write(changed(rows=[changed()["rows"][0]], pictures=pictures))
    assert make("small.yaml")[0] == 0
    assert "pipedream, plan straight, one column" in Path("rendered/small/report.md").read_text()


def test_pictures_that_the_page_no_longer_shows_are_removed(make: Make, write: Write) -> None:
    folder, (bars, lines) = Path("rendered/small"), changed()["pictures"]
    one: dict[str, Any] = {"rows": [changed()["rows"][1]], "columns": {"ideal": {}}, "calibration": None}
    us = "![Us](bars-us.png)\n\n![us](photo.png)"
    write(changed(**one, pictures=[bars, lines, {**lines, "measure": "twice"}]) | {"about": us})
    assert make("small.yaml")[0] == 0
    names = {f"{name}.{kind}" for name in ("bars-speedup", "lines-speedup", "lines-twice") for kind in ("png", "svg")}
    texts, others = (
        {"report.md", "report.html", "values.json"},
        {"bars-us.png", "photo.png", "lines-other.png", "stages.svg"},
    )
    assert {path.name for path in folder.iterdir()} == names | texts
    for name in others:
        (folder / name).touch()

    write(changed(**one, pictures=[lines]))
    code, said = make("small.yaml")
    assert code == 0
    removed = "bars-speedup.png, bars-speedup.svg, lines-twice.png, lines-twice.svg"
    assert f"removed: {removed}, which the page shows no longer\n" in said
    assert {path.name for path in folder.iterdir()} == {"lines-speedup.png", "lines-speedup.svg"} | texts | others
    assert "removed" not in make("small.yaml")[1]


@pytest.mark.slow
def test_pictures_of_another_report_stay(make: Make, write: Write) -> None:
    one: dict[str, Any] = {"rows": [changed()["rows"][1]], "columns": {"ideal": {}}, "calibration": None}
    write(changed(**one), "other file.yaml")
    write(changed(**one, pictures=None))
    assert make("other file.yaml", "--out", "both")[0] == 0
    assert "removed" not in make("small.yaml", "--out", "both")[1]
    assert Path("both/bars-speedup.png").is_file()

    assert make("other file.yaml", "--out", "both")[0] == 0
    write(changed(**one, pictures=None), "other file.yaml")
    assert "removed: bars-speedup.png" in make("other file.yaml", "--out", "both")[1]
    assert not Path("both/bars-speedup.png").is_file()


def test_reports_are_listed_with_their_existing_pages(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "reports_folder", Path.cwd)
    for name in ("dp", "straight"):  # beside the report, and none themselves
        Path(f"{name}.yaml").rename(Path.cwd().parent / f"{name}.yaml")
    Path("small.yaml").write_text(
        Path("small.yaml").read_text().replace("dp.yaml", "../dp.yaml").replace("straight.yaml", "../straight.yaml")
    )
    code, said = make("--list")
    assert code == 0
    assert without_phases(said).splitlines() == ["small    3 rows  A small table"]
    there = "3 rows, 0 of 12 results, the rest takes about 18.0 s"
    code, said = make("--list", "small")
    assert (code, without_phases(said)) == (0, f"A small table\n{there}\n")
    assert make("small", "--only", "first", "--out", "there")[0] == 0
    assert "3 rows, 4 of 12 results, the rest takes about 12.0 s" in make("--list", "small")[1]
    assert "4 recorded in MLflow" in make("small", "--only", "first", "--out", "there")[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name a report, for example"),
        (["--list", "smal.yaml"], "no such file; did you mean .small.yaml"),
        (["small.yaml", "--only", ","], "--only: got ',', allowed are names of rows or patterns"),
        (["small.yaml", "--only", "second"], "--only: got 'second', allowed are first, m8, m16, or patterns"),
        (["small.yaml", "--engine", "simulate"], "--engine: got 'simulate', allowed are .*did you mean 'simulated'"),
        (["smal.yaml"], "no such file"),
    ],
)
def test_mistakes_on_the_command_line(make: Make, words: list[str], message: str) -> None:
    code, said = make(*words)
    assert code == 2
    assert re.search(message, said), said


def test_the_largest_minibatch_that_fits_is_found_before_anything_is_looked_up(
    make: Make, write: Write, ran: list[str]
) -> None:
    """In every column on its own cluster: 8 MB hold fewer images than 12 MB do."""
    text = Path(find_cluster("cluster-a")).read_text()
    for size in (8, 12):
        Path(f"has-{size}.yaml").write_text(text.replace("value: 16 GB", f"value: {size} MB"))
    run = {"recipe": "dp.yaml cluster.name=has-8.yaml", "minibatch": "largest"}
    rows = [{"name": "first", "runs": {"dp": run}, "published": {"size": 16}}]
    columns = {"small": {"title": "8 MB"}, "large": {"title": "12 MB", "clusters": {"has-8": "has-12.yaml"}}}
    measures = {
        "size": {"title": "minibatch", "unit": "count", "value": "dp.minibatch_size"},
        "memory": {"title": "memory", "unit": "bytes", "value": "dp.peak_memory_bytes_max"},
    }
    write(changed(rows=rows, columns=columns, measures=measures, claims=None, pictures=None, calibration=None))
    _, listed = make("small.yaml", "--list")
    assert "0 of 0 results; the largest minibatch that fits is sought first for 2 more" in listed
    code, said = make("small.yaml")
    assert code == 0, said
    sizes = [int(size) for size in re.findall(r"first, dp: (\d+) samples are the largest minibatch that fits", said)]
    page = Path("rendered/small/report.md").read_text()
    assert len(sizes) == 2
    assert 1 < sizes[0] < sizes[1]
    assert all(f"train.minibatch_size={size}" in page for size in sizes)
    assert "would not fit" not in page
    assert len(ran) == 2
    assert "2 recorded in MLflow with this version, nothing to run" in make("small.yaml")[1]


def test_a_cell_without_a_minibatch_that_fits_says_why(make: Make, write: Write) -> None:
    text = Path(find_cluster("cluster-a")).read_text()
    Path("tiny.yaml").write_text(text.replace("value: 16 GB", "value: 10 kB"))
    run = {"recipe": "straight.yaml cluster.name=tiny.yaml parallelism.plan=auto", "minibatch": "largest"}
    measures = {"memory": {"title": "memory", "unit": "bytes", "value": "dp.peak_memory_bytes_max"}}
    rows = [{"name": "first", "runs": {"dp": run}}]
    write(changed(rows=rows, measures=measures, columns=None, claims=None, pictures=None, calibration=None))
    code, said = make("small.yaml")
    assert code == 0, said
    assert "no value: first, memory, reproduced: no plan of mode pipedream fits" in said
