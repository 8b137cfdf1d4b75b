"""Runs the tests of GPUs on an emulated GPU or on the CPU, so that machines without a GPU run their code, too."""

from collections.abc import Callable

import pytest

from pipebench.model.device import torch_settings
from pipebench.recipe.schema import EngineRecipe
from pipebench.zoo import vgg
from tests import test_gpu, test_gpu_distributed
from tests.distributed.test_equality import TWO
from tests.made_up_gpu import made_up_gpu
from tests.processes import Processes

# Tests that look at CUDA itself: its allocator, its streams, and how fast it is.
OF_CUDA = {
    "test_swapped_tensors_leave_the_device_for_pinned_memory",
    "test_copies_run_beside_passes",
    "test_minibatches_are_fetched_ahead_into_pinned_memory",
    "test_the_virtual_clock_loads_large_minibatches_as_fast_as_the_wall_s",
}
OTHERS = [name for name in vars(test_gpu) if name.startswith("test_") and name not in OF_CUDA]


def last_case(function: Callable[..., None]) -> dict[str, object]:
    marks = getattr(function, "pytestmark", ())
    return {mark.args[0]: mark.args[1][-1] for mark in marks if mark.name == "parametrize"}


@pytest.mark.parametrize("name", OTHERS)
def test_tests_of_gpus_pass_on_an_emulated_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer and narrower layers and fewer minibatches, which take less time."""
    monkeypatch.setattr(vgg, "_CHANNELS", (64, 0, 128, 0, 256, 0, 512, 0, 512, 0))
    monkeypatch.setattr(test_gpu, "WIDTH", 0.03125)
    monkeypatch.setattr(test_gpu, "CUTS", [6, 12, 20])
    monkeypatch.setattr(test_gpu, "MINIBATCHES", 7)
    function = getattr(test_gpu, name)
    with made_up_gpu(), torch_settings(EngineRecipe()):
        function(**last_case(function))


def test_cases_of_processes_run_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_gpu_distributed, "DEVICE", "cpu")
    monkeypatch.setattr(test_gpu_distributed, "COMPARED", [])
    with Processes(2, "cpu") as two:
        for case in (TWO["pipedream"], TWO["bf16, dp"], test_gpu_distributed.MOVING):
            test_gpu_distributed.check(case, two)
        for case in test_gpu_distributed.TIMED.values():
            for found in two.run("tests.test_gpu_distributed:measured", case):
                test_gpu_distributed.check_times(found)
        assert [direct for _, direct, _ in two.run("tests.test_gpu_distributed:facts")] == [False, False]
    assert [("2 ranks by Gloo", like_the_cpu) for like_the_cpu in (True, False, False)] == test_gpu_distributed.COMPARED
