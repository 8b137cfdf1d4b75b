"""Runs the reports' scripts on parts of their cases, since all take minutes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pipebench.planner.cost_models import COST_MODELS
from pipebench.planner.planner import Planner
from pipebench.planner.plans import Request
from pipebench.report.catalog import find_report
from pipebench.report.load import load_report
from reports.studies import (
    analytic_profile,
    effects,
    gpu_efficiencies,
    planner_regret,
    planner_seconds,
    planner_vs_simulator,
    search_growth,
    table1_plans,
)
from reports.studies.markdown import table
from reports.studies.planned_models import TableRow, analytic, cluster, published_rows, recipe
from tests.bench.planning import CASES, chain, seconds
from tests.profile.judging import VGG_FILE, vgg
from tests.studies.again import check_rows

LONELY = TableRow("t1-alexnet-1x4A", "alexnet", "cluster-a", 1, 4, (3, 1), "3-1", 1.0)


def test_planner_vs_simulator(capsys: pytest.CaptureFixture[str]) -> None:
    planner_vs_simulator.main([analytic("alexnet")], [cluster("cluster-a", 1)])
    page = capsys.readouterr().out
    for text in (
        "## Under `overlap`",
        "## Under `sosp19`",
        "## Under `artifact`",
        "| alexnet | cluster-a | 2-1-1 (shape",
    ):
        assert text in page


def test_plans_of_a_model_are_on_the_page_with_the_current_seconds() -> None:
    """The planner's and the simulator's, of AWD LM on cluster B."""
    rows = planner_vs_simulator.judge(analytic("awd lm"), cluster("cluster-b", 2), COST_MODELS["overlap"])
    check_rows(planner_vs_simulator._plans(rows).splitlines(), "planner_vs_simulator.md", "nox -s studies")


@pytest.mark.parametrize("larger", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_planner_regret(capsys: pytest.CaptureFixture[str], tmp_path: Path, larger: int) -> None:
    pages = []
    for again in (False, False, True):
        planner_regret.main(2, larger, tmp_path, again=again)
        pages.append(capsys.readouterr().out)
    assert pages[0] == pages[1] == pages[2]
    climbed, _ = pages[0].split(planner_regret.ALONE)
    assert climbed.count("| 2 | 100.0 % | 0 | 0 |") == len(planner_regret.KINDS)
    assert f"Plans faster than that bound: 0 in {6 + 3 * larger} instances." in pages[0]
    assert len(json.loads((tmp_path / "small.json").read_text())) == 2 * len(planner_regret.KINDS)


def test_the_page_of_regrets_equals_the_script_s() -> None:
    page = (Path(planner_regret.__file__).parents[1] / "planner_regret.md").read_text()
    for text in (planner_regret.HEAD, planner_regret.READING):
        assert text.strip() in page
    begins = tuple(f"| {kind} |" for kind in planner_regret.KINDS)
    rows = [line for line in page.splitlines() if line.startswith(begins)]
    assert len(rows) == 2 * len(planner_regret.KINDS)  # with the climb, and without
    documented = (Path(planner_regret.__file__).parents[2] / "docs" / "planner.md").read_text()
    assert all(row in documented for row in rows)


@pytest.mark.parametrize(("kind", "seed"), [("RNN-like", 200124), ("random", 200178), ("CNN-like", 200042)])
def test_a_large_regret_is_current(kind: str, seed: int) -> None:
    judged = planner_regret.judge(planner_regret.instance(kind, seed))
    row = f"| {kind} {seed} | {judged.chosen} | {judged.best} | {100 * judged.regret:.1f} % |"
    check_rows([row], "planner_regret.md")


def test_table1_plans(capsys: pytest.CaptureFixture[str]) -> None:
    table1_plans.main([LONELY], [COST_MODELS["artifact"]])
    page = capsys.readouterr().out
    assert "| alexnet-1x4A | analytic, 256 | 3-1 | 1.00 |" in page
    assert "| `artifact` | 0 of 1 | - |" in page or "| `artifact` | 1 of 1 | - |" in page


@pytest.mark.parametrize("name", ["t1-gnmt-8-1x4A", "t1-s2vt-4x1C"])
def test_quick_rows_of_table_1_are_planned_as_on_the_page(name: str) -> None:
    """The seconds of planning aren't compared: the page of these has the same plans."""
    (row,) = (each for each in published_rows() if each.name == name)
    where, subject = cluster(row.cluster, row.servers, limited=True), analytic(row.model)
    made = []
    for model in COST_MODELS.values():
        case = table1_plans.Case(row, subject, where, model, table1_plans.choose(subject, where, model, row))
        made.append(table1_plans._line(case))
    check_rows(table([], made).splitlines()[2:], "table1_plans.md", "nox -s studies")
    text, _ = planner_seconds.lines([row], [*COST_MODELS.values()])
    first, *own = text.splitlines()[-1].split(" | ")
    page = (Path(planner_seconds.__file__).parents[1] / "planner_seconds.md").read_text()
    (kept,) = (line.split(" | ")[1:] for line in page.splitlines() if line.startswith(f"{first} | "))
    again = "planner_seconds.md is old: `python -m reports.studies.planner_seconds` makes it again"
    assert kept[1::2] == own[1::2], again


def test_a_straight_plan_that_leaves_workers_idle_is_not_the_papers() -> None:
    subject = analytic("alexnet")
    planner = Planner(Request(subject.profile, cluster("cluster-a", 1), COST_MODELS["overlap"], 256), "pipedream")
    straight = replace(LONELY, replicas=(1, 1, 1, 1), config="Straight")
    for replicas, text, is_theirs in (((1, 1, 1), "straight of 3", False), ((1, 1, 1, 1), "straight", True)):
        plan = table1_plans._fixed(planner, replicas)
        assert (table1_plans._config(plan, straight), table1_plans._is(plan, straight)) == (text, is_theirs)


def test_table_1_s_page_equals_the_script_s() -> None:
    page = (Path(table1_plans.__file__).parents[1] / "table1_plans.md").read_text()
    for text in (table1_plans.HEAD, table1_plans.DIFFERENCES, table1_plans.NOTES):
        assert text.strip() in page


@pytest.mark.parametrize(("servers", "kinds_of_links"), [(1, 1), (2, 3)])
def test_every_variation_changes_one_thing(servers: int, kinds_of_links: int) -> None:
    where, model = cluster("cluster-a", servers), COST_MODELS["overlap"]
    choice = table1_plans.choose(analytic("alexnet"), where, model, LONELY)
    case = table1_plans.Case(LONELY, analytic("alexnet"), where, model, choice)
    found = list(table1_plans.variations(case))
    for text, subject, other_where, other_model in found:
        changed = [subject is not case.subject, other_where != where, other_model is not model]
        assert changed.count(True) == 1, text
    assert len({text for text, *_ in found}) == len(found) == 2 + 4 + kinds_of_links * len(table1_plans.FACTORS)


def test_every_row_of_table_1_has_a_full_size_recipe_on_its_clusters_device() -> None:
    rows = published_rows()
    assert len(rows) == 14
    for row in rows:
        where = cluster(row.cluster, row.servers)
        assert sum(row.replicas) == row.workers == where.num_workers
        assert cluster(recipe(row.model).cluster.name, 1).device == where.device


def test_an_analytic_profile_is_the_recipe_s_unless_another_size_is_given() -> None:
    own, other = analytic("gnmt-16"), analytic("gnmt-16", 32)
    assert (own.size, other.size) == (64, 32)
    weights = {name: size for row in own.profile.layers[64] for name, size in row.parameter_sizes.items()}
    # 16 LSTM layers, two embeddings, attention and classifier: the paper prints no size; by formula in tests/zoo.
    assert sum(weights.values()) == pytest.approx(1.11e9, rel=0.01)
    assert own.profile.state_bytes_per_byte == 2  # Adam, as the recipe says
    assert (own.profile.device, analytic("s2vt").profile.device) == ("V100", "Titan X")


def test_the_planner_s_bench_measures() -> None:
    assert all(value > 0 for value in seconds(chain(20, 0), "overlap", CASES[0].levels))


@pytest.mark.slow
def test_the_page_of_effects_is_current() -> None:
    """Every effect has its lines, and a quick row comes out as the page says."""
    page, row = (Path(effects.__file__).parents[1] / "effects.md").read_text(), "alexnet-2x8-b"
    assert page.startswith(effects.HEAD)
    lines = {line.split(" | ")[0]: line for line in page.splitlines() if line.startswith("| ")}
    assert all(page.count(f"| {effect.name} |") == 2 for effect in effects.EFFECTS)
    report, asked = load_report(find_report(effects.REPORT))
    rows = effects.Rows(report, {(each.row, each.run): each for each in asked if each.column == effects.COLUMN})
    place = 1 + rows.names.index(row)
    usual = effects.EFFECTS[0]
    own = f"{rows.value(row, usual, effects.OWN):.2f} | {rows.plan(row, usual)} |"
    assert [line.endswith(own) for line in page.split(effects.OWN_HEAD)[1].splitlines() if row in line] == [True]
    for name in ("nothing: all effects", "copies that the GPU waits for, between servers"):
        (effect,) = (each for each in effects.EFFECTS if each.name == name)
        assert lines[f"| {name}"].split("|")[1 + place].strip() == f"{rows.value(row, effect):.2f}"


def test_the_page_of_the_planner_s_seconds_equals_the_script_s() -> None:
    page = (Path(planner_seconds.__file__).parents[1] / "planner_seconds.md").read_text()
    assert page.startswith(planner_seconds.HEAD)
    assert sum(line.startswith("| ") for line in page.splitlines()) == 2 + len(published_rows())
    text, said = planner_seconds.lines([LONELY], [COST_MODELS["artifact"]])
    assert "| alexnet, 4 workers of cluster-a | " in text
    assert " s under `artifact`: less than the paper's 8 s." in said


@pytest.mark.slow
def test_growth_of_the_transformer_is_current() -> None:
    name = next(iter(search_growth.MODELS))
    rows = search_growth.rows(name, search_growth.trace_of(search_growth.MODELS[name]))
    check_rows(table([], rows).splitlines()[2:], "search_growth.md")


@pytest.mark.skipif(not VGG_FILE.exists(), reason="needs the PipeDream artifact's profiles in ../shared/profiles")
def test_computed_times_of_vgg_s_layers_are_current() -> None:
    check_rows(analytic_profile._layers(vgg()).splitlines(), "analytic_profile.md", "nox -s studies")


def test_errors_of_alexnet_s_computed_layers_are_current() -> None:
    check_rows(table([], [gpu_efficiencies._row("alexnet")]).splitlines()[2:], "gpu_efficiencies.md", "nox -s studies")


def test_growth_that_slows_a_stage() -> None:
    """Four stages of 1 s; from 10 s on one has 2 s more of work, from 20 s on half as much less in the next."""
    page = (Path(search_growth.__file__).parents[1] / "search_growth.md").read_text()
    assert page.startswith(search_growth.HEAD)
    trace = search_growth.Trace((1.0,) * 4, ((10.0, 0, 2.0), (20.0, 1, -1.0)), 30.0, 8, 40)
    worst, mean = trace.gains(1.0)
    assert worst == pytest.approx(3 / 1.25)
    assert mean == pytest.approx((10 + 10 / 1.5 + 10 / 1.25) / (10 + 10 / 3 + 10 / 3))
    factor = search_growth.needed(lambda each: trace.gains(each)[0], worst)
    assert factor == pytest.approx(1.0, abs=2e-3)
    assert search_growth.needed(lambda each: trace.gains(each)[0], 4.0) is None, "no more than there are stages"
    as_printed, *needed = search_growth.rows("made up", trace)
    assert as_printed[2:4] == ["1", "8 of 40"]
    assert [row[1] for row in needed[::2]] == [
        "3.45x as over GPipe, at the worst",
        "5.21x as over PipeDream, at the worst",
    ]
