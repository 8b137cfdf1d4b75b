"""What tests of GPUs call, on the CPU: so that it doesn't rot where no GPU runs it."""

import pytest
import torch

from pipebench.model.device import torch_settings
from pipebench.recipe.schema import EngineRecipe
from tests import test_gpu, test_gpu_distributed
from tests.distributed.test_equality import TWO
from tests.processes import Processes


def test_what_needs_only_a_device_runs_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_gpu, "DEVICE", torch.device("cpu"))
    with torch_settings(EngineRecipe()):
        test_gpu.test_weight_versions_are_held_on_the_device()
        test_gpu.test_weight_versions_of_lstms_stay_where_they_are()
        test_gpu.test_gpu_and_cpu_agree_within_float_tolerance()
        test_gpu.test_stateful_lstms_train_in_every_cut_and_cudnn_never_compacts_their_weights(0.5)
        test_gpu.test_what_is_swapped_comes_back_with_the_same_bits({})
        test_gpu.test_lstms_of_cudnn_are_swapped_with_the_same_bits()


def test_cases_of_processes_run_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_gpu_distributed, "DEVICE", "cpu")
    monkeypatch.setattr(test_gpu_distributed, "COMPARED", [])
    with Processes(2, "cpu") as two:
        for name in ("pipedream", "bf16, dp"):
            test_gpu_distributed.check(TWO[name], two)
        for case in test_gpu_distributed.TIMED.values():
            for found in two.run("tests.test_gpu_distributed:measured", case):
                test_gpu_distributed.check_times(found)
        assert [direct for _, direct, _ in two.run("tests.test_gpu_distributed:facts")] == [False, False]
    assert test_gpu_distributed.COMPARED == [("2 ranks by Gloo", True), ("2 ranks by Gloo", False)]
