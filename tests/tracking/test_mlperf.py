"""Logs in MLPerf's form: MLPerf's own checker accepts those of models that one of its rulesets has."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipebench.cli.main import cli
from pipebench.recipe.load import load
from pipebench.tracking.mlperf import FILE, mlperf_log
from pipebench.train.result import MISSED, REACHED, Point, RunResult
from pipebench.typed_json import read
from tests.tracking.records import RESULT

RECORDED = Path(__file__).parents[2] / "reports/studies/small_zoo_runs"
BEGAN_MS = 1_700_000_000_000


def events(text: str) -> list[dict[str, Any]]:
    """Return the events of a log, each in the published form: a token, then JSON of these keys."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(line.startswith(":::MLLOG {") for line in lines)
    found = [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]
    assert all([*each] == ["namespace", "time_ms", "event_type", "key", "value", "metadata"] for each in found)
    assert {each["event_type"] for each in found} == {"POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END"}
    assert [each["time_ms"] for each in found] == sorted(each["time_ms"] for each in found)
    return found


def accepted(text: str, folder: Path) -> bool:
    """Return whether the checker accepts a log under the ruleset that its first line names, warnings included."""
    compliance = pytest.importorskip("mlperf_logging.compliance_checker.mlp_compliance")
    found = re.search(r"--ruleset (\S+) mlperf.log", text)
    assert found is not None, text[:200]
    path = folder / "checked.log"
    path.write_text(text)
    compliance.enqueued_configs.clear()  # the checker keeps them between files
    checker = compliance.make_checker("training", found[1], quiet=False, werror=True)
    return bool(checker.check_file(str(path), f"training_{found[1]}/common.yaml"))


def recorded(name: str, model: str) -> RunResult:
    """Return the result of a run of the study of small models."""
    kept = json.loads((RECORDED / f"{name}-0.json").read_text())["result"]
    result = read(RunResult, kept if isinstance(kept, str) else json.dumps(kept))
    return replace(result, recipe=load(f"small/{model}/single").flat)


# A model, the model whose result it is given, and its ruleset: BLEU of a Transformer is BLEU of a GNMT.
RULESETS = [
    ("gnmt8", "gnmt8", "0.7.0"),
    ("gnmt16", "gnmt16", "0.7.0"),
    ("transformer", "gnmt8", "0.7.0"),
    ("resnet50", "resnet50", "4.0.0"),
]


@pytest.mark.parametrize(("model", "trained", "ruleset"), RULESETS)
def test_the_checker_accepts_recorded_runs(model: str, trained: str, ruleset: str, tmp_path: Path) -> None:
    text = mlperf_log(recorded(f"{trained}-single", model), 4000, 200, BEGAN_MS)
    assert f"--ruleset {ruleset} " in text.splitlines()[0]
    assert accepted(text, tmp_path)
    assert not accepted(text.replace('"key": "run_stop"', '"key": "run_end"'), tmp_path), "it does look"


# Any score of BERT's will do.
SHORT = [
    *("train.max_epochs=1", "train.minibatch_size=512", "train.evaluate_every={epochs: 1}", "dataset.num_eval=50"),
    *("model.num_layers=1", "model.width=8", "model.feed_forward=8", "model.num_heads=2"),
    *(f"{section}.vocabulary=300" for section in ("model", "dataset")),
    *("model.max_tokens=16", "dataset.columns=16"),
]


def test_the_checker_accepts_what_a_run_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlperf_logging")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    done = CliRunner().invoke(cli, ["run", "small/bert/single", *SHORT])
    assert done.exit_code in (0, 1), done.output
    (text,) = {log.read_text() for log in tmp_path.rglob(FILE)}  # in MLflow, and in the run's folder
    assert accepted(text, tmp_path)


def log_of(points: Sequence[Point], **changes: Any) -> list[dict[str, Any]]:
    return events(mlperf_log(replace(RESULT, points=tuple(points), **changes), 2000, 100, BEGAN_MS))


def test_times_are_those_of_the_run_s_clock() -> None:
    reached_last = {**RESULT.metrics, "time_to_accuracy_s": 6.0}
    found = log_of(RESULT.points, metrics=reached_last, recipe=load("quickstart").flat)
    scores = [each for each in found if each["key"] == "eval_accuracy"]
    assert [each["time_ms"] - BEGAN_MS for each in scores] == [1500, 3000, 4500, 6000]
    assert [each["value"] for each in scores] == [0.5, 0.8, 0.96, 0.9]
    assert [each["metadata"]["epoch_num"] for each in scores] == [0.5, 1.0, 1.5, 2.0]
    last = found[-1]
    assert (last["key"], last["metadata"]["clock"], last["metadata"]["status"]) == ("run_stop", "virtual", "success")
    blocks = [each["metadata"] for each in found if each["key"] == "block_start"]
    assert blocks[-1] == {"first_epoch_num": 2, "epoch_count": 0.5}


def test_the_clock_of_a_run_that_reached_its_target_stops_before_the_checkpoint_that_follows() -> None:
    metrics = {**RESULT.metrics, "time_to_accuracy_s": 6.0, "total_time_s": 7.25}
    for outcome, end_ms in ((REACHED, 6000), (MISSED, 7250)):
        assert log_of(RESULT.points, outcome=outcome, metrics=metrics)[-1]["time_ms"] - BEGAN_MS == end_ms


def test_evaluations_after_the_target_are_left_out() -> None:
    """A run that goes on with an easier target has reached it some evaluations ago; 0.2.0 ended with the last one."""
    stop = log_of(RESULT.points, metrics={**RESULT.metrics, "time_to_accuracy_s": 4.5})[-1]
    assert (stop["key"], stop["time_ms"] - BEGAN_MS) == ("run_stop", 4500)


def test_a_run_that_missed_or_diverged_is_aborted() -> None:
    for outcome in (MISSED, REACHED):
        stop = log_of(RESULT.points, outcome=outcome)[-1]
        assert stop["metadata"]["status"] == ("success" if outcome == REACHED else "aborted")
    diverged = log_of([Point(1000, 1.0, {"train_loss": math.nan, "top1": math.nan})])
    assert [each["value"] for each in diverged if each["key"] == "eval_accuracy"] == [None]


def test_bleu_is_logged_as_a_fraction() -> None:
    found = log_of([Point(2000, 1.0, {"train_loss": 2.0, "bleu": 24.5})], recipe=load("small/gnmt8/single").flat)
    assert [each["value"] for each in found if each["key"] == "eval_accuracy"] == [0.245]


def test_models_without_a_ruleset_are_logged_as_such() -> None:
    for recipe, named in ((load("quickstart").flat, "vgg16"), ({}, "this model")):
        first = mlperf_log(replace(RESULT, recipe=recipe), 4000, 1000, BEGAN_MS).splitlines()[0]
        assert first.startswith(f"# no ruleset of MLPerf Training has {named}: its checker refuses this")
