"""The closed formulas of the papers, over a grid of stages, microbatches and chunks, on the recipes of equal layers."""

from pathlib import Path

import pytest

from pipebench.profile.load import load_profile
from pipebench.recipe.catalog import recipes_folder
from pipebench.recipe.load import load
from pipebench.train.memory_forecast import MemoryForecast
from pipebench.train.prepare import prepare
from pipebench.train.result import RunResult
from pipebench.train.simulated import simulate_epoch

# Per stage of four: 4 layers of 64 x 64 float32, each of which keeps 8 x 64 numbers; a minibatch is 8 samples.
WEIGHTS, KEPT, READ = 4 * 64 * 64 * 4, 4 * 8 * 64 * 4, 8 * 64 * 4


def simulated(recipe: str, n: int = 4, m: int = 0, **parallelism: object) -> RunResult:
    """Simulate an epoch on n workers, of minibatches in m microbatches of 8 samples."""
    words = [f"cluster.servers={n}", *(f"parallelism.{key}={value}" for key, value in parallelism.items())]
    if m:
        words += [f"parallelism.microbatches={m}", f"train.minibatch_size={8 * m}"]
    loaded = load(f"uniform/{recipe}", words)
    job = prepare(loaded.recipe, loaded.cluster)
    return simulate_epoch(job, MemoryForecast(job))[0]


def bubble(recipe: str, n: int, m: int = 0, **parallelism: object) -> float:
    return float(simulated(recipe, n, m, **parallelism).metrics["bubble_fraction"])


def peak(recipe: str, n: int = 4, m: int = 0, **parallelism: object) -> float:
    return float(simulated(recipe, n, m, **parallelism).metrics["peak_memory_bytes_max"])


def test_the_profile_has_the_bytes_of_its_recipes() -> None:
    profile = load_profile(str(Path(recipes_folder()) / "uniform" / "uniform.profile.json"), 8)
    *layers, loss = profile.layers[8]
    assert {(row.forward_s, row.backward_s, row.weight_s) for row in layers} == {(1e-3, 2e-3, 1e-3)}
    assert {(row.output_bytes, row.gradient_bytes, row.saved_bytes, row.parameter_bytes) for row in layers} == {
        (READ, READ, READ, WEIGHTS // 4)
    }
    assert (loss.forward_s, loss.backward_s, loss.saved_bytes) == (0, 0, 0)
    assert (profile.update_s_per_byte, profile.update_floor_s, profile.load_s) == (0, 0, {8: 0})


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("n", "m"), [(2, 1), (2, 3), (4, 4), (4, 6), (8, 2), (16, 16)])
def test_bubble_with_a_flush(n: int, m: int) -> None:
    expected = pytest.approx((n - 1) / (m + n - 1))
    assert bubble("gpipe", n, m) == expected
    assert bubble("gpipe", n, m, recompute="true") == expected
    assert bubble("pipedream-flush", n, m) == expected


@pytest.mark.parametrize(("n", "m", "v"), [(2, 2, 2), (4, 4, 2), (4, 8, 4), (2, 6, 8)])
def test_bubble_of_interleaved(n: int, m: int, v: int) -> None:
    given = bubble("pipedream-flush", n, m, mode="interleaved", chunks=v)
    assert given == pytest.approx((n - 1) / (v * m + n - 1))


@pytest.mark.parametrize(("n", "m"), [(2, 2), (4, 4), (4, 12), (8, 8)])
def test_bubble_of_zero_bubble(n: int, m: int) -> None:
    assert bubble("pipedream-flush", n, m, mode="zero-bubble") == pytest.approx((n - 1) / (3 * m + n - 1))


@pytest.mark.parametrize("n", [2, 4, 8, pytest.param(16, marks=pytest.mark.slow)])
def test_bubble_without_a_flush_and_without_a_pipeline(n: int) -> None:
    expected = pytest.approx((n - 1) / (3072 / 8 + n - 1))
    assert bubble("pipedream", n) == expected
    assert bubble("pipedream", n, weights="none") == expected
    assert bubble("pipedream", n, mode="pipedream-2bw") == expected
    assert bubble("pipedream", n, mode="model") == pytest.approx(1 - 1 / n)


def test_memory_of_activations_in_flight() -> None:
    assert peak("gpipe", m=8) - peak("gpipe", m=4) == 4 * KEPT
    assert peak("gpipe", m=8, recompute="true") - peak("gpipe", m=4, recompute="true") == 4 * READ
    assert peak("gpipe", m=12) - peak("pipedream-flush", m=12) == (12 - 4) * KEPT
    assert peak("pipedream-flush", m=12) == peak("pipedream-flush", m=8)


def test_memory_of_weight_versions() -> None:
    newest = peak("pipedream", weights="none")
    assert peak("pipedream") - newest == (4 - 1) * WEIGHTS
    assert peak("pipedream", mode="pipedream-2bw") - newest == (2 - 1) * WEIGHTS
    assert peak("pipedream-flush", m=8) == newest
    assert peak("pipedream") - peak("pipedream", depth=3) == WEIGHTS + KEPT


@pytest.mark.parametrize("n", [2, 4, 8, pytest.param(16, marks=pytest.mark.slow)])
def test_bytes(n: int) -> None:
    whole = 16 * 64 * 64 * 4
    sent = simulated("pipedream", n).metrics["comm_bytes_per_sample"]
    assert sent == 2 * 64 * (n - 1) * 4
    for sync in ("all-reduce", "parameter-server"):
        summed = simulated("dp", n, sync=sync).metrics["comm_bytes_per_sample"]
        assert summed * 8 == 2 * (n - 1) / n * whole
