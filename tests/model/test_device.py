"""torch's settings for a run: as the recipe says while it lasts, and put back, without torch's compiler."""

import pytest
import torch

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
