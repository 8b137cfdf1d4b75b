"""`pipebench plan`: its output, JSON and picture, and refusals."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pipebench.cli import planning
from pipebench.cli.main import cli
from pipebench.cli.outputs import is_picture_by
from pipebench.cli.parameters import MOST_WORKERS, parse_levels
from pipebench.planner import coarsening
from pipebench.planner.cost_models import COST_MODELS
from pipebench.profile.stored import write_profile
from pipebench.recipe.load import load
from pipebench.show.plan_picture import MADE_BY
from pipebench.train.prepare import prepare
from tests.modes import WHOLE
from tests.patience import without_phases

PUBLISHED = Path(__file__).parents[3] / "shared" / "profiles"
VGG, GNMT = PUBLISHED / "vgg16_v100_b128.graph.txt", PUBLISHED / "gnmt8_v100.graph.txt"
published = pytest.mark.skipif(not VGG.exists(), reason="the artifact's profiles aren't beside this checkout")

# The first layer computes, the last has the weights: more replicas of the first are the best plan.
_NODE = "{} -- {} -- forward_compute_time={}, backward_compute_time={}, activation_size={}, parameter_size={}\n"
GRAPH = "".join(
    (
        _NODE.format("node1", "Input0", 0.0, 0.0, 0.0, 0.0),
        _NODE.format("node2", "Conv2d", 10.0, 20.0, 4e6, 4e4),
        _NODE.format("node3", "ReLU", 1.0, 2.0, 4e6, 0.0),
        _NODE.format("node4", "Linear", 1.0, 2.0, 1e6, 4e8),
        "\tnode1 -- node2\n\tnode2 -- node3\n\tnode3 -- node4\n",
    )
)
KEYS = {
    *("config", "mode", "bottleneck_s", "dp_bottleneck_s", "stages", "depth", "solve_s", "others", "refused"),
    *("cost_model", "cluster", "minibatch_size", "minibatch_s", "samples_per_s", "dp_minibatch_s", "dp_samples_per_s"),
    *("took_s", "num_states", "bottleneck_at_most", "minibatch_at_least_s", "tried_all"),
    *("speedup_over_dp", "bytes_per_sample", "dp_bytes_per_sample", "port_s", "memory_limit_bytes", "found_by", "plan"),
}
STAGE_KEYS = {"compute_s", "sync_s", "transfer_s", "stage_s", "memory_bytes", "in_flight", "virtual"}


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["plan", *arguments])


def answer(*arguments: str, others: bool = False) -> dict[str, Any]:
    result = invoke(*arguments, "--json", *([] if others or "auto" in arguments else ["--no-others"]))
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIPEBENCH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "small.graph.txt").write_text(GRAPH)
    return "small.graph.txt"


@published
@pytest.mark.parametrize(
    ("profile", "levels", "bottleneck_s"),
    [(VGG, "16@1.25e9", 0.0547949), (VGG, "4@1e10", 0.1701791), (GNMT, "16@3.125e9", 0.011081)],
    ids=str,
)
def test_the_artifact_s_cost_model_gives_the_artifact_s_bottlenecks(
    profile: Path, levels: str, bottleneck_s: float
) -> None:
    found = answer("--profile", str(profile), "--levels", levels, "--cost-model", "artifact")
    assert found["bottleneck_s"] == pytest.approx(bottleneck_s, abs=5e-8)
    assert max(stage["stage_s"] for stage in found["stages"]) == found["bottleneck_s"]


@published
@pytest.mark.parametrize(
    ("profile", "cost_model"),
    [
        pytest.param(profile, cost_model, id=f"{name}-{cost_model}", marks=pytest.mark.slow if slow else ())
        for name, profile in (("vgg16", VGG), ("gnmt8", GNMT))
        for cost_model in COST_MODELS
        for slow in [(name, cost_model) not in (("vgg16", "overlap"), ("gnmt8", "sosp19"))]
    ],
)
def test_no_stage_is_slower_than_the_bottleneck_on_two_levels(profile: Path, cost_model: str) -> None:
    found = answer("--profile", str(profile), "--levels", "4@1e10,4@1.25e9", "--cost-model", cost_model)
    slowest_s = max([stage["stage_s"] for stage in found["stages"]])
    assert max(slowest_s, found["port_s"]) <= found["bottleneck_s"] * (1 + 1e-9)
    assert sum(stage["replicas"] for stage in found["plan"]["stages"]) + found["idle_workers"] == 16


@pytest.mark.slow
@published
def test_sixteen_thousand_workers_and_bytes_that_no_cost_model_changes() -> None:
    found = answer("--profile", str(GNMT), "--levels", "16384@1.25e9")
    assert not found["is_simulated"]
    assert found["solve_s"] < 30
    sent = {
        model: answer("--profile", str(VGG), "--levels", "16@1.25e9", "--cost-model", model)["dp_bytes_per_minibatch"]
        for model in COST_MODELS
    }
    assert sent["overlap"] == sent["sosp19"] == sent["artifact"]
    weights = 4 * 138357544
    assert sent["overlap"]["all-reduce"] == pytest.approx(2 * 15 / 16 * weights, rel=1e-4)


def test_json_has_every_documented_key(graph: str) -> None:
    found = answer("--profile", graph, "--levels", "4@1e9", "--minibatch-size", "8", "--memory", "16GB", others=True)
    assert found.keys() >= KEYS
    assert all(stage.keys() == STAGE_KEYS for stage in found["stages"])
    text = (Path(__file__).parents[2] / "docs" / "planner.md").read_text()
    missing = {key for key in found.keys() | STAGE_KEYS | found["others"][0].keys() if f"`{key}`" not in text}
    missing -= {key for key in missing if key.startswith("dp_")}
    assert not missing
    assert found["samples_per_s"] == pytest.approx(8 * found["minibatches_per_s"])
    assert found["memory_limit_bytes"] == 16_000_000_000
    assert {found["mode"], *(plan["mode"] for plan in found["others"]), *found["refused"]} == {*WHOLE}


def test_the_text_explains_the_plan(graph: str) -> None:
    text = invoke("--profile", graph, "--levels", "4@1e9", "--minibatch-size", "8").output
    assert "small: 3-1 (pipedream)" in text
    assert "stage 0's computing" in text
    for word in ("cost model", "times", "bottleneck", "throughput", "data parallel", "bytes per sample", "samples/s"):
        assert word in text
    for mode in ("dp", "gpipe", "pipedream-flush", "model", "single"):
        assert mode in text


def test_names_of_layers_are_shortened_only_if_they_do_not_fit(graph: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`cross_entropy` alone in a stage was `cross_entr..`, and a name that was cut was followed by four dots."""
    monkeypatch.setenv("COLUMNS", "120")
    names = GRAPH.replace("node2", "convolution_of_pixels").replace("node3", "rectified_and_pooled")
    Path(graph).write_text(names)
    lines = invoke("--profile", graph, "--levels", "4@1e9", "--no-others").output.splitlines()
    assert any("  convolution_of_pixels  " in line for line in lines)
    assert any("  rectified_and_..node4 " in line for line in lines)


def test_without_a_size_rates_are_of_minibatches(graph: str) -> None:
    text = invoke("--profile", graph, "--levels", "4@1e9").output
    assert "minibatches/s" in text
    assert "samples/s" not in text
    assert "bytes per minibatch" in text
    found = answer("--profile", graph, "--levels", "4@1e9")
    assert (found["minibatch_size"], found["samples_per_s"], found["bytes_per_sample"]) == (None, None, None)


def test_memory_limits_the_plan(graph: str) -> None:
    # The Linear and its gradient need 800 MB wherever it is; two replicas of it with a stash more.
    free, tight = (
        answer("--profile", graph, "--levels", "4@1e9", *more)
        for more in ((), ("--memory", "850 MB", "--mode", "auto"))
    )
    assert free["memory_bytes"] > 0
    assert all(stage["memory_bytes"] <= 850e6 for stage in tight["stages"])
    refused = invoke("--profile", graph, "--levels", "4@1e9", "--memory", "100MB")
    assert refused.exit_code == 2
    assert "no plan of mode pipedream fits: the leanest needs" in refused.output


@pytest.mark.parametrize("mode", ["dp", "gpipe", "pipedream-flush", "model", "single", "auto"])
def test_every_mode_can_be_planned(graph: str, mode: str) -> None:
    found = answer("--profile", graph, "--levels", "4@1e9", "--mode", mode)
    assert mode in (found["mode"], "auto")
    if mode == "auto":
        assert all(plan["minibatch_s"] >= found["minibatch_s"] for plan in found["others"])


def test_a_recipe_on_its_own_cluster_and_on_others(few: str) -> None:
    own = answer(few)
    assert (own["minibatch_size"], own["mode"], own["runnable"]) == (32, "pipedream", True)
    larger = answer(few, "--cluster", "cluster-a", "--servers", "2", "--cost-model", "sosp19")
    assert (larger["num_workers"], larger["cost_model"]) == (8, "sosp19")
    assert answer(few, "--servers", "3")["num_workers"] == 12
    flat = answer(few, "train.minibatch_size=16", "--levels", "6@1e9", "--memory", "1GB", "--mode", "dp")
    assert (flat["config"], flat["minibatch_size"], flat["memory_limit_bytes"]) == ("6", 16, 1_000_000_000)
    cut = answer(few, "parallelism.mode=gpipe", "parallelism.microbatches=4")
    assert (cut["mode"], cut["microbatches"]) == ("gpipe", 4)


@pytest.mark.parametrize("overrides", [[], ["parallelism.microbatches=8", "parallelism.mode=zbv"]])
def test_other_modes_are_planned_like_recipes_of_these_modes(few: str, overrides: list[str]) -> None:
    """With as many microbatches and minibatches per update; so is the fastest, which a recipe of mode auto runs."""
    found = answer(few, *overrides, others=True)
    seen = ("config", "microbatches", "accumulate", "minibatch_s")
    assert {4, 8} & {plan["microbatches"] for plan in found["others"]}
    kinds = {(plan["microbatches"], plan["accumulate"]): plan for plan in found["others"]}
    assert len(kinds) > 2
    for plan in kinds.values():
        more = overrides[:1] if plan["microbatches"] > 1 else []
        own = answer(few, *more, f"parallelism.mode={plan['mode']}")
        assert [own[key] for key in seen] == [plan[key] for key in seen]
    fastest = min(found, *found["others"], key=lambda plan: plan["minibatch_s"])
    auto = [*overrides[:1], "parallelism.mode=auto"]
    assert answer(few, *auto, others=True)["mode"] == fastest["mode"]
    loaded = load(few, auto)
    planned = prepare(loaded.recipe, loaded.cluster, trains=False)
    assert planned.recipe.parallelism.mode == fastest["mode"]
    assert planned.setup.pipeline.microbatches == fastest["microbatches"]


def test_a_recipe_s_plan_is_shown_beside_the_best(few: str) -> None:
    """With its cuts, if it says where; the best is never slower than it."""
    best = answer(few)
    assert best["recipe_plan"] is None
    for plan, cuts in (("2-2", None), ("3-1", ["layer4"]), ("1-1-1", ["layer1", "layer3"])):
        overrides = [f"parallelism.plan={plan}", *([f"parallelism.cuts=[{','.join(cuts)}]"] if cuts else [])]
        found = answer(few, *overrides)
        named = found["recipe_plan"]
        assert named["config"] == ("straight" if plan == "1-1-1" else plan)
        assert found["minibatch_s"] == best["minibatch_s"] <= named["minibatch_s"] * (1 + 1e-9)
        printed = " ".join(invoke(few, *overrides, "--no-others").stdout.split())
        assert f"recipe's plan {named['config']}, " in printed
    assert answer(few, "parallelism.plan=2-2", "--mode", "gpipe")["recipe_plan"] is None
    assert answer(few, "parallelism.mode=dp", "parallelism.plan=2")["recipe_plan"]["replicas"] == [2]
    assert answer(few, "parallelism.mode=dp", "parallelism.plan=4")["recipe_plan"] is None  # the planner's
    assert answer(few, "parallelism.plan=3-1", "--cluster", "cluster-b", "--servers", "1")["recipe_plan"]
    wrong = invoke(few, "parallelism.plan=2-2", "parallelism.cuts=[layer1.2]")
    assert wrong.exit_code == 2
    assert "the model has no layer 'layer1.2'" in wrong.stderr
    unknown = invoke(few, "parallelism.plan=2-2", "parallelism.cuts=[w]").stderr
    assert re.search(r"no layer 'w'; its layers are layer0, .*, layer5\n", unknown)


def test_2bw_that_waits_with_as_many_in_flight_as_an_update_covers_has_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more in flight, which the reason for waiting is tried with, is more than its updates cover."""
    monkeypatch.setattr(planning, "_DIFFERS", 0.0)  # every plan counts as one that waits
    slow = ["parallelism.accumulate=2", "cluster.bandwidth=1Gbit/s", "train.minibatch_size=64"]
    result = invoke("modes/pipedream-2bw", *slow, "--no-others")
    assert result.exit_code == 0, result.stderr


def test_cuts_that_a_run_refuses_are_refused_by_plan_too() -> None:
    words = ["model.share_embedding=true", "parallelism.plan=1-1", "parallelism.cuts=[positions]"]
    refused = [
        without_phases(CliRunner().invoke(cli, [command, "small/gpt2/pipedream", *words]).stderr)
        for command in ("plan", "draw")
    ]
    assert refused[0] == refused[1]
    assert "parameter words.weight is tied: layers words, classifier share it and must stay in one stage" in refused[0]


def test_the_parts_of_a_stage_s_time_are_printed_and_no_mode_is_faster_than_the_fastest(few: str) -> None:
    found = answer(few)
    assert len(found["stage_times"]) == len(found["stages"])
    for stage, spent in zip(found["stages"], found["stage_times"], strict=True):
        assert sum(spent.values()) == pytest.approx(1.0)
        assert spent["computing"] == pytest.approx(stage["compute_s"] / found["minibatch_s"], rel=0.02)
    flushed = answer(few, "--mode", "model")["stage_times"]
    assert sum(each["computing"] for each in flushed) <= 1.0, "one works at a time"
    printed = invoke(few, "--mode", "model").stdout
    shares = [float(share) for share in re.findall(r" ([0-9.]+)% ", printed.split("of fastest")[-1])]
    assert max(shares) == 100.0


@pytest.mark.parametrize(
    ("latency", "cause"),
    [
        ("10us", "stage 3's computing: 370 us per minibatch (computing 290 us, transfers 80.4 us)"),
        ("50us", "stage 1's computing: 811 us per minibatch (computing 410 us, transfers 400 us)"),
    ],
)
def test_the_last_stage_waits_for_no_later_ones(few: str, latency: str, cause: str) -> None:
    """Latencies were called a `wait for minibatches to come back from later stages`, and left out of transfers."""
    keys = ("parallelism.mode=zero-bubble", "parallelism.microbatches=4", "train.minibatch_size=8")
    assert cause in " ".join(invoke(few, *keys, f"cluster.latency={latency}", "--no-others").output.split())


def test_picture(graph: str) -> None:
    result = invoke("--profile", graph, "--levels", "4@1e9", "--picture", "plan.png", "--json")
    assert result.exit_code == 0
    json.loads(result.stdout)
    assert is_picture_by(MADE_BY, Path("plan.png"))
    assert invoke("--profile", graph, "--levels", "2@1e9", "--picture", "plan.png").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to plan: name a recipe"),
        (["--profile", "P"], "a profile says nothing about links: add --levels"),
        (["--levels", "4@1e9"], "nothing to plan"),
        (["--profile", "P", "--levels", ""], "--levels: got '', allowed is N@BYTES_PER_S"),
        (["--profile", "P", "--levels", "16"], "--levels: got '16', allowed is N@BYTES_PER_S"),
        (["--profile", "P", "--levels", "0@1e9"], "--levels: got '0@1e9', allowed is"),
        (["--profile", "P", "--levels", "-4@1e9"], "--levels: got '-4@1e9', allowed is"),
        (["--profile", "P", "--levels", "4@1e9,"], "--levels: got '' in '4@1e9,', allowed is"),
        (["--profile", "P", "--levels", "4@-1"], "level 1: got '-1', allowed is a bandwidth of at least 1 B/s"),
        (["--profile", "P", "--levels", "8@10"], "level 1: got '10', which is 10 B/s: write its unit"),
        (["--profile", "P", "--levels", "4@inf"], "level 1: got 'inf', allowed is a bandwidth"),
        (["--profile", "P", "--levels", "4@1e9,2@nan"], "level 2: got 'nan', allowed is a bandwidth"),
        (["--profile", "P", "--levels", "1025@1e9,1024@1e9"], "at most 1,048,576 workers on 8 levels"),
        (["--profile", "P", "--levels", ",".join(["1@1e9"] * 9)], "at most 1,048,576 workers on 8 levels"),
        (["--profile", "P", "--levels", "4@1e9", "--cluster", "local"], "--cluster and --levels both say"),
        (["--profile", "P", "--levels", "4@1e9", "--servers", "2"], "--servers needs --cluster"),
        (["--profile", "P", "--cluster", "cluster-a", "--servers", "0"], "--servers: got '0', allowed is a whole"),
        (["--profile", "P", "--cluster", "clustera"], "did you mean 'cluster-a'?"),
        (["--profile", "nix.txt", "--levels", "4@1e9"], "profile nix.txt can't be read: No such file"),
        (["--profile", "P", "--levels", "4@1e9", "--cost-model", "overlapp"], "did you mean 'overlap'?"),
        (["--profile", "P", "--levels", "4@1e9", "--mode", "pipedrem"], "did you mean 'pipedream'?"),
        (["--profile", "P", "--levels", "4@1e9", "--minibatch-size", "-3"], "--minibatch-size: got '-3', allowed is"),
        (["--profile", "P", "--levels", "4@1e9", "--mode", "auto", "--no-others"], "--no-others goes with one mode"),
        (["--profile", "P", "--levels", "4@1e9", "--memory", "lots"], "--memory: got 'lots', allowed is a size"),
        (
            ["--profile", "P", "--levels", "4@1e9", "--latency", "10"],
            "--latency: got '10', which is 10 s: write its unit, such as 5 us",
        ),
        (["quickstart", "--levels", "4@1e9", "cluster.servers=2"], "recipe's cluster: leave out cluster.servers=2"),
        (
            ["quickstart", "--levels", "4@1e9", "cluster={name: local}"],
            "recipe's cluster: leave out cluster={name: local}",
        ),
        (["--profile", "P", "--levels", "4@1e9", "--latency", "-1us"], "--latency: got '-1us', allowed is a duration"),
        (["--profile", "P", "--cluster", "cluster-a", "--memory", "1GB"], "--memory goes with --levels"),
        (["quickstart", "--minibatch-size", "8"], "a recipe says train.minibatch_size=N"),
        (["quickstrt"], "did you mean 'quickstart'?"),
        (["P", "--levels", "4@1e9"], "looks like a profile and not like a recipe: write --profile small.graph.txt"),
        (["quickstart", "--profile", "P"], "has no times for 8 samples, only for 32"),
        (
            ["--profile", "P", "--levels", "4@1e9", "--picture", "nix/a.png"],
            "--picture: got nix/a.png, but there is no",
        ),
        (["--profile", "P", "--levels", "4@1e9", "--picture", "P"], "isn't a picture of a plan, so it is left alone"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_sentence(graph: str, arguments: list[str], message: str) -> None:
    result = invoke(*(graph if argument == "P" else argument for argument in arguments))
    assert result.exit_code == 2
    assert message in result.output
    said = without_phases(result.output)
    assert said.startswith("pipebench: error: ")
    assert said.count("\n") == 1


def test_a_size_that_a_json_profile_lacks(graph: str) -> None:
    from pipebench.profile.load import load_profile

    Path("p.json").write_text(write_profile(load_profile(graph, 8)))
    assert answer("--profile", "p.json", "--levels", "2@1e9")["minibatch_size"] == 8
    result = invoke("--profile", "p.json", "--levels", "2@1e9", "--minibatch-size", "16")
    assert (result.exit_code, "allowed are the sizes in p.json: 8" in result.output) == (2, True)


def test_levels_of_any_text_are_levels_or_one_sentence() -> None:
    random.seed(1)
    sentences = []
    pieces = [
        "4",
        "@",
        ",",
        "1e9",
        "-",
        ".",
        "e",
        "0",
        "inf",
        "nan",
        " ",
        "10Gbit/s",
        "\u0664",
        "9" * 400,
        "1e400",
        "\0",
    ]
    for _ in range(3000):
        text = "".join(random.choices(pieces, k=random.randint(0, 9)))
        try:
            levels = parse_levels(text).levels
        except ValueError as error:
            sentences.append(str(error))
        else:
            assert all(level.count >= 1 and level.bandwidth_bytes_per_s >= 1 for level in levels)
    assert len(sentences) > 1000
    assert all(len(sentence) < 400 and "\n" not in sentence for sentence in sentences)
    assert parse_levels(f"{MOST_WORKERS}@1e9").levels[0].count == MOST_WORKERS


def test_cost_models_are_listed() -> None:
    result = CliRunner().invoke(cli, ["ls", "cost-models"])
    assert [line.split()[0] for line in result.output.splitlines()] == [*COST_MODELS]


def test_the_planning_time_is_printed_with_its_parts(graph: str) -> None:
    took_s = answer("--profile", graph, "--levels", "4@1e9")["took_s"]
    parts = {name: value for name, value in took_s.items() if name != "in all"}
    assert parts.keys() == {"search", "simulation", "other modes"}
    assert sum(parts.values()) <= took_s["in all"]
    assert "took" in invoke("--profile", graph, "--levels", "4@1e9").output


def test_a_coarsened_search_prints_its_distance_from_the_bound(graph: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("--profile", "long.graph.txt", "--levels", "4@1e9", "--no-others")
    draw = random.Random(0).uniform
    lines = [_NODE.format(f"node{i}", "Linear", draw(1, 9), draw(1, 9), int(draw(1, 9e6)), 4e4) for i in range(60)]
    edges = "".join(f"\tnode{i} -- node{i + 1}\n" for i in range(59))
    Path("long.graph.txt").write_text("".join(lines) + edges)
    found = answer(*asked)
    assert (found["num_states"], found["bottleneck_at_most"]) == (61, 1.0)
    assert "at most" not in invoke(*asked).output
    numbers = {"MOST_EXACT": 50, "_MOST_EXACT_BRANCHES": 50, "_COARSE": 20, "_BACKDROP": 20, "_FINE": 20}
    for name, value in {**numbers, "NUM_GROUPS": 25}.items():
        monkeypatch.setattr(coarsening, name, value)
    coarsened = answer(*asked)
    assert coarsened["bottleneck_at_most"] > 1.0
    assert "61 places to cut are too many to try all" in " ".join(invoke(*asked).output.split())


@pytest.mark.parametrize(("cost_model", "anywhere"), [("overlap", False), ("sosp19", True), ("artifact", True)])
def test_only_plans_that_were_cut_anywhere_say_so(graph: str, cost_model: str, *, anywhere: bool) -> None:
    """Under `overlap`, and in chains, cuts follow the order of execution, and "cuts anywhere" was printed, too."""
    nodes = "".join(_NODE.format(f"node{i}", "Linear", 1.0, 2.0, 1e6, 1e6) for i in range(4))
    Path("diamond.graph.txt").write_text(
        nodes + "".join(f"\tnode{a} -- node{b}\n" for a, b in ((0, 1), (0, 2), (1, 3), (2, 3)))
    )
    asked = ("--levels", "4@1e9", "--cost-model", cost_model, "--no-others")
    said = [" ".join(invoke("--profile", name, *asked).output.split()) for name in ("diamond.graph.txt", graph)]
    assert ["cuts anywhere" in each for each in said] == [anywhere, False]


def test_a_plan_is_printed_with_its_distance_from_the_bound(graph: str) -> None:
    asked = ("--profile", graph, "--levels", "4@1e9", "--no-others")
    found = answer(*asked)
    assert found["tried_all"]
    assert 0.978 * found["minibatch_s"] <= found["minibatch_at_least_s"] <= found["minibatch_s"]
    said = " ".join(invoke(*asked).output.split())
    assert "at best no plan with NOAM or 1 more in flight is more than 0.1% faster: all that fit were" in said
    published = answer(*asked, "--cost-model", "sosp19")
    assert (published["minibatch_at_least_s"], published["tried_all"]) == (None, False)
    many = "".join(_NODE.format(f"node{i}", "Linear", 1.0 + i % 7, 2.0, 1e6, 1e8) for i in range(150))
    Path("many.graph.txt").write_text(many + "".join(f"\tnode{i} -- node{i + 1}\n" for i in range(149)))
    found = answer("--profile", "many.graph.txt", "--levels", "8@1e9")
    assert not found["tried_all"]
    assert 0.5 * found["minibatch_s"] < found["minibatch_at_least_s"] <= found["minibatch_s"]
    said = " ".join(invoke("--profile", "many.graph.txt", "--levels", "8@1e9", "--no-others").output.split())
    assert "at best no plan is more than" in said


def test_the_requested_plan_is_printed_before_other_modes_are_planned(
    graph: str, planned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many layers they take most of the time; an interrupt leaves the plan asked for printed and written."""
    asked = ("--profile", graph, "--levels", "4@1e9", "--mode", "gpipe")
    whole = invoke(*asked).stdout
    assert {*planned[:2]} == {"gpipe", "dp"}
    assert sorted(planned) == sorted(WHOLE)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(planning, "with_others", interrupted)
    result = invoke(*asked, "--picture", "plan.png")
    assert result.exit_code != 0
    assert "throughput" in result.stdout
    assert whole.startswith(result.stdout[: result.stdout.index("throughput")])
    assert is_picture_by(MADE_BY, Path("plan.png"))


def test_other_modes_can_be_left_out(graph: str, planned: list[str]) -> None:
    asked = ("--profile", graph, "--levels", "4@1e9", "--mode", "gpipe")
    every, alone = answer(*asked), answer(*asked, "--no-others")
    assert sorted(planned[-2:]) == ["dp", "gpipe"]
    assert [each["mode"] for each in alone["others"]] == ["dp"]
    same = {*every} - {"others", "refused", "solve_s", "took_s"}
    assert {key: every[key] for key in same} == {key: alone[key] for key in same}
    printed = invoke(*asked, "--no-others").stdout
    assert "data parallel" in printed
    assert "pipedream-2bw" not in printed
    assert "took" in printed
