"""Recorded results are found again by recipe and code, in a SQLite store and in record folders."""

import gc
import hashlib
import shutil
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

import pipebench
from pipebench.errors import UserError
from pipebench.recipe.load import load
from pipebench.show.differences import differences
from pipebench.tracking import results
from pipebench.tracking.connection import default_uri, reason_of
from pipebench.tracking.entries import logged_params
from pipebench.tracking.identity import recipe_hash, source_version
from pipebench.tracking.record import LogEntry, RecordFolder, RunRecord, Sent, Start, read_record
from pipebench.tracking.results import RecordedRuns, find_runs, runs_of
from pipebench.tracking.run_log import RunLog, Tracking
from pipebench.tracking.summary import least_losses
from pipebench.train.result import DIVERGED, INTERRUPTED, RunResult
from tests.tracking.records import RESULT

VERSION = "0+abc"


def recorded(tracking: Tracking, recipe: str, result: RunResult | None, **more: str) -> RunLog:
    tags: Mapping[str, str] = {"recipe_hash": recipe, "pipebench_version": VERSION, **more}
    run = tracking.start("found", params={}, tags=tags)
    run.finish(result, status=None if result else "KILLED")
    return run


def test_the_newest_run_of_a_recipe_is_found(tracking: Tracking) -> None:
    recorded(tracking, "two", replace(RESULT, sentence="the first"))
    second = recorded(tracking, "two", replace(RESULT, sentence="the second"))
    recorded(tracking, "three", RESULT)
    runs = RecordedRuns()
    found = runs.newest("two", VERSION)
    assert found is not None
    assert (found.run_id, found.experiment_id) == (second.run_id, tracking.store.experiment_id)
    assert (found.name, found.result) == ("found", replace(RESULT, sentence="the second"))
    assert found.result.points == RESULT.points
    assert runs.newest("two", "0+other") is None
    assert runs.newest("none", VERSION) is None
    assert runs.newest("two", VERSION) == found
    assert runs.result_of(found.run_id) == found.result


def test_runs_without_a_result_of_this_recipe_are_skipped(tracking: Tracking, folder: Path) -> None:
    good = recorded(tracking, "passed", RESULT)
    recorded(tracking, "passed", None)
    recorded(tracking, "passed", replace(RESULT, outcome=INTERRUPTED))
    recorded(tracking, "passed", RESULT, **{"resumed.recipe_hash": "another"})
    lost = recorded(tracking, "passed", RESULT)
    shutil.rmtree(folder / "mlartifacts" / "suite" / str(lost.run_id))
    goes_on = tracking.start("found", params={}, tags={"recipe_hash": "passed", "pipebench_version": VERSION})
    goes_on.result(RESULT)
    found = RecordedRuns().newest("passed", VERSION)
    assert found is not None
    assert found.run_id == good.run_id
    goes_on.finish()
    assert RecordedRuns().newest("passed", VERSION) != found


def test_measured_runs_of_another_machine_are_not_used(tracking: Tracking) -> None:
    """On a team's server a report took durations that a colleague's machine had measured."""
    mine = recorded(tracking, "measured", RESULT, processor="one", cpus="8")
    recorded(tracking, "measured", RESULT, processor="another", cpus="8")
    recorded(tracking, "measured", RESULT, processor="one", **{"resumed.processor": "another"})
    found = RecordedRuns().newest("measured", VERSION, {"processor": "one"})
    assert found is not None
    assert found.run_id == mine.run_id


def test_a_run_that_diverged_is_used(tracking: Tracking) -> None:
    run = recorded(tracking, "diverged", replace(RESULT, outcome=DIVERGED))
    found = RecordedRuns().newest("diverged", VERSION)
    assert found is not None
    assert found.run_id == run.run_id


@pytest.mark.parametrize("clock", ["virtual", "wall"])
def test_the_list_of_runs_has_the_time_and_the_throughput_of_either_clock(tracking: Tracking, clock: str) -> None:
    """MLflow has them under other names of runs on the wall clock."""
    metrics = {**RESULT.metrics, "throughput_samples_per_s": 20.0}
    run = recorded(tracking, f"on-{clock}", replace(RESULT, clock=clock, metrics=metrics), kind="run")
    (listed,) = (past for past in RecordedRuns().past() if past.ids == (run.run_id,))
    assert (listed.time_to_accuracy_s, listed.throughput_samples_per_s) == (4.5, 20.0)


@pytest.mark.parametrize("clock", ["virtual", "wall"])
def test_a_run_without_artifacts_is_compared_by_mlflow_s_metrics(
    tracking: Tracking, folder: Path, clock: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs had no result if only the server can read its artifacts, or if they were removed."""
    recipe = {"name": "gone", "train.seed": "0", "train.minibatch_size": "8", "train.loss_scale": "null"}
    result = replace(
        RESULT, name="gone", clock=clock, recipe=recipe, metrics={**RESULT.metrics, "throughput_samples_per_s": 20.0}
    )
    result = replace(result, points=tuple(replace(each, clock_s=each.clock_s * 1000) for each in result.points))
    parent = tracking.start(f"gone on {clock}", params={}, tags={"kind": "comparison"}, virtual=False)
    tags = {"kind": "run", "mode": "pipedream", "plan": "straight", "engine": "virtual", "timing": result.timing}
    params, virtual = {**logged_params(recipe), "parallelism.depth": "1"}, clock == "virtual"
    runs = [tracking.start(f"gone {n}", params=params, tags=tags, parent=parent, virtual=virtual) for n in range(3)]
    for run in runs:
        for point in result.points:
            run.point(point)
        run.finish(result)
    parent.finish(None, status="FINISHED")
    for run in runs[1:]:
        shutil.rmtree(folder / "mlartifacts" / "suite" / str(run.run_id))
    client = MlflowClient(default_uri())
    client.set_tag(str(runs[2].run_id), "outcome", "my favourite")
    client.set_tag(str(runs[2].run_id), "mlflow.parentRunId", str(runs[2].run_id))
    whole, gone = runs_of(str(parent.run_id), [])
    assert (whole.lacks, whole.result, gone.run_id) == ("", result, runs[1].run_id)
    assert "result.json" in gone.lacks
    there = ("time_to_accuracy_s", "throughput_samples_per_s", "best_top1", "target_reached")
    expected = {**least_losses(result.points), **result.metrics}
    assert {name: gone.result.metrics[name] for name in there} == {name: expected[name] for name in there}
    assert gone.result.points == result.points
    assert replace(gone.result, recipe=recipe, sentence="", metrics={}, points=()) == replace(
        result, sentence="", metrics={}, points=(), stages=()
    )
    shown = pipebench.recorded(str(whole.run_id), gone.run_id)
    assert [key for key, *_ in differences(shown.results)] == ["parallelism.depth"], "what is null is no param"
    assert capsys.readouterr().err.startswith(f"pipebench: {gone.run_id[:8]} (gone 1): compared by what MLflow has, ")
    with pytest.raises(UserError, match="has no result"):
        find_runs([str(runs[2].run_id)], [])
    here = folder / "pipebench-runs" / f"gone-{clock}" / "record"
    RecordFolder(here).append(LogEntry(start=Start("gone 1", virtual=True), result=result))
    RecordFolder(here).write_sent(Sent(gone.run_id, 1))
    (found,) = find_runs([gone.run_id], [here])
    assert (found.lacks, found.result, found.run_id) == ("", result, gone.run_id), "its record is on this disk"


def test_a_database_that_was_moved_with_its_artifacts_has_results(
    tracking: Tracking, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow keeps artifacts' addresses absolute, so that no run of a folder from another machine had a result."""
    run = tracking.start("moved", params={}, tags={"kind": "run"})
    run.finish(RESULT)
    moved = tmp_path / "mlartifacts" / "suite"
    moved.mkdir(parents=True)
    shutil.copy(folder / "mlflow.db", tmp_path)
    (folder / "mlartifacts" / "suite" / str(run.run_id)).rename(moved / str(run.run_id))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    (found,) = find_runs(["moved"], [])
    assert (found.lacks, found.result) == ("", RESULT)


def test_thousands_of_runs_are_listed_without_the_collector(
    tracking: Tracking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5,000 runs took 15 s of processor time, 10 of them the collector's."""
    search, collects = MlflowClient.search_runs, list[bool]()

    def noted(*given: Any, **named: Any) -> Any:
        collects.append(gc.isenabled())
        return search(*given, **named)

    monkeypatch.setattr(MlflowClient, "search_runs", noted)
    RecordedRuns().past()
    assert collects == [False]
    assert gc.isenabled()


def test_listing_runs_in_mlflow_reads_no_records(
    tracking: Tracking, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of long runs' records were read, gigabytes of samples of the system, for their folders' names."""
    run = recorded(tracking, "listed", RESULT, kind="run")
    records = [folder / "pipebench-runs" / name / "record" for name in ("sent-12345678", "unsent-12345678")]
    for each, run_id in zip(records, (run.run_id, None), strict=True):
        RecordFolder(each).append(LogEntry(start=Start("listed", virtual=True)))
        RecordFolder(each).write_sent(Sent(run_id, 1))
    seen: list[Path] = []

    def noted(each: Path) -> RunRecord | None:
        seen.append(each)
        return read_record(each)

    monkeypatch.setattr(results, "read_record", noted)
    ids = [past.ids for past in results.past_runs(records)]
    assert (run.run_id, "sent-12345678") in ids
    assert ("unsent-12345678",) in ids
    assert seen == records[1:]


def test_runs_of_experiments_beyond_a_page_are_listed(tracking: Tracking, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more than a thousand experiments the oldest ones' runs were in no list."""
    recorded(tracking, "beyond", RESULT, kind="run")
    MlflowClient(default_uri()).create_experiment("a later one")
    listed = RecordedRuns().past()
    monkeypatch.setattr(results, "_PAGE", 1)
    assert [run.ids for run in RecordedRuns().past()] == [run.ids for run in listed] != []


def test_a_run_that_is_tagged_as_its_own_parent_is_listed(tracking: Tracking) -> None:
    run = tracking.start("own parent", params={}, tags={"kind": "run"})
    run.finish(RESULT)
    MlflowClient(default_uri()).set_tag(str(run.run_id), "mlflow.parentRunId", str(run.run_id))
    assert [past.parent_id for past in RecordedRuns().past() if past.ids == (run.run_id,)] == [None]


def test_looking_up_results_creates_no_store(tmp_path: Path) -> None:
    assert RecordedRuns(f"sqlite:///{tmp_path}/mlflow.db").newest("two", VERSION) is None
    assert not any(tmp_path.iterdir())


def test_a_store_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    path.write_text("no database")
    with pytest.raises(UserError, match=rf"MLflow at sqlite:///{path} can't be read: .*not a database"):
        RecordedRuns(f"sqlite:///{path}").newest("two", VERSION)


def test_a_server_s_password_is_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow's message on a server that is down contains it."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        server = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(UserError) as raised:
            RecordedRuns(f"http://me:secret@{server}").past()
    assert str(raised.value).startswith(f"MLflow at http://{server} can't be read: ")
    assert "Connection refused" in str(raised.value)
    assert "secret" not in reason_of("413 Client Error for url: http://me:secret@host/api")


def test_a_recipe_s_hash_is_of_all_but_its_name(tmp_path: Path) -> None:
    own = recipe_hash(load("quickstart"))
    assert len(own) == 16
    assert own == recipe_hash(load("quickstart", ["name=other"]))
    others = (["train.seed=1"], ["parallelism.depth=1"], ["cluster.servers=2"], ["train.optimizer.lr=0.03"])
    assert len({own, *(recipe_hash(load("quickstart", each)) for each in others)}) == 5


def test_files_are_hashed_by_content(tmp_path: Path) -> None:
    cluster, plan = tmp_path / "mine.yaml", tmp_path / "profile.json"
    text = (Path(pipebench.__file__).parent.parent / "recipes" / "clusters" / "cluster-a.yaml").read_text()

    def hashed(bandwidth: str, profile: str) -> str:
        cluster.write_text(text.replace("value: 10 GB/s", f"value: {bandwidth}"))
        plan.write_text(profile)
        return recipe_hash(load("quickstart", [f"cluster.name={cluster}", f"engine.timing={plan}"]))

    first = hashed("10 GB/s", "{}")
    assert hashed("10 GB/s", "{}") == first
    assert len({first, hashed("11 GB/s", "{}"), hashed("10 GB/s", "{ }")}) == 3


def test_the_folder_of_data_is_not_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = set()
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv("PIPEBENCH_DATA", str(tmp_path / name))
        hashes.add(recipe_hash(load("vgg16/4x4-a-pipedream", ["dataset.root=${oc.env:PIPEBENCH_DATA}/imagenet"])))
    assert len(hashes) == 1


def test_a_version_hashes_all_source_files() -> None:
    number, _, digits = source_version().partition("+")
    root = Path(pipebench.__file__).parent.parent
    files = sorted([*(root / "pipebench").rglob("*.py"), *(root / "pipebench" / "zoo").rglob("*.py")])
    content = b"".join(f"{path.relative_to(root)}\0".encode() + path.read_bytes() for path in files)
    assert (number, digits) == (pipebench.__version__, hashlib.sha256(content).hexdigest()[:12])


@pytest.fixture
def counted(tmp_path: Path) -> Callable[[], str]:
    """Return a function that hashes a recipe whose model is a user's code: a module, a helper, and a package."""
    (tmp_path / "own_parts" / "inner").mkdir(parents=True)
    (tmp_path / "own_space" / "deeper").mkdir(parents=True)
    texts = {
        "own_counted.py": "import json\nfrom torch import nn\nimport own_helper\n\n\ndef net():\n"
        "    from own_parts import deep\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))\n",
        "own_helper.py": "import importlib\n\nLATE = lambda: importlib.import_module('own_literal')\n",
        "own_literal.py": "import own_space.deeper.leaf\n",
        "own_space/deeper/leaf.py": "",
        "own_unused.py": "",
        "own_parts/__init__.py": "",
        "own_parts/deep.py": "from . import beside\nfrom .inner import thing\n",
        "own_parts/beside.py": "import importlib\n\nfind = lambda name: importlib.import_module(f'own_parts.{name}')\n",
        "own_parts/computed.py": "",
        "own_parts/inner/__init__.py": "thing = 3\n",
        "own_parts/inner/more.py": "",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    recipe = tmp_path / "own.yaml"
    recipe.write_text("extends: quickstart/dp\nmodel: {name: null, target: 'own_counted:net', width: null}\n")
    # The base's options of its model don't apply to a user's model.
    extended = load("quickstart/dp").recipe.model
    nothing = [f"model.{key}=null" for key in extended if key not in ("name", "target", "width")]
    return lambda: recipe_hash(load(str(recipe), nothing, builds=False))


@pytest.mark.parametrize(
    ("module", "counts"),
    [
        ("own_counted.py", True),
        ("own_helper.py", True),
        ("own_literal.py", True),
        ("own_parts/__init__.py", True),
        ("own_parts/deep.py", True),
        ("own_parts/beside.py", True),
        ("own_parts/inner/__init__.py", True),
        ("own_parts/computed.py", True),  # imported by a name that beside.py computes
        ("own_parts/inner/more.py", True),
        ("own_space/deeper/leaf.py", True),  # of packages without a file of their own
        ("own_unused.py", False),
    ],
)
def test_all_user_code_that_a_target_imports_is_hashed(
    counted: Callable[[], str], tmp_path: Path, module: str, *, counts: bool
) -> None:
    """0.1.0 counted the modules that targets name only: a helper could change, and old results were shown for it."""
    before = counted()
    assert counted() == before
    with (tmp_path / module).open("a") as file:
        file.write("CHANGED = 1\n")
    assert (counted() != before) is counts
