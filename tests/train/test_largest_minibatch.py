"""The largest minibatch that fits: against every size tried one by one, and the error if there is none."""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from click.testing import CliRunner

from pipebench.cli.main import cli
from pipebench.errors import PlanError
from pipebench.recipe.load import LoadedRecipe, load
from pipebench.train.largest_minibatch import Trial, largest_minibatch, trial
from pipebench.train.memory_forecast import MemoryForecast
from pipebench.train.prepare import prepare
from pipebench.train.simulated import simulate_epoch
from tests.train.test_largest import CLUSTER, RECIPE


def recipe_of(folder: Path, memory: str, *overrides: str) -> LoadedRecipe:
    (folder / "small.yaml").write_text(CLUSTER.format(memory=memory))
    (folder / "recipe.yaml").write_text(RECIPE.format(plan="straight", recompute="false"))
    return load(str(folder / "recipe.yaml"), ["parallelism.mode=pipedream", "parallelism.recompute=null", *overrides])


@cache
def peak_bytes(size: int, *overrides: str) -> float:
    """Return the peak of a whole simulated epoch, which the search doesn't compute."""
    with TemporaryDirectory() as folder:
        loaded = recipe_of(Path(folder), "1 GB", *overrides, f"train.minibatch_size={size}")
    job = prepare(loaded.recipe, loaded.cluster)
    result, _ = simulate_epoch(job, MemoryForecast(job))
    return result.metrics["peak_memory_bytes_max"]


def sizes_tried_between(low: int) -> list[int]:
    return [n for n in range(low, 2 * low + 1) if n % max(1, low // 8) == 0]


@pytest.mark.parametrize("begins_at", [1, 32, 512])
def test_no_size_beside_it_is_larger_and_fits(tmp_path: Path, begins_at: int) -> None:
    """Peaks are those of whole epochs; the memory is just enough for 24 samples, and just not for 25."""
    limit = peak_bytes(24)
    assert peak_bytes(25) > limit >= peak_bytes(16)
    tried: list[Trial] = []
    loaded = recipe_of(tmp_path, f"{limit:.0f} B", f"train.minibatch_size={begins_at}")
    found = largest_minibatch(loaded, tried.append)
    assert found == Trial(24, int(limit), True)
    powers = {2**power for power in range(10)}
    assert {each.minibatch_size for each in tried} <= powers.union(*map(sizes_tried_between, powers))
    for each in tried:
        assert each.fits == (each.minibatch_size <= 24)


def test_samples_that_fill_no_minibatch_are_not_profiled(tmp_path: Path) -> None:
    loaded = recipe_of(tmp_path, "1 GB", "train.minibatch_size=24")
    assert [*prepare(loaded.recipe, loaded.cluster, trains=False, whole_only=True).profile.layers] == [24]
    assert len(prepare(loaded.recipe, loaded.cluster, trains=False).profile.layers) > 1


def test_sizes_are_multiples_of_the_microbatches(tmp_path: Path) -> None:
    cut = ("parallelism.mode=gpipe", "parallelism.microbatches=3", "train.minibatch_size=6")
    limit = peak_bytes(33, *cut)
    assert largest_minibatch(recipe_of(tmp_path, f"{limit:.0f} B", *cut)).minibatch_size == 33


@pytest.mark.parametrize("begins_at", [2, 32])
def test_without_given_microbatches_every_size_has_those_of_its_run(tmp_path: Path, begins_at: int) -> None:
    """Two samples have two microbatches, 32 have one per stage; the number of the recipe's size isn't reused."""
    limit = peak_bytes(64, "parallelism.mode=gpipe")
    assert limit < peak_bytes(64, "parallelism.mode=gpipe", "parallelism.microbatches=2")
    loaded = recipe_of(tmp_path, f"{limit:.0f} B", "parallelism.mode=gpipe", f"train.minibatch_size={begins_at}")
    assert largest_minibatch(loaded) == Trial(64, int(limit), True)


def test_the_largest_minibatch_is_an_epoch(tmp_path: Path) -> None:
    loaded = recipe_of(tmp_path, "1 TB")
    num_train = prepare(loaded.recipe, loaded.cluster).setup.sampler.num_samples
    found = largest_minibatch(loaded).minibatch_size
    low = 1 << (num_train.bit_length() - 1)
    assert found == max(n for n in sizes_tried_between(low) if n <= num_train)


def test_without_a_given_plan_every_size_is_planned_anew(tmp_path: Path) -> None:
    """Where the planner finds no plan, nothing fits."""
    loaded = recipe_of(tmp_path, "1500 kB", "parallelism.plan=auto", "train.minibatch_size=64", "cluster.count=2")
    found = largest_minibatch(loaded)
    assert found.fits
    beyond = next(size for size in sizes_tried_between(found.minibatch_size)[1:])
    assert not trial(loaded, beyond).fits


REFUSED: Sequence[tuple[str, Sequence[str], str]] = (
    ("10 kB", (), "train.minibatch_size: not even 1 fits with parallelism.mode pipedream: it needs .* and a V100 has"),
    ("10 kB", ("parallelism.mode=dp", "parallelism.plan=auto"), "mode dp: .* help: a mode of several stages, or fsdp$"),
    ("10 kB", ("parallelism.plan=auto", "cluster.count=2"), "no plan of mode pipedream fits"),
    ("null", (), "cluster.name: got small, whose file gives no memory size; a largest minibatch needs one"),
)


@pytest.mark.parametrize(("memory", "overrides", "sentence"), REFUSED)
def test_the_error_if_no_size_fits(tmp_path: Path, memory: str, overrides: Sequence[str], sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        largest_minibatch(recipe_of(tmp_path, memory, *overrides))


def test_the_command_prints_every_size_that_was_tried(tmp_path: Path) -> None:
    limit = peak_bytes(24)
    recipe_of(tmp_path, f"{limit:.0f} B")
    words = [str(tmp_path / "recipe.yaml"), "parallelism.mode=pipedream", "parallelism.recompute=null"]
    done = CliRunner().invoke(cli, ["largest", *words])
    assert done.exit_code == 0, done.output
    assert re.search(
        r"small: 24 samples per minibatch are the most of those tried that fit in the .* V100", done.output
    )
    fitting = re.findall(r"^ +(\d+) .*%( +fits)?$", done.output, re.MULTILINE)
    assert {int(size) for size, fits in fitting if fits} < {*range(25)}
    assert {size for size, fits in fitting if not fits} >= {"26", "28", "32"}
    assert "training samples" not in done.output

    recipe_of(tmp_path, "1 TB")
    unlimited = CliRunner().invoke(cli, ["largest", *words])
    assert "; the limit is the number of training samples, too few for a larger size, not memory\n" in unlimited.output

    refused = CliRunner().invoke(cli, ["largest", *words, "cluster.name=local"])
    assert refused.exit_code == 2
    assert "cluster.name: got local, whose file gives no memory size" in refused.output
