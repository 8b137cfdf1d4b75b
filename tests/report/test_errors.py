"""Invalid reports: one row per kind of mistake, with the message that refuses it."""

import re
from pathlib import Path
from typing import Any

import pytest

from pipebench.errors import RecipeError, UserError
from pipebench.report.catalog import find_report
from pipebench.report.load import load_report
from tests.lined import lined
from tests.report.conftest import Write, changed

KEYS: list[tuple[dict[str, Any], str]] = [
    ({"titel": "x"}, "titel: unknown key, allowed here are title, .*did you mean 'title'"),
    ({"title": None}, "title: is missing and has no default"),
    ({"title": 3}, "title: got 3, allowed is text; put it in quotes"),
    ({"title": " "}, "title: got nothing readable, needed is a sentence or a word"),
    ({"source": "here"}, "source: got 'here', allowed is a mapping with the keys paper, where"),
    ({"source": {"papr": "x"}}, "source.papr: unknown key, .*did you mean 'paper'"),
    ({"about": "up to {ideal: max(sped)}"}, "about: {ideal: max.sped.}: unknown measure 'sped', .*mean 'speedup'"),
    ({"about": "up to {ideal: speedup}"}, "about: {ideal: speedup}: is about several rows, needed is one answer"),
    ({"about": "up to {max(speedup)}"}, "about: got {max.speedup.}, needed is the column before it: {ideal: max"),
    ({"about": "up to {idle: max(speedup)}"}, "about: {idle: max.speedup.}: got 'idle', .*did you mean 'ideal'"),
    ({"about": "{ideal: max(speedup) > 1}"}, "about: {ideal: max.speedup. > 1}: gives yes or no, allowed is what"),
    # columns
    ({"columns__ideal__sett": []}, "columns.ideal.sett: unknown key, .*did you mean 'set'"),
    ({"columns__ideal__set": ["x"]}, "columns.ideal.set: got 'x', allowed is key=value, or .key=value where not all"),
    ({"columns__ideal__set": "x=1"}, "columns.ideal.set: got 'x=1', allowed is a list of text"),
    ({"columns__ideal__clusters": {"cluster-a": 3}}, "columns.ideal.clusters.cluster-a: got 3, allowed is the name"),
    (
        {"columns__ideal__clusters": {"cluster-a": "cluster-bb"}},
        "columns.ideal.clusters.cluster-a: cluster 'cluster-bb': no such cluster, .*did you mean 'cluster-b'",
    ),
    (
        {"columns__ideal__clusters": {"cluster-b": "cluster-c"}},
        "columns.ideal.clusters.cluster-b: no run is on this cluster, they are on cluster-a; did you mean 'cluster-a'",
    ),
    ({"columns__ideal__set": ["?model.widht=1.0"]}, "columns.ideal.set: got '.model.widht=1.0', which no run's recipe"),
    (
        {"columns__ideal__set": ["?model.width=x"]},
        "rows.first.runs.dp: command line: model.width: got 'x', allowed is a number .column ideal.",
    ),
    # measures
    ({"measures": {}}, "measures: is missing or empty, needed is a mapping"),
    ({"measures__speedup__unt": "x"}, "measures.speedup.unt: unknown key, .*did you mean 'unit'"),
    ({"measures__speedup__unit": "X"}, "measures.speedup.unit: got 'X', allowed are x, share"),
    ({"measures__speedup__shown": "yes"}, "measures.speedup.shown: got 'yes', allowed is true or false"),
    ({"measures__speedup__better": "high"}, "measures.speedup.better: got 'high', .*did you mean 'higher'"),
    ({"measures__twice__value": "2 * speed_up"}, "measures.twice.value: 'speed_up' is no measure .*mean 'speedup'"),
    ({"measures__twice__value": "speedup / 0"}, "measures.twice.value: .* divides by zero"),
    ({"measures__twice__value": "dpp.epoch_time_s"}, "measures.twice: no row has a run 'dpp', .*did you mean 'dp'"),
    (
        {"measures__twice__value": "dp.epoch_times"},
        "measures.twice.value: dp.epoch_times: unknown metric 'epoch_times', .*did you mean 'epoch_time_s'",
    ),
    (
        {"measures__twice__value": "dp.epochs_to_target"},
        "measures.twice.value: dp.epochs_to_target: run dp has no epochs_to_target: its engine is simulated, which tr",
    ),
    (
        {
            "rows__0__runs__dp": {"recipe": "dp.yaml", "engine": "virtual"},
            "measures__twice__value": "dp.planned_throughput_samples_per_s",
        },
        "measures.twice.value: dp.planned_throughput_samples_per_s: run dp has no planned_.*, and only simulated",
    ),
    (
        {"measures__twice__value": "dp.prediction_error"},
        "measures.twice.value: dp.prediction_error: run dp has no prediction_error: its engine is simulated, which me",
    ),
    ({"measures__twice": {"unit": "x"}}, "measures.twice: needed is one of value .an expression. and plan_of"),
    ({"measures__twice__plan_of": "dp"}, "measures.twice: needed is one of value"),
    ({"measures__twice__against": "dp"}, "measures.twice.against: goes with plan_of"),
    ({"measures__plan__plan_of": "dq"}, "measures.plan: no row has a run 'dq', allowed are dp, straight"),
    ({"measures__a-b": {"value": "1"}}, "measures.a-b: is no name that an expression can have"),
    # rows
    ({"rows": []}, "rows: is missing or empty"),
    ({"rows": "first"}, "rows: got 'first', allowed is a list of rows"),
    ({"rows__0__name": None}, "rows.0.name: is missing, needed are letters, digits"),
    ({"rows__0__name": "a b"}, "rows.0.name: got 'a b', needed are letters, digits"),
    ({"rows__0__name": "m8"}, "rows.1.name: got 'm8', which an earlier row is named already"),
    ({"rows__0__nots": "x"}, "rows.0.nots: unknown key, .*did you mean 'note'"),
    ({"rows__1__for__size": [8]}, "rows.1.for: takes the lists' elements together, .*: size has 1, published has 2"),
    ({"rows__1__for__size": 8}, "rows.1.for: got 8 for size, allowed is a list of plain values"),
    ({"rows__1__name": "m$sise"}, r"rows.1.name: got \$sise, allowed are \$size, \$published; did you mean 'size'"),
    ({"rows__0__title": "$size"}, r"rows.0.title: got \$size, the row has no `for` and no `at`"),
    ({"rows__1__name": "m"}, "rows.1.name: got 'm', which an earlier row is named already"),
    ({"rows__0__published__plan": 16}, "rows.first.published.plan: got 16, allowed is a plan such as 15-1, in quotes"),
    ({"rows__0__published__speedup": "5x"}, "rows.first.published.speedup: got '5x', allowed is a number"),
    ({"rows__0__published__speedup": {"atleast": 1}}, "rows.first.published.speedup: got a mapping, allowed is a numb"),
    ({"rows__0__published__speedup": {"at_least": "x"}}, "rows.first.published.speedup.at_least: got 'x', allowed is"),
    ({"rows__0__published__speed": 1}, "rows.first.published.speed: unknown measure, .*did you mean 'speedup'"),
    ({"rows__0__hypothesis": {"speed": "x"}}, "rows.first.hypothesis.speed: unknown measure, allowed here are plan"),
    ({"rows__0__by_construction": {"speedup": 3}}, "rows.first.by_construction.speedup: got 3, allowed is text"),
    # runs
    ({"rows__0__runs__dp": "dpp.yaml"}, "rows.first.runs.dp: dpp.yaml: no such file, folder or short name"),
    ({"rows__0__runs__dp": "recipes/quickstart"}, "rows.first.runs.dp: recipes/quickstart: is a folder; one recipe is"),
    ({"rows__0__runs__dp": "dp.yaml trian.seed=1"}, "rows.first.runs.dp: command line: trian: unknown key, allowed at"),
    (
        {"rows__0__runs__dp": {"recipe": "dp.yaml", "minibatch": "larges"}},
        "rows.first.runs.dp.minibatch: .*'larges', .*'largest'",
    ),
    (
        {"rows__0__runs__dp": {"recipe": "dp.yaml train.minibatch_size=8", "minibatch": "largest"}},
        "rows.first.runs.dp: got 'train.minibatch_size=8', write `minibatch` beside `recipe`",
    ),
    ({"rows__0__runs__dp": "dp.yaml train.minibatch_size=1,2"}, "rows.first.runs.dp: .*got a list, one value is need"),
    ({"rows__0__runs__dp": "dp.yaml quick"}, "rows.first.runs.dp: got 'quick' after the recipe, allowed is key=value"),
    ({"rows__0__runs__dp": "train.seed=1"}, "rows.first.runs.dp: got 'train.seed=1' first, needed is a recipe"),
    ({"rows__0__runs__dp": "dp.yaml train.seed=1"}, "rows.first.runs.dp: got 'train.seed=1', write `seeds` beside"),
    ({"rows__0__runs__dp": "dp.yaml engine.kind=virtual"}, "rows.first.runs.dp: got .*, write `engine` beside"),
    ({"rows__0__runs__dp": "dp.yaml 'x"}, "rows.first.runs.dp: got .*, which no command line holds: No closing quot"),
    ({"rows__0__runs__dp": 3}, "rows.first.runs.dp: got 3, allowed is a mapping with the keys recipe"),
    ({"rows__0__runs__dp": {"recipe": "dp.yaml", "engin": "x"}}, "rows.first.runs.dp.engin: unknown key, .*'engine'"),
    (
        {"rows__0__runs__dp": {"recipe": "dp.yaml", "engine": "virtul"}},
        "rows.first.runs.dp.engine: got 'virtul', allowed are virtual, .*did you mean 'virtual'",
    ),
    (
        {"rows__0__runs__dp": {"recipe": "dp.yaml", "seeds": [1, 1]}},
        "rows.first.runs.dp.seeds: got .1, 1., allowed is a list of different whole numbers",
    ),
    (
        {"rows__0__runs__dp": {"recipe": "dp.yaml", "columns": "all"}},
        "rows.first.runs.dp.columns: got 'all', allowed are same",
    ),
    ({"rows__0__runs": {"d-p": "dp.yaml"}}, "rows.first.runs.d-p: is no name that an expression can have"),
    # claims
    ({"claims__0__holds": "min(sped) >= 1"}, "claims.0.holds: unknown measure 'sped', .*did you mean 'speedup'"),
    ({"claims__0__holds": "min(plan) >= 1"}, "claims.0.holds: unknown measure 'plan', allowed are speedup, twice"),
    ({"claims__0__holds": "speedup >= 1"}, "claims.0.holds: is about several rows, needed is one answer"),
    ({"claims__0__holds": None}, "claims.0: needed is one of holds"),
    ({"claims__0__text": None}, "claims.0.text: is missing"),
    ({"claims__0__published": 2.0}, "claims.0.published: goes with value"),
    ({"claims__0": {"text": "Twice", "value": "max(speedup) > 1"}}, "claims.0.value: gives yes or no"),
    (
        {"claims__0": {"text": "Twice", "value": "max(speedup)", "published": -2.0, "within": 0.1}},
        "claims.0.published: got -2, allowed is a number above 0",
    ),
    ({"claims__0": {"text": "Twice", "value": "max(speedup)", "published": 2.0}}, "claims.0.within: is missing"),
    ({"measures__twice__published_as": "sped"}, "measures.twice.published_as: got 'sped'.*did you mean 'speedup'"),
    ({"measures__twice__chosen": {"idael": "the best of ten"}}, "measures.twice.chosen.idael: unknown column, allowed"),
    ({"rows__0__chosen": {"sped": "the best of ten"}}, "rows.first.chosen.sped: unknown measure"),
    ({"calibration__leave_out": ["szie"]}, "calibration.leave_out: got 'szie'.*did you mean 'size'"),
    # pictures
    ({"pictures__0__kind": "bar"}, "pictures.0.kind: got 'bar', allowed are bars, .*did you mean 'bars'"),
    ({"pictures__0__line": {"at": "9 GB", "text": "memory"}}, "pictures.0.line.at: got '9 GB', allowed is a number"),
    (
        {"pictures__0__line": {"at": 1.0, "colour": "red"}},
        "pictures.0.line.colour: unknown key, allowed here are at, text",
    ),
    ({"pictures__0__bound": "speed"}, "pictures.0.bound: got 'speed', allowed are .*did you mean 'speedup'"),
    (
        {"pictures__0": {"kind": "stages", "runs": {"dp": 4}, "row": "first", "metric": "forward_s"}},
        "pictures.0.runs.dp: got 4, allowed is text",
    ),
    (
        {"pictures__0": {"kind": "stages", "runs": ["dp"], "row": "first", "metric": "forwards"}},
        "pictures.0.metric: got 'forwards', allowed are num_layers, .*did you mean 'forward_s'",
    ),
    ({"pictures__0": {"kind": "stages", "runs": ["dp"], "row": "first"}}, "pictures.0.metric: is missing, needed for"),
    ({"pictures__0__kind": None}, "pictures.0.kind: is missing, allowed are bars"),
    ({"pictures__0__measures": ["sped"]}, "pictures.0.measures: got 'sped', allowed are speedup, twice; did you mean"),
    ({"pictures__0__measures": None}, "pictures.0.measures: is missing, needed for bars"),
    ({"pictures__0__x": "size"}, "pictures.0.x: unknown key, allowed here are kind, measures"),
    ({"pictures__1__x": "gpus"}, "pictures.1.x: got 'gpus', allowed are size"),
    ({"rows": changed()["rows"][:1]}, "pictures.1.x: got 'size', but there is none"),
    ({"pictures__1__x": None}, "pictures.1.x: is missing, needed for lines"),
    ({"pictures__0": {"kind": "schedule", "run": "dp", "row": "frist"}}, "pictures.0.row: got 'frist', .*mean 'first'"),
    ({"pictures__0": {"kind": "schedule", "run": "dq", "row": "first"}}, "pictures.0.run: got 'dq', allowed are dp"),
    ({"pictures__0": {"kind": "curves", "runs": ["dp"], "row": "first"}}, "pictures.0.metric: is missing, needed for"),
    ({"pictures__0": {"kind": "phases", "runs": ["dp"]}}, "pictures.0.metric: is missing, needed for phases"),
    # calibration
    ({"calibration__column": "slw"}, "calibration.column: got 'slw', allowed are ideal, slow; did you mean 'slow'"),
    ({"calibration__fitted_on": {"ring": ["first.sped"]}}, "calibration.fitted_on.ring: got 'first.sped', .*mean 'fir"),
    ({"calibration__fitted_on": {"ring": ["first.twice"]}}, "calibration.fitted_on.ring: .*where no number is publis"),
    ({"calibration__fitted_on": {"rng": ["first.speedup"]}}, "calibration.fitted_on.rng: got 'rng', .*mean 'ring'"),
    ({"calibration__fitted_on": None}, "calibration.constants.ring: no cell is named in calibration.fitted_on"),
    ({"calibration__constants__ring__from": None}, "calibration.constants.ring.from: is missing"),
    ({"calibration__constants__ring__cluster": "c"}, "calibration.constants.ring.cluster: .*no such cluster"),
]


@pytest.mark.parametrize(("keys", "message"), KEYS, ids=[message.partition(" ")[0] for _, message in KEYS])
def test_a_wrong_report_is_refused(write: Write, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_report(write(changed(**keys)))
    sentences = str(caught.value).splitlines()
    assert any(re.search(lined(f"^small.yaml: {message}"), sentence) for sentence in sentences), "\n".join(sentences)


def test_all_faults_are_reported_together(write: Write) -> None:
    wrong = changed(
        titel="x", measures__twice__value="2 ** 2", rows__0__runs__dp="dp.yaml trian.seed=1", claims__0__holds="1"
    )
    with pytest.raises(RecipeError) as caught:
        load_report(write(wrong))
    assert [fault.key for fault in caught.value.faults] == [
        "titel",
        "measures.twice.value",
        "claims.0.holds",
        "rows.first.runs.dp",
    ]


def test_a_missing_key_of_a_picture_is_reported_once_with_the_allowed_ones(write: Write) -> None:
    with pytest.raises(RecipeError) as caught:
        load_report(write(changed(pictures__0={"kind": "schedule", "run": "dp"})))
    (fault,) = caught.value.faults
    assert (fault.key, fault.problem) == ("pictures.0.row", "is missing, needed for schedule: first, m8, m16")


def test_a_mistake_that_rows_share_is_reported_once(write: Write) -> None:
    with pytest.raises(RecipeError) as caught:
        load_report(write(changed(runs={"more": "no-such"})))
    assert len(caught.value.faults) == 1, str(caught.value)


@pytest.mark.parametrize(
    "keys",
    [
        {"rows__1__for__size": [8]},
        {"rows__1__for": "8"},
        {"rows__1__name": None},
        {"rows__0__name": None},
        {"rows__0__name": "fi rst"},
        {"rows__0__runs": 3},
    ],
    ids=str,
)
def test_rows_that_a_fault_leaves_out_are_not_reported(write: Write, keys: dict[str, Any]) -> None:
    rows = {"claims__0__holds": 'speedup["first"] > speedup["m8"]', "calibration__leave_out": ["size"]}
    curves = {"kind": "curves", "runs": ["dp"], "metric": "top1", "row": "m8"}
    with pytest.raises(RecipeError) as caught:
        load_report(write(changed(**rows, pictures__0=curves, about="{ideal: twice['m16']}", **keys)))
    (fault,) = caught.value.faults
    assert re.fullmatch(r"rows\..*(for|name|runs)", fault.key), fault


def test_unknown_rows_are_refused(write: Write) -> None:
    with pytest.raises(
        UserError, match=r"--only: got 'frist', allowed are first, m8, m16, or patterns; did you mean 'f"
    ):
        load_report(write(), ["frist"])


@pytest.mark.parametrize("reference", ["tabel", "", "recipes"])
def test_unknown_reports_are_refused(write: Write, reference: str) -> None:
    with pytest.raises(RecipeError, match=r"no such report, allowed are .* or the path of a YAML file"):
        find_report(reference)


def test_a_file_without_a_mapping_is_refused(write: Write) -> None:
    with pytest.raises(RecipeError, match=r"small.yaml: holds a list; a mapping of keys to values is needed"):
        load_report(write("- 1\n"))


def test_the_valid_report_is_accepted(write: Write) -> None:
    assert load_report(write())[0].path == Path("small.yaml")
