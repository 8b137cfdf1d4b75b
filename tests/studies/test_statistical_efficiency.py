"""The study of statistical efficiency: its comparisons, the rule for rates, and its page."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from pipebench.recipe.catalog import recipe_names
from pipebench.train.result import MISSED, REACHED, Point, RunResult
from reports.studies import statistical_efficiency
from reports.studies.efficiency_pictures import draw
from reports.studies.efficiency_texts import SAID
from reports.studies.statistical_efficiency import GRIDS, METRICS, SEEDS, Run, chosen_rate, modes_of, outcome_of, study
from tests.recipe.test_published import entries

PAGE = Path(statistical_efficiency.__file__).parents[1] / "statistical_efficiency.md"


def test_every_steep_recipe_is_trained_and_every_mode_with_every_seed() -> None:
    runs = list(study())
    assert len({run.words for run in runs}) == len({run.name for run in runs}) == len(runs)
    for model in METRICS:
        of_model = [run for run in runs if run.model == model]
        recipes = {name.rpartition("/")[2] for name in recipe_names() if name.startswith(f"steep/{model}/")}
        assert {run.mode for run in of_model} == recipes
        for mode in modes_of(model):
            assert [run.seed for run in of_model if (run.mode, run.lr) == (mode, None)] == [*SEEDS]


@pytest.mark.parametrize("model", METRICS)
def test_a_comparison_varies_one_thing(model: str) -> None:
    """All modes have single's data, target, minibatch, rate and scaling rule; LARS's differ in the optimizer, too."""
    lars = [mode for of, mode in GRIDS if of == model]
    flats = {mode: Run(model, mode, 0).loaded.flat for mode in (*modes_of(model), *lars)}
    for mode, flat in flats.items():
        differing = {key for key in flat if flat[key] != flats["single"].get(key)}
        allowed = ("name", "parallelism.", *(["train.optimizer."] if mode.endswith("-lars") else []))
        assert all(key.startswith(allowed) for key in differing), (mode, differing)
    rates = {mode: flat["train.optimizer.lr"] for mode, flat in flats.items()}
    assert len({rate for mode, rate in rates.items() if not mode.endswith("-lars")}) == 1


@pytest.mark.parametrize(("model", "mode"), GRIDS)
def test_the_recipes_have_the_rate_that_the_rule_chooses(model: str, mode: str) -> None:
    assert chosen_rate(model, mode) == Run(model, mode, 0).loaded.recipe.train.optimizer.lr


def test_the_rule_takes_the_fewest_epochs_and_of_equals_the_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {0.005: 6.0, 0.01: 4.0, 0.02: 3.0, 0.04: 3.0}
    monkeypatch.setattr(Run, "outcome", property(lambda run: outcome(made[run.lr])))
    assert chosen_rate("vgg16", "single") == 0.02
    monkeypatch.setattr(Run, "outcome", property(lambda run: outcome(None if run.lr == 0.02 else made[run.lr])))
    assert chosen_rate("vgg16", "single") == 0.04


def outcome(epochs: float | None) -> statistical_efficiency.Outcome:
    return statistical_efficiency.Outcome(
        MISSED if epochs is None else REACHED, epochs, epochs, 32, [[1.0, 1.0, 0.5], [2.0, 2.0, 0.9]]
    )


def test_stored_facts_of_a_run() -> None:
    points = tuple(Point(2000 * k, 2.5 * k, {"top1": 0.4 * k, "train_loss": 1.0}) for k in (1, 2))
    metrics = {"epochs_to_target": 2.0, "time_to_accuracy_s": 5.0, "samples_per_update": 128}
    result = RunResult("x", "dp", "4", "virtual", "virtual", "", 0, REACHED, "", metrics, points)
    kept = outcome_of(result, "top1", 2000)
    assert (kept.epochs, kept.clock_s, kept.samples_per_update) == (2.0, 5.0, 128)
    assert kept.points == [[1.0, 2.5, 0.4], [2.0, 5.0, 0.8]]


def test_a_seed_that_missed_counts_as_infinite_and_with_most_missed_there_is_no_ratio(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The median was of the seeds that reached the target: 4.50, or the only seed's."""

    def made(run: Run) -> statistical_efficiency.Outcome:
        missed = {"dp": run.seed == 1, "pipedream": run.seed != 1}.get(run.mode, False)
        return outcome(None if missed else 2.0 + run.seed)

    monkeypatch.setattr(Run, "outcome", property(made))
    rows = {row[0]: row for row in statistical_efficiency.mode_rows("gnmt8")}
    assert rows["single"][2:7] == ["0 of 5", "4.00 (2.00 to 6.00)", "4.00 s (2.00 s to 6.00 s)", "1.00x", "0.80x"]
    assert rows["dp"][2:6] == ["1 of 5", "5.00 (2.00 to missed)", "5.00 s (2.00 s to missed)", "1.25x"]
    assert rows["pipedream"][2:7] == ["4 of 5", "missed", "-", "-", "-"]


def test_the_page_equals_that_of_the_stored_results() -> None:
    """Every result is of the recipe as it is, so that nothing would be trained again."""
    assert statistical_efficiency.page().rstrip() == PAGE.read_text().rstrip()
    for name in re.findall(r"\]\((\S+\.png)\)", PAGE.read_text()):
        assert (PAGE.parent / name).is_file()


def test_modes_equal_those_stored_for_other_pages() -> None:
    """With tree, versions and processor, as the last lines of the page list them; every run is on one of them."""
    found = [(run, run.kept) for run in study() if run.lr is None]
    runs = [run for run, kept in found if kept is not None and {"tree", "torch", "processor"} <= {*kept.made}]
    reported = PAGE.read_text().rpartition("runs of modes")[2]
    assert f"{len(runs)} runs of modes" in PAGE.read_text()
    assert sum(int(count) for count in re.findall(r"^- (\d+) by tree", reported, re.MULTILINE)) == len(runs)
    for run in runs:
        assert re.search(rf"[ ,]{run.model} {run.mode}(,|$)", reported, re.MULTILINE), run.name
    missing = len(found) - len(runs)
    assert (f"- {missing} are not there yet" in reported) is (missing > 0)


def test_two_trees_agree_on_the_other_processor_and_two_processors_do_not() -> None:
    """With other numbers, the page's sentence would be another."""
    num_twice, num_equal = statistical_efficiency.trees_that_agree()
    assert num_twice == num_equal == 2
    single, dp, *_ = statistical_efficiency.elsewhere_rows()
    assert [single[:2], dp[:2]] == [["vgg16 single", "5"], ["vgg16 dp", "3"]]
    for row in (single, dp):
        assert int(row[-1]) < int(row[1])
        assert row[3].partition(", ")[2] != row[5].partition(", ")[2]  # processors


@pytest.mark.parametrize("model", METRICS)
def test_a_run_with_the_chosen_rate_is_unchanged_since(model: str) -> None:
    """Of an earlier version, which the table of rates is of; on the same kind of processor."""
    kept = Run(model, "single", 0).outcome
    assert kept is not None
    tried = Run(model, "single", 0, chosen_rate(model, "single")).outcome
    assert tried is not None
    assert [value for *_, value in tried.points] == [value for *_, value in kept.points]


def forget() -> None:
    """Read results again: stored ones may have changed."""
    statistical_efficiency._kept.cache_clear()
    statistical_efficiency._answer.cache_clear()


def test_a_result_that_names_no_tree_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run("vgg16", "single", 0)
    kept = run.kept
    assert kept is not None
    named = replace(kept, words=run.words)
    monkeypatch.setattr(statistical_efficiency, "kept_results", lambda folder: {PAGE: named})
    forget()
    assert run.outcome is not None
    monkeypatch.setattr(statistical_efficiency, "kept_results", lambda folder: {PAGE: replace(named, made={})})
    forget()
    assert Run("vgg16", "single", 0).outcome is None
    forget()


def test_pictures_have_a_panel_per_mode(tmp_path: Path) -> None:
    curve = [[1.0, 2.0, 0.5], [2.0, 4.0, 0.9]]
    path = tmp_path / "x.png"
    draw({"single": [curve], "dp": [curve, curve]}, "single", "epochs", "top1", 0.8, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_every_column_of_panels_has_its_numbers_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns whose last row is empty had neither numbers nor a unit."""
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    draw({f"m{n}": [[[1.0, 2.0, 0.5]]] for n in range(6)}, "m0", "epochs", "top1", 0.8, tmp_path / "x.png")
    panels = [panel for panel in drawn[0].axes if panel.get_title()]
    assert [panel.get_xlabel() for panel in panels] == ["", "", *["epochs"] * 4]
    shown = [any(label.get_visible() for label in panel.get_xticklabels()) for panel in panels]
    assert shown == [False, False, *[True] * 4]


def test_quoted_values_equal_the_published_ones() -> None:
    said, text = entries(), SAID
    asp, lars = said["s52-asp"], said["s52-lars"]
    assert f"{asp['asp_time_ratio']} times PipeDream's time to {asp['accuracy_percent']}%" in text
    assert f"{lars['fastest_lars_minibatch']:,} is the fastest" in text
    assert " and ".join(f"{size:,}" for size in lars["minibatches_missing_target"]) + " miss the target" in text
    assert f"more than {lars['speedup_above']} times as fast" in text
    assert said["s52-stat-eff"]["result"] == "similar"


@pytest.mark.parametrize("model", METRICS)
def test_sentences_agree_with_the_tables(model: str) -> None:
    """They named two and three seeds after there were five, and called a target missed that one reached."""
    words, section = statistical_efficiency.summaries(model), PAGE.read_text().split(f"## {model}: ")[1]
    for mode in ("dp", "vertical-sync", "no-stashing"):
        cells = next(line for line in section.splitlines() if line.startswith(f"| {mode} |")).split(" | ")
        assert words[mode].missed == cells[2]
    said = " ".join(PAGE.read_text().split("## What it says")[1].split())
    vertical, unstashed = words["vertical-sync"], words["no-stashing"]
    assert re.search(rf"{vertical.missed}( seeds)? missed {model}'s", said)
    assert re.search(rf"{unstashed.over_stashing}( stashing's epochs)? on {model}", said)


def test_a_mode_that_no_seed_finishes_is_not_over_stashing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Run, "outcome", property(lambda run: outcome({"pipedream": 4.0, "no-stashing": 5.0}.get(run.mode)))
    )
    reported = statistical_efficiency.summaries("gnmt8")
    assert (reported["no-stashing"].over_stashing, reported["no-stashing"].missed) == ("1.25x", "0 of 5")
    assert (reported["dp"].over_stashing, reported["dp"].missed) == ("-", "5 of 5")
