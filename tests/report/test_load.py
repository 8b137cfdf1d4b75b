"""Loading a report: rows generated from lists, runs changed by columns, shipped reports."""

from pathlib import Path

import pytest

from pipebench.errors import RecipeError
from pipebench.report.catalog import find_report, report_names
from pipebench.report.definition import Published, RunReference
from pipebench.report.load import load_report, read_report
from tests.report.conftest import Write, changed

SHIPPED = report_names()


def test_rows_of_lists_are_combined(write: Write) -> None:
    report, _ = load_report(write())
    assert [row.name for row in report.rows] == ["first", "m8", "m16"]
    m16 = report.rows[2]
    assert m16.at == {"size": 16, "published": 2}
    assert m16.published == {"speedup": Published(2)}
    assert m16.runs["dp"] == RunReference(("dp.yaml", "train.minibatch_size=16"))


def test_shared_keys_of_rows_use_the_row_s_values_and_yield_to_its_own_keys(write: Write) -> None:
    rows = [
        {"name": "$mode", "for": {"mode": ["dp", "straight"]}},
        {"name": "none", "at": {"mode": "dp"}, "runs": {"straight": None, "dp": "straight.yaml"}},
    ]
    runs = {"dp": "dp.yaml", "straight": {"recipe": "$mode.yaml", "engine": "virtual", "seeds": [3, 4]}}
    data = changed(rows=rows, runs=runs, calibration=None, pictures=None, claims=None)
    report, asked = load_report(write(data))
    assert report.rows[0].runs["straight"] == RunReference(("dp.yaml",), "virtual", (3, 4))
    assert report.rows[2].runs == {"dp": RunReference(("straight.yaml",))}
    seeds = [
        each.loaded.recipe.train.seed
        for each in asked
        if (each.row, each.run, each.column) == ("dp", "straight", "ideal")
    ]
    assert seeds == [3, 4]


def test_columns_change_clusters_and_overrides_of_all_but_fixed_runs(write: Write) -> None:
    dp = {"recipe": "dp.yaml", "engine": "virtual", "columns": "same"}
    words = ["cluster.servers=4", "?model.width=0.25"]
    _, asked = load_report(write(changed(rows__0__runs__dp=dp, columns__slow__set=words)), ["first"])
    found = {(each.run, each.column): each for each in asked}
    assert found.keys() == {("dp", ""), ("straight", "ideal"), ("straight", "slow")}
    assert found["dp", ""].words == ("dp.yaml", "engine.kind=virtual")
    ideal, slow = (found["straight", column].loaded for column in ("ideal", "slow"))
    assert [each.cluster.name for each in (ideal, slow)] == ["cluster-a", "cluster-c"]
    assert [each.cluster.num_workers for each in (ideal, slow)] == [4, 4]
    assert [each.recipe.model["width"] for each in (ideal, slow)] == [0.125, 0.25]


def test_an_option_that_some_recipes_lack_is_left_out_for_those(write: Write) -> None:
    other = "s2vt/4x1-c-dp"
    rows = [{"name": "first", "runs": {"dp": "dp.yaml", "straight": other}}]
    words = ["?model.batch_norm=false"]
    data = changed(rows=rows, columns__slow={"set": words}, calibration=None, pictures=None, claims=None)
    _, asked = load_report(write(data))
    taken = {each.run: "model.batch_norm=false" in each.words for each in asked if each.column == "slow"}
    assert taken == {"dp": True, "straight": False}


def test_a_fault_without_an_optional_override_is_reported_alone(write: Write) -> None:
    words = ["?model.batch_norm=false", "parallelism.mod=dp"]
    with pytest.raises(RecipeError) as caught:
        load_report(write(changed(columns__slow={"set": words})))
    assert not any("batch_norm" in str(fault) for fault in caught.value.faults)
    assert any("parallelism.mod: unknown key" in str(fault) for fault in caught.value.faults)


def test_another_engine_for_all_that_columns_may_change(write: Write) -> None:
    dp = {"recipe": "dp.yaml", "columns": "same"}
    _, asked = load_report(write(changed(rows__0__runs__dp=dp)), ["first"], "virtual")
    assert {(each.run, each.loaded.recipe.engine.kind) for each in asked} == {
        ("dp", "simulated"),
        ("straight", "virtual"),
    }


@pytest.mark.parametrize(("only", "rows"), [(["m*"], ["m8", "m16"]), (["m8", "first"], ["first", "m8"])])
def test_rows_by_name_and_pattern(write: Write, only: list[str], rows: list[str]) -> None:
    report, asked = load_report(write(), only)
    assert [row.name for row in report.rows] == rows
    assert {each.row for each in asked} == {*rows}


def test_an_engine_whose_runs_lack_a_measure_s_metric_is_refused(write: Write) -> None:
    """Otherwise the page would be written anew with empty cells."""
    trained = {"recipe": "dp.yaml", "engine": "virtual"}
    path = write(changed(rows__0__runs__own=trained, measures__best={"value": "own.best_top1"}))
    message = (
        "measures.best.value: own.best_top1: run own has no best_top1: its engine is simulated, which trains nothing"
    )
    with pytest.raises(RecipeError, match=message):
        load_report(path, engine="simulated")
    load_report(path, ["m8"], "simulated")
    load_report(path)


def test_a_report_means_the_same_from_anywhere(write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    _, asked = load_report(Path("../small.yaml"), ["first"])
    assert {each.loaded.path.resolve() for each in asked} == {tmp_path / "dp.yaml", tmp_path / "straight.yaml"}


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_report_is_valid(name: str) -> None:
    report, asked = load_report(find_report(name))
    assert asked
    assert report.paper or not any(row.published for row in report.rows)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_row_of_a_shipped_report_can_be_made_alone(name: str) -> None:
    """Columns may name clusters and options of which this row has none."""
    report, _ = read_report(find_report(name))
    for row in {report.rows[0].name, report.rows[-1].name}:
        part, asked = load_report(find_report(name), [row])
        assert [each.name for each in part.rows] == [row]
        assert {each.row for each in asked} <= {row}
