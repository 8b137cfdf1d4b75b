"""The study of the small recipes: its runs, when one counts as done, and its page."""

import json
import statistics
from pathlib import Path

import pytest
import torch
from torch import nn

from pipebench.recipe.catalog import recipe_names
from pipebench.recipe.load import load
from pipebench.recipe.make import make_model
from pipebench.train.result import COMPLETED, REACHED, Point, RunResult
from reports.studies import small_zoo
from reports.studies.markdown import table
from reports.studies.seeds import in_range
from reports.studies.small_zoo import MODELS, MODES, Run, keep, outcome_of, study

PAGE = Path(small_zoo.__file__).parents[1] / "small_zoo.md"


def forget() -> None:
    """Read results again: stored ones may have changed."""
    small_zoo._epoch.cache_clear()
    outcome_of.cache_clear()


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(small_zoo, "RESULTS", tmp_path / "results")
    forget()
    return tmp_path / "results"


def result(values: list[float], outcome: str) -> RunResult:
    """Return a run of the small VGG-16 on 4,000 digits, evaluated every epoch: 2 s of training, 0.5 s of evaluation."""
    points = tuple(Point(4000 * (i + 1), 2.5 * (i + 1), {"top1": value}) for i, value in enumerate(values))
    metrics = {"evaluation_time_s": 0.5 * len(values), "comm_bytes_per_sample": 1e3}
    return RunResult("x", "dp", "4", "virtual", "virtual", "", 0, outcome, "", metrics, points)


def test_every_small_recipe_is_in_the_study_or_takes_singles_updates() -> None:
    runs = study()
    assert len({run.path for run in runs}) == len(runs)
    recipes = {name for name in recipe_names() if name.startswith("small/")}
    # Modes that the study doesn't have.
    modes = ("interleaved", "pipedream-2bw", "hybrid", "dp-asp", "zero-bubble", "spectrain", "xpipe", "pipemare")
    # And models: only their recipes state what was reached.
    models = ("small/transformer/", "small/bert/", "small/gpt2/", "small/amoebanet/")
    later = {name for name in recipes if name.endswith(modes) or name.startswith(models)}
    assert recipes - later == {f"small/{model}/{mode}" for model in MODELS for mode in MODES}
    trained = {f"small/{run.model}/{run.mode}" for run in runs}
    assert {name.rsplit("/", 1)[1] for name in recipes - later - trained} == {"model", "gpipe"}
    assert [run.mode for run in runs[: 3 * len(MODELS)]] == ["single"] * 3 * len(MODELS)


def test_modes_of_a_small_model_share_everything_but_the_parallelism() -> None:
    """A comparison varies one thing; where the rate is constant, epochs are only how long a mode may try."""
    for model in MODELS:
        flats = {mode: dict(load(f"small/{model}/{mode}").flat) for mode in MODES}
        if flats["single"]["train.schedule.name"] == "constant":
            assert all(int(flat.pop("train.max_epochs")) > 0 for flat in flats.values())
        for flat in flats.values():
            differing = {key for key in flat if flat[key] != flats["single"].get(key)}
            assert {key.split(".")[0] for key in differing} <= {"name", "parallelism"}, model


def test_a_run_is_done_once_a_result_of_its_recipe_exists(results: Path) -> None:
    run = Run("vgg16", "dp", 0)
    assert not run.is_done()
    keep(run, result([0.5, 0.99], REACHED), {"torch": "2.15"}, 12.0)
    assert run.is_done()
    assert not Run("vgg16", "dp", 1).is_done()
    kept = json.loads(run.path.read_text())
    run.path.write_text(json.dumps(kept | {"key": "another"}))
    assert not run.is_done()
    assert [path.name for path in results.iterdir()] == ["vgg16-dp-0.json"]


@pytest.mark.usefixtures("results")
def test_the_first_evaluation_at_the_target_counts() -> None:
    target = load("small/vgg16/single").recipe.train.target
    epochs = load("small/vgg16/single").recipe.train.max_epochs
    assert target is not None
    curve = [0.1, target.value - 0.01, target.value, 0.2] + [0.999] * (epochs - 4)
    single, dp, missed = Run("vgg16", "single", 0), Run("vgg16", "dp", 0), Run("vgg16", "pipedream", 0)
    keep(single, result(curve, COMPLETED), {}, 30.0)
    keep(dp, result(curve[:3], REACHED), {}, 20.0)
    keep(missed, result([0.1, 0.3, 0.2], "missed"), {}, 40.0)
    for run, wall_s in ((single, 30.0), (dp, 20.0)):
        found = outcome_of(run)
        assert (found.epochs, found.clock_s, found.training_s, found.wall_s) == (3, 7.5, 6.0, wall_s)
    assert outcome_of(missed).epochs is None
    assert outcome_of(missed).best == 0.3
    assert small_zoo.value_at(small_zoo.result_of(dp), "top1", 2 / 3) == curve[1]


def test_seeds_are_their_median_and_range_and_a_miss_takes_forever() -> None:
    assert in_range([3, 1, 2], "{:g}".format) == "2 (1 to 3)"
    assert in_range([2, 2], "{:g}".format) == "2"
    assert in_range([1, None, 2], "{:g}".format) == "2 (1 to missed)"
    assert in_range([2, None], "{:g}".format) == in_range([None], "{:g}".format) == "missed"


def test_gpipe_is_trained_on_every_model_with_batch_norm() -> None:
    """Elsewhere microbatches change no gradient, and it takes single's updates."""
    for model in MODELS:
        with torch.device("meta"):
            made = make_model(load(f"small/{model}/gpipe").recipe.model)
        normed = any(isinstance(part, nn.modules.batchnorm._NormBase) for part in made.modules())
        assert normed == (model in small_zoo.WITH_BATCH_NORM)
        assert small_zoo.is_trained(model, "gpipe") == (normed or (model, "gpipe") in small_zoo.CHECKS)


class TestStoredRuns:
    """The runs in the repository: all of the study, of the current recipes, and the pages made of them."""

    def test_every_run_is_stored(self) -> None:
        assert [run for run in study() if not run.is_done()] == []
        assert {path.name for path in small_zoo.RESULTS.iterdir()} == {run.path.name for run in study()}

    @pytest.mark.slow
    def test_the_report_agrees_with_the_results(self) -> None:
        forget()
        assert PAGE.read_text() == small_zoo.page().rstrip() + "\n"

    def test_rows_equal_the_results(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """All trained columns; the others need simulations, and the last column of targets complete data sets."""
        forget()
        monkeypatch.setattr(small_zoo, "baseline", lambda options: "")
        trained = [(model, mode) for model in MODELS for mode in MODES if small_zoo.is_trained(model, mode)]
        rows = [small_zoo.trained_row(*each) for each in trained]
        made = table([], [*rows, small_zoo.derived_row("alexnet", "model"), *small_zoo.target_rows()]).splitlines()[2:]
        assert len(made) == len(trained) + 1 + len(MODELS) > 30
        page = PAGE.read_text()
        assert [line for line in made if f"\n{line.removesuffix(' |')}" not in page] == []
        assert small_zoo.HEAD in page
        assert small_zoo.NOTES in page
        assert small_zoo.summary() in (PAGE.parents[1] / "docs/results.md").read_text()

    def test_targets_are_what_single_reached_after_two_thirds_rounded_to_the_easier_side(self) -> None:
        for model in MODELS:
            recipe = load(f"small/{model}/single").recipe
            target = recipe.train.target
            assert target is not None
            values = [
                small_zoo.value_at(small_zoo.result_of(Run(model, "single", seed)), target.metric, 2 / 3)
                for seed in small_zoo.THREE
            ]
            median = statistics.median(values)
            easier = median >= target.value if target.metric != "perplexity" else median <= target.value
            assert easier, (model, median)
            assert abs(median - target.value) <= 0.03 * target.value, (model, median)
