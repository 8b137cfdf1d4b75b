"""Settings of a run's process before it joins the others."""

from typing import Any

import pytest
import torch
import yaml

from pipebench.distributed.launch_join import PeerLostError
from pipebench.recipe.load import load_mapping
from pipebench.run import processes
from pipebench.run.suite import Suite
from tests.recipes import uniform_recipe


@pytest.mark.parametrize("deterministic", [True, False])
def test_determinism_is_set_before_nccl_begins(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch looks when the first group is made: it leaves out NVLS then, whose sums differ from call to call."""
    found: list[bool] = []

    def join(*_: Any, **__: Any) -> None:
        found.append(torch.are_deterministic_algorithms_enabled())
        raise PeerLostError("nobody came")

    monkeypatch.setattr(processes, "join", join)
    engine = {"kind": "distributed", "deterministic": deterministic}
    given = yaml.safe_load(uniform_recipe(2, 16, 8, 8, "mode: dp"))
    (loaded,) = load_mapping({**given, "cluster": {"name": "local", "count": 2}, "engine": engine})
    with pytest.raises(PeerLostError, match="nobody came"):
        processes.work(loaded, Suite("tiny"))
    assert found == [deterministic]
    assert not torch.are_deterministic_algorithms_enabled()
