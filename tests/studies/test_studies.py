"""The reports' scripts run; on a part of what they are about, since the whole takes minutes."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipebench.planner.cost_models import COST_MODELS
from pipebench.planner.planner import Planner
from pipebench.planner.plans import Request
from pipebench.profile.devices import DEVICES
from pipebench.profile.load import load_profile
from pipebench.report.catalog import find_report
from pipebench.report.load import load_report
from pipebench.zoo.ptb import ptb
from pipebench.zoo.wmt16 import wmt16
from reports.studies import (
    effects,
    gpu_profiles,
    planner_regret,
    planner_seconds,
    planner_vs_simulator,
    search_growth,
    table1_plans,
)
from reports.studies.planned_models import TableRow, analytic, cluster, published_rows, recipe
from tests.bench.planning import CASES, chain, seconds
from tests.patience import PATIENCE_S

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


def test_the_page_of_regrets_is_of_this_script() -> None:
    page = (Path(planner_regret.__file__).parents[1] / "planner_regret.md").read_text()
    for text in (planner_regret.HEAD, planner_regret.READING):
        assert text.strip() in page
    begins = tuple(f"| {kind} |" for kind in planner_regret.KINDS)
    rows = [line for line in page.splitlines() if line.startswith(begins)]
    assert len(rows) == 2 * len(planner_regret.KINDS)  # with the climb, and without
    documented = (Path(planner_regret.__file__).parents[2] / "docs" / "planner.md").read_text()
    assert all(row in documented for row in rows)


def test_table1_plans(capsys: pytest.CaptureFixture[str]) -> None:
    table1_plans.main([LONELY], [COST_MODELS["artifact"]])
    page = capsys.readouterr().out
    assert "| alexnet-1x4A | analytic, 256 | 3-1 | 1.00 |" in page
    assert "| `artifact` | 0 of 1 | - |" in page or "| `artifact` | 1 of 1 | - |" in page


def test_a_straight_plan_that_leaves_workers_idle_is_not_the_papers() -> None:
    subject = analytic("alexnet")
    planner = Planner(Request(subject.profile, cluster("cluster-a", 1), COST_MODELS["overlap"], 256), "pipedream")
    straight = replace(LONELY, replicas=(1, 1, 1, 1), config="Straight")
    for replicas, text, is_theirs in (((1, 1, 1), "straight of 3", False), ((1, 1, 1, 1), "straight", True)):
        plan = table1_plans._fixed(planner, replicas)
        assert (table1_plans._config(plan, straight), table1_plans._is(plan, straight)) == (text, is_theirs)


def test_table_1s_page_is_of_this_script() -> None:
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


def test_an_analytic_profile_is_that_of_the_recipe_unless_another_size_is_asked_for() -> None:
    own, other = analytic("gnmt-16"), analytic("gnmt-16", 32)
    assert (own.size, other.size) == (64, 32)
    weights = {name: size for row in own.profile.layers[64] for name, size in row.parameter_sizes.items()}
    # 16 LSTM layers, two embeddings, attention and classifier: the paper prints no size; by formula in tests/zoo.
    assert sum(weights.values()) == pytest.approx(1.11e9, rel=0.01)
    assert own.profile.state_bytes_per_byte == 2  # Adam, as the recipe says
    assert (own.profile.device, analytic("s2vt").profile.device) == ("V100", "Titan X")


def test_made_up_samples_have_the_shapes_of_the_data_and_depend_on_the_index_alone() -> None:
    like = wmt16(typical_length=7, vocabulary=16)
    samples = gpu_profiles.Noise(like, 2)
    fields = [*like.inputs, *like.targets]
    both, one = samples.fetch("train", [5, 9], fields), samples.fetch("train", [9], fields)
    for name, example in like.example(2).items():
        assert (both[name].shape, both[name].dtype) == (example.shape, example.dtype)
        assert torch.equal(both[name][1:], one[name])
    assert both["source_length"].tolist() == [7, 7]
    many = samples.fetch("train", range(200), ["source", "target_out"])
    assert {int(ids.min()) for ids in many.values()} == {1}
    assert {int(ids.max()) for ids in many.values()} == {15}
    assert not torch.equal(many["source"], many["target_out"])
    assert not torch.equal(samples.fetch("eval", [5], ["source"])["source"], both["source"][:1])


def test_made_up_samples_have_the_loss_of_the_data() -> None:
    like = ptb(bptt=3, vocabulary=10)
    targets = gpu_profiles.Noise(like, 10).fetch("train", [0, 1], like.targets)
    logits = torch.zeros(2, 3, 10)
    assert gpu_profiles.Noise(like, 10).loss(logits, targets) == like.loss(logits, targets) > 0


def test_gpu_profiles_measures_narrow_models_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpu_profiles.main(["gnmt8", "awd_lm", "--device", "cpu", "--small", "--out", str(tmp_path / "gpu")])
    assert capsys.readouterr().out.count(".profile.json") == 2
    for name, layer in (("gnmt8", "RecurrentAttention"), ("awd_lm", "CarriedLSTM")):
        profile = load_profile(tmp_path / "gpu" / f"{name}-small.profile.json")
        page = (tmp_path / "gpu" / f"{name}-small.md").read_text()
        assert (profile.source, {*profile.layers}, profile.load_s) == ("measured", {2}, {2: 0.0})
        assert all(row.forward_s > 0 for row in profile.layers[2])
        assert f"python -m reports.studies.gpu_profiles {name} --device cpu --small" in page
        assert layer in page
        assert str(tmp_path) not in page
        assert all(f" {row.name[:20]}" in page for row in profile.layers[2])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "torch finds no CUDA device here"),
        (["--small"], "torch finds no CUDA device here"),
        (["--device", "cpu"], "on a CPU add --small"),
    ],
)
def test_gpu_profiles_says_what_it_needs(
    arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=sentence):
        gpu_profiles.main([*arguments, "--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_gpu_profiles_refuses_unknown_models(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_profiles.main(["gnmt9"])
    assert "no model 'gnmt9', allowed are vgg16, resnet50, gnmt8, awd_lm" in capsys.readouterr().err


def test_gpu_profiles_needs_no_tracker() -> None:
    code = "import sys; sys.modules['mlflow'] = None; import reports.studies.gpu_profiles, zoo"
    root = Path(gpu_profiles.__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, timeout=PATIENCE_S)


@pytest.mark.parametrize(
    ("gpu", "entry"),
    [
        ("NVIDIA H200", "H200"),
        ("Tesla V100-PCIE-16GB", "V100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA TITAN X (Pascal)", "Titan X"),
        ("NVIDIA GeForce RTX 2080 Ti", "2080 Ti"),
        ("NVIDIA GB10", None),
    ],
)
def test_a_gpu_is_found_in_the_catalogue_by_its_full_name(gpu: str, entry: str | None) -> None:
    assert gpu_profiles._catalogued(gpu) == (DEVICES[entry] if entry else None)


def test_the_planners_bench_measures() -> None:
    assert all(value > 0 for value in seconds(chain(20, 0), "overlap", CASES[0].levels))


def test_the_page_of_effects_is_of_this_tree() -> None:
    """Every effect has its lines, and a quick row comes out as the page says."""
    page, row = (Path(effects.__file__).parents[1] / "effects.md").read_text(), "alexnet-2x8-b"
    assert page.startswith(effects.HEAD)
    lines = {line.split(" | ")[0]: line for line in page.splitlines() if line.startswith("| ")}
    assert all(page.count(f"| {effect.name} |") == 2 for effect in effects.EFFECTS)
    report, asked = load_report(find_report(effects.REPORT))
    rows = effects.Rows(report, {(each.row, each.run): each for each in asked if each.column == effects.COLUMN})
    place = 1 + rows.names.index(row)
    for name in ("nothing: all effects", "copies that the GPU waits for, between servers"):
        (effect,) = (each for each in effects.EFFECTS if each.name == name)
        assert lines[f"| {name}"].split("|")[1 + place].strip() == f"{rows.value(row, effect):.2f}"


def test_the_page_of_the_planner_s_seconds_is_of_this_script() -> None:
    page = (Path(planner_seconds.__file__).parents[1] / "planner_seconds.md").read_text()
    assert page.startswith(planner_seconds.HEAD)
    assert sum(line.startswith("| ") for line in page.splitlines()) == 2 + len(published_rows())
    text, said = planner_seconds.lines([LONELY], [COST_MODELS["artifact"]])
    assert "| alexnet, 4 workers of cluster-a | " in text
    assert " s under `artifact`: less than the paper's 8 s." in said


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
