"""Profiles of minibatches of varying length: every length separately, and the profile that plans use."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipebench.errors import ProfileError, RecipeError
from pipebench.profile.load import load_profile
from pipebench.profile.model import Profile
from pipebench.profile.stored import read_profile, write_profile
from pipebench.recipe.load import LoadedRecipe, faults_of, load
from pipebench.simulate.memory import stage_memories
from pipebench.train.memory_forecast import MemoryForecast
from pipebench.train.prepare import prepare
from pipebench.train.profiled_model import input_bytes
from pipebench.train.simulated import simulate_epoch

RECIPE = """
name: small-gnmt
model: {name: gnmt8, hidden_size: 8, source_vocabulary: 64, target_vocabulary: 64}
dataset: {name: wmt16, vocabulary: 64, num_train: 2003, num_eval: 16, lengths: declared}
train: {minibatch_size: 4, max_epochs: 1, optimizer: {name: sgd, lr: 0.1}}
cluster: {name: cluster-a, servers: 1}
parallelism: {mode: pipedream, plan: straight}
engine: {kind: simulated}
"""
COLUMNS = (9, 19, 29, 39, 50)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "small.yaml"
    path.write_text(RECIPE, encoding="utf-8")
    return path


def profile_of(recipe: Path, *overrides: str) -> Profile:
    loaded = load(str(recipe), list(overrides))
    return prepare(loaded.recipe, loaded.cluster, trains=False).profile


@pytest.fixture(scope="module")
def profile(recipe: Path) -> Profile:
    return profile_of(recipe)


@pytest.mark.parametrize("columns", [9, 50])
def test_every_length_is_profiled_separately(recipe: Path, profile: Profile, columns: int) -> None:
    alone = profile_of(recipe, "dataset.lengths=fixed", f"dataset.typical_length={columns}")
    found = next(each for each in profile.lengths if each.columns == columns)
    assert (found.layers, found.load_s) == (alone.layers, alone.load_s)


def test_plans_use_means_and_the_memory_of_the_longest(profile: Profile) -> None:
    assert tuple(each.columns for each in profile.lengths) == COLUMNS
    shares = [each.share for each in profile.lengths]
    for size, rows in profile.layers.items():
        for index, row in enumerate(rows):
            own = [each.layers[size][index] for each in profile.lengths]
            for name in ("forward_s", "backward_s", "weight_s", "output_bytes", "gradient_bytes"):
                mean = sum(share * getattr(each, name) for share, each in zip(shares, own, strict=True))
                assert getattr(row, name) == pytest.approx(mean, abs=1e-9 if name.endswith("_s") else len(own))
            assert row.saved_bytes == own[-1].saved_bytes == max(each.saved_bytes for each in own)


def test_a_profile_with_lengths_is_read_back_exactly_and_runs(recipe: Path, profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    path.write_text(write_profile(profile), encoding="utf-8")
    assert load_profile(path) == profile
    again = profile_of(recipe, f"engine.timing={path}")
    assert (again.layers, again.lengths) == (profile.layers, profile.lengths)
    with pytest.raises(ProfileError, match=r"has times of lengths 9, 19, 29, 39, 50, dataset\.lengths asks for one le"):
        profile_of(recipe, f"engine.timing={path}", "dataset.lengths=fixed")
    path.write_text(write_profile(replace(profile, lengths=())), encoding="utf-8")
    with pytest.raises(ProfileError, match=r"has times of one length, dataset\.lengths asks for lengths 9, 19, 29, 39"):
        profile_of(recipe, f"engine.timing={path}")


def test_incomplete_lengths_are_refused(profile: Profile) -> None:
    first, *others = profile.lengths
    sizes = [*first.layers]
    short = {size: rows for size, rows in first.layers.items() if size != sizes[0]}
    renamed = {size: (replace(rows[0], name="other"), *rows[1:]) for size, rows in first.layers.items()}
    for lengths, wanted in (
        ([first, first, *others], r"has lengths \[9, 9, 19, 29, 39, 50\], allowed is each once"),
        (others, r"has lengths with shares .*, allowed are ones that add up to 1"),
        ([replace(first, layers=short), *others], "has layers of length 9 at 4, 16 samples|has layers of length 9 at"),
        ([replace(first, layers=renamed), *others], "has other layers, or edges between them"),
        ([replace(first, load_s={}), *others], "samples of length 9, but no load_s for them"),
    ):
        with pytest.raises(ProfileError, match=wanted):
            read_profile(write_profile(replace(profile, lengths=tuple(lengths))))


def test_declared_lengths_cannot_be_measured(recipe: Path) -> None:
    with pytest.raises(ProfileError, match=r"dataset\.lengths: declared needs times at every length, and only the dat"):
        profile_of(recipe, "cluster.name=local")


def test_kept_bytes_are_those_of_the_longest(recipe: Path) -> None:
    loaded = load(str(recipe))
    job = prepare(loaded.recipe, loaded.cluster, trains=False)
    longest = _longest(loaded)
    setup, inputs = job.setup, input_bytes(job.setup.graph, job.setup.dataset, job.profile.by_size)
    memories = stage_memories(job.profile, setup.plan, setup.pipeline, inputs)
    alone = stage_memories(longest, setup.plan, setup.pipeline, None)
    for memory, of_longest in zip(memories, alone, strict=True):
        shapes = [size for size in memory.unit if not isinstance(size, int) and size.num_samples == 4]
        assert len(shapes) == len(COLUMNS)
        assert {memory.unit[shape] for shape in shapes} == {of_longest.unit[4]} == {memory.unit[4]}


def _longest(loaded: LoadedRecipe) -> Profile:
    recipe = loaded.recipe
    dataset = {**recipe.dataset, "lengths": "fixed", "typical_length": COLUMNS[-1]}
    return prepare(replace(recipe, dataset=dataset), loaded.cluster, trains=False).profile


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ["dp", "dp-asp", "pipedream", "interleaved", "pipedream-2bw"])
def test_a_run_reports_how_its_epoch_was_estimated(recipe: Path, mode: str) -> None:
    keys = [f"parallelism={{mode: {mode}, plan: auto}}", "dataset.num_train=60003"]
    loaded = load(str(recipe), keys)
    with faults_of(loaded):
        job = prepare(loaded.recipe, loaded.cluster)
    forecast = MemoryForecast(job)
    result, _ = simulate_epoch(job, forecast)
    assert "of 15,001 minibatches simulated" in result.notes["epochs"]
    assert "standard error 0." in result.notes["epochs"]
    alike = load(str(recipe), [*keys, "dataset.lengths=fixed"])
    fixed, _ = simulate_epoch(prepare(alike.recipe, alike.cluster))
    took = result.metrics["epoch_time_s"] / fixed.metrics["epoch_time_s"]
    assert (0.98 < took < 1.02) if mode == "dp-asp" else took > 1.02, "who waits for nobody takes what it takes"
    assert result.metrics["comm_bytes_per_sample"] == pytest.approx(fixed.metrics["comm_bytes_per_sample"], rel=0.02)
    assert "epochs" not in fixed.notes


@pytest.mark.parametrize("kind", ["virtual", "distributed"])
def test_training_uses_real_lengths(recipe: Path, kind: str) -> None:
    with pytest.raises(RecipeError, match=rf"dataset\.lengths: got declared, which is for .*: kind {kind} trains"):
        load(str(recipe), [f"engine.kind={kind}"])
