"""torch's settings for a run: as the recipe says while it lasts, and put back, without torch's compiler."""

import pytest
import torch

from pipebench.model import device
from pipebench.model.device import torch_settings
from pipebench.recipe.schema import EngineRecipe


@pytest.mark.parametrize("before", ["default", "warn", "error"])
def test_determinism_is_asked_for_and_put_back(before: str) -> None:
    outside = torch.get_deterministic_debug_mode()
    try:
        torch.set_deterministic_debug_mode(before)
        expected = torch.get_deterministic_debug_mode()
        with torch_settings(EngineRecipe(deterministic=True)):
            assert torch.are_deterministic_algorithms_enabled()
            assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.get_deterministic_debug_mode() == expected
        with torch_settings(EngineRecipe(deterministic=False)):
            assert torch.get_deterministic_debug_mode() == expected
    finally:
        torch.set_deterministic_debug_mode(outside)


@pytest.mark.parametrize(("usable", "asked", "given"), [(1.5, None, 1), (64.0, None, 3), (1.5, "3", 3)])
def test_a_container_s_quota_limits_threads_unless_they_are_asked_for(
    usable: float, asked: str | None, given: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch takes a thread per core of the host: 64 that take turns on two cores are slower than two."""
    monkeypatch.setattr(device, "usable_cores", lambda: usable)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with torch_settings(EngineRecipe()):
            assert torch.get_num_threads() == given
        with torch_settings(EngineRecipe(threads=2)):
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
