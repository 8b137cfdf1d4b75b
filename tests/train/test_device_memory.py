"""The memory of this host's GPU limits plans for processes if the cluster's file gives no limit."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from pipebench.cli.planning import findings
from pipebench.profile import choose
from pipebench.profile.enough import StopRule
from pipebench.profile.measure import mean_profile, measured_profile
from pipebench.profile.stored import read_profile, write_profile
from pipebench.recipe.load import LoadedRecipe, load
from pipebench.train.job import Job
from pipebench.train.prepare import prepare
from tests.made_up_gpu import made_up_gpu

WIDTH, NUM_LAYERS = 64, 8
RECIPE = f"""\
name: deep
model: {{target: "{__name__}:deep"}}
dataset: {{target: "{__name__}:numbers", loss: cross_entropy}}
train: {{minibatch_size: 4, optimizer: {{name: adam, lr: 1}}, max_epochs: 1}}
cluster: {{name: local, count: 4}}
parallelism: {{mode: pipedream-flush, plan: auto}}
engine: {{kind: distributed, device: cuda, threads: 1}}
"""
# Half of the layers with gradients and Adam's moments, and activations
HALF = NUM_LAYERS // 2 * 4 * 4 * (WIDTH**2 + WIDTH) + 60_000


def deep() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))


def numbers() -> tuple[TensorDataset, TensorDataset]:
    return TensorDataset(torch.randn(32, WIDTH), torch.arange(32)), TensorDataset(
        torch.randn(8, WIDTH), torch.arange(8)
    )


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_cache(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    once = partial(measured_profile, rule=StopRule(most=1))  # its times don't matter
    monkeypatch.setattr(choose, "measured_profile", once)
    monkeypatch.setenv("PIPEBENCH_CACHE", str(cache))
    (tmp_path / "deep.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)


def recipe(*changes: str) -> LoadedRecipe:
    return load("deep.yaml", changes)


def prepared(limit_bytes: int, *changes: str, num_gpus: int = 4) -> Job:
    loaded = recipe(*changes)
    with made_up_gpu(limit_bytes), patch.object(torch.cuda, "device_count", lambda: num_gpus):
        return prepare(loaded.recipe, loaded.cluster, trains=False)


def test_a_plan_fits_the_gpu_that_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPEBENCH_CACHE", str(tmp_path / "of two GPUs"))
    roomy, tight = (prepared(size, "engine.timing=anew") for size in (10**9, HALF))
    assert (roomy.cluster.memory_bytes, tight.cluster.memory_bytes) == (10**9, HALF)
    assert "pieces" not in roomy.profile.note
    assert len(tight.setup.plan.replicas) > 1
    assert "in 2 pieces" in tight.profile.note
    with made_up_gpu(HALF), patch.object(torch.cuda, "device_count", lambda: 4):
        found = findings(recipe(), others=False)
    assert found.request.cluster.memory_bytes == HALF
    assert found.comparison.best.memory_bytes <= HALF


@pytest.mark.parametrize(
    ("num_gpus", "num_here", "expected"),
    [(1, None, 10**9 // 4), (2, None, 10**9 // 2), (3, None, 10**9 // 2), (8, None, 10**9), (1, 2, 10**9 // 2)],
)
def test_workers_that_share_a_gpu_divide_its_memory(
    num_gpus: int, num_here: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four workers of cluster local; `num_here` of them are on this host, as the launcher says, None: all."""
    if num_here is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_here))
    assert prepared(10**9, num_gpus=num_gpus).cluster.memory_bytes == expected


def test_for_a_user_s_cluster_only_a_launcher_gives_the_workers_per_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.yaml").write_text("extends: local\n")
    assert prepared(10**9, "cluster.name=own.yaml", num_gpus=1).cluster.memory_bytes == 10**9
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert prepared(10**9, "cluster.name=own.yaml", num_gpus=1).cluster.memory_bytes == 10**9 // 2


@pytest.mark.parametrize("changes", [["engine.kind=virtual"], ["engine.device=cpu"]])
def test_workers_of_one_process_share_a_device_and_cpus_a_host(changes: list[str]) -> None:
    assert prepared(10**9, *changes).cluster.memory_bytes is None


def test_a_given_limit_is_used() -> None:
    assert prepared(10**9, "cluster.memory=16GB").cluster.memory_bytes == 16 * 10**9


def test_of_several_gpus_the_smallest_memory_counts_and_is_cached() -> None:
    profile = prepared(10**9).profile
    assert profile.device_bytes == 10**9
    assert read_profile(write_profile(profile)) == profile
    smaller = replace(profile, device_bytes=10**8)
    assert mean_profile([profile, smaller]).device_bytes == 10**8
    assert "device_bytes" not in write_profile(replace(profile, device_bytes=0))
