"""Processes with emulated GPUs: they mix no devices, wait for what they use, and agree with the virtual engine."""

import pytest

from pipebench.model.device import torch_settings
from pipebench.recipe.schema import EngineRecipe
from tests.distributed import test_slices
from tests.distributed.cases import Case, compare, distributed, virtually
from tests.distributed.sliced import trained
from tests.distributed.test_equality import THREE, TWO
from tests.distributed.test_first_use import NOT_BY_GLOO
from tests.processes import Processes

RUNS = ["through_host", "directly"]


def check(case: Case, processes: Processes, run: str) -> None:
    found = processes.run(f"tests.distributed.gpu_processes:{run}", distributed, case)
    with torch_settings(EngineRecipe(threads=1)):
        compare(found, virtually(case), 1e-12)


@pytest.mark.sampled(55)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", [name for name in TWO if name not in NOT_BY_GLOO])
def test_two_processes_agree_with_the_virtual_engine(two: Processes, name: str, run: str) -> None:
    check(TWO[name], two, run)


@pytest.mark.sampled(55)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", THREE)
def test_three_processes_agree_with_the_virtual_engine(three: Processes, name: str, run: str) -> None:
    check(THREE[name], three, run)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", ["adam, tied", "bf16"])
def test_slices_agree_with_the_virtual_engine(two: Processes, name: str, run: str) -> None:
    parallelism, train, tolerance = test_slices.TWO[name]
    given = test_slices.recipe(parallelism, 2, **train)
    on_gpu = {**given, "engine": {**given["engine"], "device": "cuda"}}
    found = two.run(f"tests.distributed.gpu_processes:{run}", trained, on_gpu, test_slices.SEGMENTS)
    with torch_settings(EngineRecipe(threads=1)):
        test_slices.compare(found, *test_slices.virtually(given), tolerance or 1e-6)
