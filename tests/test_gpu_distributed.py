"""Processes on GPUs: several that share one, by Gloo through the host's memory; NCCL where there are enough."""

from collections.abc import Iterator

import pytest
import torch

from pipebench.device import torch_settings
from pipebench.recipe.schema import EngineRecipe
from pipebench.world import World
from tests.distributed.cases import Case, Outcome, distributed
from tests.distributed.test_equality import THREE, TWO, check
from tests.processes import Processes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FOUR = {
    "2-1-1": Case("conv", (3, 6), (2, 1, 1)),
    "straight": Case("skip", (2, 4, 6), (1, 1, 1, 1)),
    "2-2, gpipe": Case("conv", (4,), (2, 2), {"weights": "one", "order": "all-forwards", "microbatches": 2}),
}


def on_gpu(world: World, case: Case) -> Outcome:
    """Run a case with the settings of a run."""
    with torch_settings(EngineRecipe()):
        return distributed(world, case)


def facts(world: World) -> tuple[str, bool]:
    """Return where a process computes and whether tensors travel by NCCL."""
    return str(world.device), world.direct


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    with Processes(2, "cuda") as processes:
        yield processes


@pytest.fixture(scope="module")
def three() -> Iterator[Processes]:
    with Processes(3, "cuda") as processes:
        yield processes


@pytest.fixture(scope="module")
def four() -> Iterator[Processes]:
    with Processes(4, "cuda") as processes:
        yield processes


def test_workers_have_gpus_of_their_own_or_share_them_by_gloo(two: Processes) -> None:
    enough = torch.cuda.device_count() >= 2
    found = two.run("tests.test_gpu_distributed:facts")
    assert [direct for _, direct in found] == [enough, enough]
    assert len({device for device, _ in found}) == (2 if enough else 1)


@pytest.mark.parametrize("name", TWO)
def test_two_ranks_agree_with_the_virtual_engine(two: Processes, name: str) -> None:
    check(TWO[name], two.run("tests.test_gpu_distributed:on_gpu", TWO[name]), 1e-4)


@pytest.mark.parametrize("name", THREE)
def test_three_ranks_agree_with_the_virtual_engine(three: Processes, name: str) -> None:
    check(THREE[name], three.run("tests.test_gpu_distributed:on_gpu", THREE[name]), 1e-4)


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_agree_with_the_virtual_engine(four: Processes, name: str) -> None:
    check(FOUR[name], four.run("tests.test_gpu_distributed:on_gpu", FOUR[name]), 1e-4)
