"""The choice of runs that are compared, and the values of a row of one run or several seeds."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from pipebench.recipe.catalog import find_recipes, recipes_folder
from pipebench.recipe.load import load_file
from pipebench.show.comparison import (
    REACHED_HEADING,
    baseline,
    groups,
    headings,
    rows,
    short_names,
    speed_up,
    speed_ups,
)
from pipebench.show.verdict import comparison_markdown, limit_of, verdict
from pipebench.train.result import COMPLETED, DIVERGED, INTERRUPTED, MISSED, REACHED, RunResult
from tests.results import DP, PIPEDREAM

NOTHING: Mapping[str, str] = {}
RECIPE = {
    "name": "quickstart-dp",
    "model.name": "vgg16",
    "dataset.name": "mnist5k",
    "train.seed": "0",
    "train.minibatch_size": "32",
    "train.optimizer.name": "sgd",
    "train.optimizer.lr": "0.08",
    "train.schedule.name": "cosine",
    "train.target.value": "0.95",
    "train.max_epochs": "10",
    "cluster.name": "cluster-a",
    "cluster.servers": "1",
    "parallelism.mode": "dp",
    "engine.kind": "virtual",
    "engine.timing": "auto",
    "engine.stall_limit_s": "300.0",
    "engine.silence_limit_s": "30.0",
}


def dp(seed: int = 0, time_s: float = 6.0, changes: Mapping[str, str] = NOTHING) -> RunResult:
    metrics = {**DP.metrics, "time_to_accuracy_s": time_s}
    return replace(
        DP, name=" ".join(["dp", *changes.values()]), seed=seed, metrics=metrics, recipe={**RECIPE, **changes}
    )


def pipedream(seed: int = 0, time_s: float = 2.0, changes: Mapping[str, str] = NOTHING) -> RunResult:
    own = {"name": "pipedream", "train.optimizer.lr": "0.02", "parallelism.mode": "pipedream"}
    metrics = {**DP.metrics, "time_to_accuracy_s": time_s}
    return replace(PIPEDREAM, name="pipedream", seed=seed, metrics=metrics, recipe={**RECIPE, **own, **changes})


def column(results: list[RunResult], heading: str) -> dict[str, str]:
    index = headings(results).index(heading)
    return {row[0]: row[index] for group in groups(results) for row in rows(results, group)}


def test_a_row_is_measured_against_the_dp_of_its_own_cluster() -> None:
    results = [
        dp(time_s=3.0, changes={"cluster.servers": "1"}),
        dp(changes={"cluster.servers": "3"}),
        pipedream(changes={"cluster.servers": "3"}),
    ]
    assert column(results, "vs dp")["pipedream"] == "3.00x"
    assert [group.title for group in groups(results)] == ["cluster.servers=1", "cluster.servers=3"]
    assert [len(group.entries) for group in groups(results)] == [1, 2]


@pytest.mark.parametrize(
    "change",
    [
        {"cluster.name": "cluster-b"},
        {"cluster.servers": "2"},
        {"model.name": "resnet50"},
        {"model.width": "0.5"},
        {"dataset.name": "imagenet"},
        {"train.target.value": "0.97"},
        {"train.minibatch_size": "64"},
        {"train.optimizer.name": "adam"},
        {"train.max_epochs": "20"},  # the cosine ends with it
        {"engine.kind": "distributed"},
        {"engine.timing": "measured"},
    ],
)
def test_a_comparison_varies_one_thing(change: Mapping[str, str]) -> None:
    results = [dp(), pipedream(changes=change)]
    assert column(results, "vs dp")["pipedream"] == "-"
    assert len(groups(results)) == 2
    (key, value) = next(iter(change.items()))
    assert groups(results)[1].title == f"{key}={value}"


@pytest.mark.parametrize(
    "change",
    [
        {"train.optimizer.lr": "0.5"},
        {"train.schedule.warmup_epochs": "2"},
        {"model.leaves": "[Block]"},
        {"engine.stall_limit_s": "1.0"},
        {"parallelism.plan": "2-1"},
    ],
)
def test_keys_that_may_differ_with_the_mode(change: Mapping[str, str]) -> None:
    results = [dp(), pipedream(changes=change)]
    assert column(results, "vs dp")["pipedream"] == "3.00x"
    assert [group.title for group in groups(results)] == [""]


def test_the_number_of_epochs_does_not_count_if_the_rate_does_not_depend_on_it() -> None:
    constant = {"train.schedule.name": "constant"}
    assert len(groups([dp(changes=constant), pipedream(changes={**constant, "train.max_epochs": "20"})])) == 1


def test_a_user_s_schedule_depends_on_the_number_of_epochs() -> None:
    """It maps the fraction that is done; 0.2.0 compared runs of other lengths, whose rates differ throughout."""
    own = {"train.schedule.name": "null", "train.schedule.target": "mine:falling"}
    assert len(groups([dp(changes=own), pipedream(changes={**own, "train.max_epochs": "20"})])) == 2


def test_runs_of_other_seeds_are_no_baseline() -> None:
    assert column([dp(seed=0), pipedream(seed=1)], "vs dp")["pipedream"] == "-"
    assert column([dp(seed=1), pipedream(seed=1)], "vs dp")["pipedream"] == "3.00x"
    assert column([dp(seed=0), dp(seed=1), pipedream(seed=0)], "vs dp")["pipedream"] == "-"


def test_other_seeds_are_reported_below_the_table() -> None:
    """Once the table had no speed-up for that reason, a sentence below it had one, and neither named the seeds."""
    (group,) = groups([dp(seed=0), dp(seed=1), pipedream(seed=0)])
    assert verdict(group)[1] == "Rows have other seeds, which change how many epochs it takes to a target."
    (group,) = groups([dp(seed=0), dp(seed=1), pipedream(seed=0), pipedream(seed=1)])
    assert not any("seeds" in sentence for sentence in verdict(group))


def test_without_dp_there_is_no_speed_up() -> None:
    assert "vs dp" not in headings([PIPEDREAM])


def test_speed_ups_are_of_time_to_accuracy_and_of_epochs() -> None:
    (group,) = groups([DP, PIPEDREAM])
    entry, base = group.entries
    assert baseline(entry, group.entries) is base
    assert speed_up(entry, base) == 3.0
    assert speed_up(entry, base, "epoch_time_s") == 1.0
    assert speed_up(entry, None) is None


def test_a_missed_run_has_no_time_and_no_speed_up() -> None:
    results = [DP, replace(PIPEDREAM, outcome=MISSED)]
    (group,) = groups(results)
    row = rows(results, group)[1]
    assert row[:8] == ("pipedream", "straight", "128", "2,222", "missed", "-", "-", "1.80 s")
    assert "vs dp" not in headings([replace(DP, outcome=DIVERGED), PIPEDREAM])


def test_seeds_of_a_recipe_are_one_row_with_median_range_and_how_many_reached() -> None:
    results = [dp(seed, time_s) for seed, time_s in enumerate((6.0, 7.0, 9.0))]
    results += [pipedream(seed, time_s) for seed, time_s in enumerate((2.0, 3.5, 4.0))]
    assert column(results, REACHED_HEADING) == {"dp": "3 of 3", "pipedream": "3 of 3"}
    assert column(results, "time to accuracy")["dp"] == "7.00 s [6.00 s to 9.00 s]"
    assert column(results, "vs dp")["pipedream"] == "2.00x"
    assert column(results, "epoch time")["dp"] == "1.80 s", "what all seeds agree on has no range"


def test_a_missed_seed_counts_as_an_infinite_time() -> None:
    """The median was of the seeds that reached the target alone, so a mode that mostly missed looked like its best."""
    results = [dp(0), dp(1, 9.0), dp(2, 7.0), pipedream(0), pipedream(1, 3.5), replace(pipedream(2), outcome=DIVERGED)]
    assert column(results, REACHED_HEADING)["pipedream"] == "2 of 3"
    assert column(results, "time to accuracy")["pipedream"] == "3.50 s [2.00 s to missed]"
    assert column(results, "vs dp")["pipedream"] == "2.00x"
    (group,) = groups(results)
    assert verdict(group)[0].startswith("pipedream is first to the target 0.95 with most seeds: in 3.50 s, 2.00x as")
    data = group.rows[0].to_dict()
    assert (data["time_to_accuracy_s_min"], data["time_to_accuracy_s_max"]) == (2.0, None), "JSON has no infinity"


def test_half_of_the_seeds_missed_is_missed() -> None:
    results = [dp(0), dp(1), pipedream(0), replace(pipedream(1), outcome=MISSED)]
    assert column(results, REACHED_HEADING)["pipedream"] == "1 of 2"
    assert column(results, "time to accuracy")["pipedream"] == "missed"
    assert column(results, "vs dp")["pipedream"] == "-"


def test_a_row_that_missed_with_half_of_its_seeds_is_not_the_first_to_the_target() -> None:
    partly = [dp(0, 1.0), replace(dp(1), outcome=MISSED)]
    (group,) = groups([*partly, pipedream(0), pipedream(1)])
    assert [row.name for row in group.rows] == ["pipedream", "dp"]
    assert verdict(group)[0] == "Only pipedream reached the target 0.95 with most seeds: in 2.00 s."
    (group,) = groups([*partly, pipedream(0), replace(pipedream(1), outcome=MISSED)])
    assert verdict(group)[0] == "None reached the target 0.95 with most seeds."


def test_without_a_target_nothing_is_counted() -> None:
    results = [replace(dp(seed), outcome=COMPLETED) for seed in (0, 1)]
    assert column(results, REACHED_HEADING) == {"dp": "-"}
    assert "time to accuracy" not in headings(results)


@pytest.mark.parametrize("outcome", [DIVERGED, INTERRUPTED])
def test_a_run_that_ended_early_makes_no_target_of_others_that_have_none(outcome: str) -> None:
    """In 0.2.0 one learning rate that diverged hid speed-ups and throughputs: `None reached the target`."""
    rates = {"dp": 1000.0, "gpipe": 500.0, "pipedream": 3000.0}
    found = [timed(mode, None, throughput_samples_per_s=rate) for mode, rate in rates.items()]
    aimless = [{key: text for key, text in each.recipe.items() if "target" not in key} for each in found]
    without = [replace(each, recipe=recipe) for each, recipe in zip(found, aimless, strict=True)]
    ended = [without[0], replace(without[1], outcome=outcome), without[2]]
    (group,) = groups(ended)
    assert [row.name for row in group.rows] == ["pipedream", "dp", "gpipe"]
    assert verdict(group)[0].startswith("pipedream has the highest throughput")
    assert column(ended, "vs dp") == column(without, "vs dp")
    assert column(ended, "time to accuracy") == {"pipedream": "-", "dp": "-", "gpipe": outcome}
    assert column([*ended, replace(ended[1], seed=1)], REACHED_HEADING) == {"pipedream": "-", "dp": "-", "gpipe": "-"}


def test_markdown_is_a_table_and_a_sentence_each() -> None:
    lines = comparison_markdown([DP, PIPEDREAM]).splitlines()
    assert lines[0].startswith("| run | plan | samples per update | samples/s | time to accuracy | vs dp |")
    assert lines[1].count("---") == lines[0].count("|") - 1
    assert lines[2].startswith("| pipedream | straight | 128 | 2,222 | 2.00 s | 3.00x |")
    assert lines[5].startswith("pipedream is first to the target: in 2.00 s, 3.00x as fast as dp with 6.00 s")
    assert lines[7] == "- quickstart-dp: reached top1 0.95 (top1 0.957) after 3 epochs"


def test_markdown_has_a_table_per_group_and_distinguishes_seeds() -> None:
    text = comparison_markdown([dp(seed=0), dp(seed=1), dp(changes={"cluster.servers": "2"})])
    assert text.count("| run | plan | reached |") == 2
    assert "**cluster.servers=2**\n\n| run" in text
    assert "- dp, seed 1: reached" in text


@pytest.mark.parametrize("folder", ["quickstart", "gnmt8", "vgg16", "small/gnmt8"])
def test_shipped_recipes_are_comparable_with_their_dp(folder: str) -> None:
    loaded = [load_file(path) for path in find_recipes(str(recipes_folder() / folder))]
    results = [
        replace(DP, name=each.recipe.name, mode=each.recipe.parallelism.mode, recipe=each.flat) for each in loaded
    ]
    clusters = {(each.recipe.cluster.name, each.recipe.cluster.servers) for each in loaded}
    assert len(groups(results)) == len(clusters)
    assert "-" not in {row: cell for row, cell in column(results, "vs dp").items() if row != "single"}.values()


def swept(servers: int, workers: int, epoch_s: float, mode: str = "dp", **others: str) -> RunResult:
    varied = {"cluster.servers": str(servers), **others}
    base = dp() if mode == "dp" else pipedream()
    name = f"{mode}-servers={servers}{''.join(f',{key}={value}' for key, value in others.items())}"
    metrics = {**base.metrics, "epoch_time_s": epoch_s, "num_workers": workers}
    return replace(base, name=name, metrics=metrics, varied=varied, recipe={**base.recipe, "name": mode, **varied})


def test_runs_of_a_sweep_are_one_group() -> None:
    results = [swept(1, 4, 8.0), swept(2, 8, 5.0), swept(1, 4, 4.0, "pipedream"), swept(2, 8, 2.0, "pipedream")]
    assert [(group.title, len(group.entries)) for group in groups(results)] == [("", 4)]
    untrained = [replace(each, outcome=COMPLETED) for each in results]
    faster = [row[headings(untrained).index("vs dp")] for row in rows(untrained, groups(untrained)[0])]
    assert faster == ["1.00x", "1.00x", "2.00x", "2.50x"], "against dp on as many servers"


def test_a_sweep_over_workers_shows_scaling() -> None:
    results = [swept(1, 4, 8.0), swept(2, 8, 5.0), swept(4, 16, 4.0), swept(1, 4, 4.0, "pipedream")]
    assert headings(results)[-3:] == ("devices", "speed-up", "efficiency")
    assert [row[-3:] for row in rows(results, groups(results)[0])] == [
        ("4", "1.00x", "100.0%"),
        ("8", "1.60x", "80.0%"),
        ("16", "2.00x", "50.0%"),
        ("4", "1.00x", "100.0%"),
    ]


def test_slices_count_as_devices() -> None:
    """8 workers on a device each, then 4 on four each."""
    tensor = "parallelism.tensor"
    results = [swept(1, 8, 8.0, **{tensor: "1"}), swept(2, 4, 10.0, **{tensor: "4"})]
    assert [row[-3:] for row in rows(results, groups(results)[0])] == [
        ("8", "1.00x", "100.0%"),
        ("16", "0.80x", "40.0%"),
    ]


def test_slices_that_were_chosen_count_as_devices() -> None:
    """0.2.0: a traceback, `int("auto")`, at the end of every run with `mode: auto, tensor: auto`."""
    chosen = [swept(1, 8, 8.0), swept(2, 4, 10.0)]
    results = [
        replace(
            each, metrics={**each.metrics, "num_devices": count}, recipe={**each.recipe, "parallelism.tensor": "auto"}
        )
        for each, count in zip(chosen, (8, 16), strict=True)
    ]
    assert [row[-3] for row in rows(results, groups(results)[0])] == ["8", "16"]


def test_the_baseline_of_a_row_is_the_most_similar_run() -> None:
    depth = "parallelism.depth"
    results = [swept(s, 4 * s, time_s / s, **{depth: d}) for s in (1, 2) for d, time_s in (("1", 8.0), ("4", 6.0))]
    assert [row[-2] for row in rows(results, groups(results)[0])] == ["1.00x", "1.00x", "2.00x", "2.00x"]


def test_a_sweep_over_something_else_has_no_such_columns() -> None:
    results = [replace(swept(1, 4, 8.0), name=f"dp-depth={d}", varied={"parallelism.depth": d}) for d in ("1", "2")]
    assert "efficiency" not in headings(results)
    plans = [replace(each, name=f"dp-plan={plan}") for each, plan in zip(results, ("2-1-1", "2-1-2"), strict=True)]
    assert [row[0] for group in groups(plans) for row in rows(plans, group)] == ["plan=2-1-1", "plan=2-1-2"]


def test_a_run_s_speed_up_is_over_the_dp_run_of_its_seed() -> None:
    def run(mode: str, seed: int, tta_s: float, epoch_s: float, outcome: str = REACHED) -> RunResult:
        metrics = {"time_to_accuracy_s": tta_s, "epoch_time_s": epoch_s}
        recipe = {"parallelism.mode": mode}
        return replace(DP, name=mode, mode=mode, seed=seed, outcome=outcome, metrics=metrics, recipe=recipe)

    results = [run("dp", 0, 8.0, 2.0), run("dp", 1, 6.0, 2.0), run("gpipe", 0, 2.0, 1.0), run("gpipe", 1, 1.0, 4.0)]
    reported = {key: tuple(values.values()) for key, values in speed_ups(results).items()}
    assert reported == {
        ("dp", None): (1.0, 1.0), ("dp", 0): (1.0, 1.0), ("dp", 1): (1.0, 1.0),
        ("gpipe", None): (7.0 / 1.5, 2.0 / 2.5), ("gpipe", 0): (4.0, 2.0), ("gpipe", 1): (6.0, 0.5),
    }  # fmt: skip
    missed = speed_ups([*results[:3], run("gpipe", 1, 1.0, 4.0, MISSED)])
    assert missed["gpipe", 1] == {"epoch_speedup_over_dp": 0.5}
    assert speed_ups(results[2:])["gpipe", 0] == {}, "there is no dp to compare with"


def timed(mode: str, time_s: float | None, samples: int = 32, **metrics: float) -> RunResult:
    """A run of 4 workers, simulated if it has no time to accuracy."""
    own = {"throughput_samples_per_s": 1000.0, "samples_per_update": samples, "epoch_time_s": 1.0, "num_workers": 4}
    reached = {} if time_s is None else {"time_to_accuracy_s": time_s, "epochs_to_target": 2.0}
    recipe = {**RECIPE, "parallelism.mode": mode, "train.target.metric": "top1"}
    outcome = COMPLETED if time_s is None else REACHED
    return replace(
        DP, name=mode, mode=mode, outcome=outcome, recipe=recipe, metrics={**own, **reached, **metrics}, stages=()
    )


def stage(compute_s: float, replicas: int = 1, samples: int = 32) -> dict[str, float]:
    times = {"forward_s": compute_s / 2, "backward_s": compute_s / 2, "update_s": 0.0}
    return {**times, "replicas": replicas, "samples_per_update": samples}


def test_rows_are_sorted_by_the_target() -> None:
    asked = [timed("dp", 3.0), replace(timed("gpipe", 1.0), outcome=MISSED), timed("pipedream", 2.0)]
    assert [row.name for row in groups(asked)[0].rows] == ["pipedream", "dp", "gpipe"]
    rates = [timed(mode, None, throughput_samples_per_s=rate) for mode, rate in (("dp", 5.0), ("gpipe", 7.0))]
    assert [row.name for row in groups(rates)[0].rows] == ["gpipe", "dp"]
    named = [replace(each, varied={"parallelism.mode": each.mode}) for each in asked]
    assert [row.name for row in groups(named)[0].rows] == ["pipedream", "dp", "gpipe"]
    rated = [
        replace(each, name=f"a-{rate}", varied={"cluster.bandwidth": rate})
        for each, rate in zip(asked, ("1 Gbit/s", "10 Gbit/s", "25 Gbit/s"), strict=True)
    ]
    assert [row.mode for row in groups(rated)[0].rows] == ["dp", "gpipe", "pipedream"]


def test_a_simulated_comparison_has_no_columns_of_dashes() -> None:
    results = [timed("dp", None, 128), timed("pipedream", None, epoch_time_s=0.5, throughput_samples_per_s=2000.0)]
    assert headings(results) == ("run", "plan", "samples per update", "samples/s", "vs dp", "epoch time", "workers")[:6]
    assert not any("-" in row for row in rows(results, groups(results)[0]))
    first, marked = verdict(groups(results)[0])
    assert first == "pipedream has the highest throughput: 2,000 samples/s, 2.00x as fast as dp with 1,000."
    assert marked == "dp (*): not pipedream's 32 samples per update, so the epochs to a target may differ."
    assert column(results, "samples per update") == {"pipedream": "32", "dp": "128 *"}


def test_rows_of_one_throughput_are_first_together() -> None:
    """The last by name of a sweep over learning rates had `the highest throughput, as fast as` the others."""
    rates = {"dp": 2000.0, "gpipe": 2000.0, "pipedream": 2001.0}
    found = [timed(mode, None, throughput_samples_per_s=rate) for mode, rate in rates.items()]
    assert verdict(groups(found)[0])[0] == "None is faster than another: 2,001 samples/s."
    found += [timed("model", None, throughput_samples_per_s=1000.0)]
    reported = "pipedream, dp, gpipe have the highest throughput: 2,001 samples/s."
    assert verdict(groups(found)[0])[0] == reported


def test_rows_of_one_time_are_first_together() -> None:
    """The third was left out, and the epochs of one of them were reported for both."""
    found = [timed("dp", 1.0), timed("gpipe", 1.004, epoch_time_s=0.5), timed("pipedream", 1.0)]
    reported = (
        "dp, pipedream, gpipe are first to top1 0.95, all in 1.00 s (2 epochs of 1.00 s, against 2 epochs of 500 ms)."
    )
    assert verdict(groups(found)[0])[0] == reported
    found = [timed("dp", 0.996), timed("pipedream", 1.004), timed("gpipe", 2.0)]
    reported = "dp and pipedream are first to top1 0.95, both in 996 ms to 1.00 s (2 epochs of 1.00 s)."
    assert verdict(groups(found)[0])[0] == reported


def test_a_plan_that_is_data_parallelism_says_so_in_its_row() -> None:
    whole = replace(timed("pipedream", 2.0), plan="4", stages=(stage(0.1, 4),))
    results = [replace(timed("dp", 2.0), plan="4", stages=whole.stages), whole, timed("gpipe", 3.0)]
    assert column(results, "plan") == {"dp": "4", "pipedream": "4 = dp", "gpipe": "4"}
    assert verdict(groups(results)[0])[-1].startswith("pipedream: the plan is data parallelism on all workers")
    assert verdict(groups(results)[0])[0].startswith("dp and pipedream are first to top1 0.95, both in 2")


def test_the_limit_of_each_run_is_in_milliseconds() -> None:
    """1,000 samples/s in minibatches of 32 are 32 ms each."""
    piped = replace(timed("pipedream", 2.0, comm_stall_fraction=0.05), stages=(stage(0.020), stage(0.028)) * 2)
    limit = limit_of(replace(piped, stages=piped.stages[:2], metrics={**piped.metrics, "num_workers": 2}))
    assert limit is not None
    assert (limit.stage, limit.minibatch_s, limit.compute_s) == (1, 0.032, 0.028)
    assert limit.transfer_s == pytest.approx(0.0016)
    assert limit.wait_s == pytest.approx(0.0024)
    whole = replace(timed("dp", 3.0, 128, comm_stall_fraction=0.25), stages=(stage(0.096, 4, 128),))
    text = verdict(groups([piped, whole])[0])[1]
    assert text == (
        "Milliseconds per minibatch of 32, of each one's slowest stage: pipedream 32.0 = 28.0 computing in stage 1 + "
        "1.6 waiting for transfers + 2.4 waiting for others; dp 32.0 = 24.0 computing + 8.0 waiting for transfers."
    )
    of_16 = {"train.minibatch_size": "16"}
    smaller = replace(whole, recipe={**whole.recipe, **of_16}, varied=of_16, stages=(stage(0.048, 4, 64),))
    text = verdict(groups([replace(piped, varied={"train.minibatch_size": "32"}), smaller])[0])[1]
    assert text == (
        "Milliseconds per minibatch, of each one's slowest stage: pipedream, of 32, 32.0 = 28.0 computing in stage 1 + "
        "1.6 waiting for transfers + 2.4 waiting for others; dp, of 16, 16.0 = 12.0 computing + 4.0 waiting for "
        "transfers."
    )
    halves = replace(piped, stages=(stage(0.010), stage(0.014)) * 2, metrics={**piped.metrics, "num_workers": 2})
    assert (limit_of(halves) or limit).compute_s == pytest.approx(0.028), "a worker's stages count together"
    assert limit_of(replace(piped, metrics={**piped.metrics, "throughput_samples_per_s": 9000.0})) is None


def test_updates_of_a_server_are_no_computing_of_its_workers() -> None:
    """In 0.2.0 every worker of dp-asp had the updates of all gradients."""
    rows_of = ({**stage(0.096, 4), "update_s": 0.004},)
    pushing, summing = (limit_of(replace(timed(mode, 3.0), stages=rows_of)) for mode in ("dp-asp", "dp"))
    assert pushing is not None
    assert summing is not None
    assert (pushing.compute_s, summing.compute_s) == pytest.approx((0.024, 0.028))


def test_the_limit_of_a_measured_run_is_its_busiest_worker() -> None:
    parts = {"waiting_s": 1.0, "sending_s": 0.0, "other_s": 0.0}
    rows_of = ({"stage": 0, "compute_s": 1.0, **parts}, {"stage": 1, "compute_s": 3.0, **parts})
    limit = limit_of(replace(timed("gpipe", 2.0), workers=rows_of))
    assert limit is not None
    assert (limit.stage, limit.compute_s) == (1, 0.024)


def test_short_names_keep_complete_modes() -> None:
    assert [*short_names(["a-b-gpipe", "a-b-dp"]).values()] == ["gpipe", "dp"]
    assert [*short_names(["small-pipedream-flush", "small-pipedream-2bw"]).values()] == [
        "pipedream-flush",
        "pipedream-2bw",
    ]
    assert [*short_names(["small-depth=1,dp", "small-depth=2,dp"]).values()] == ["depth=1,dp", "depth=2,dp"]
