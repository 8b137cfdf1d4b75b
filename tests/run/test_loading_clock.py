"""Loading takes as long on the virtual clock as on the wall clock, with and without loader processes.

Reading and computing are sleeps, so that a busy machine takes no longer. `tests/bench/loading.py` has data whose
loading computes. Epochs are long, since starting loader processes takes time.
"""

import time
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import pipebench

_SAMPLES, _MINIBATCH, _COMPUTING_S = 320, 8, 0.05


class _Disk(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples that take some seconds each to be read."""

    def __init__(self, read_s: float) -> None:
        self._read_s = read_s

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self._read_s)
        return torch.full((4,), index / _SAMPLES), torch.tensor(index % 2)


def data(minibatch_s: float) -> tuple[_Disk, TensorDataset]:
    """Return samples to train on, a minibatch of which takes `minibatch_s` to be read, and two to evaluate with."""
    return _Disk(minibatch_s / _MINIBATCH), TensorDataset(torch.zeros(2, 4), torch.tensor([0, 1]))


class Slow(nn.Module):
    """Returns its input after a while."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(_COMPUTING_S)
        return x


def model() -> nn.Module:
    """Return a model that takes `_COMPUTING_S`, and almost nothing more, for any minibatch."""
    return nn.Sequential(nn.Linear(4, 2), Slow())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "minibatch_s", "each_s"),
    [(0, 0.08, 0.08 + _COMPUTING_S), (1, 0.02, _COMPUTING_S), (2, 0.2, 0.1)],
    ids=["read on demand", "computing binds", "reading binds"],
)
def test_the_virtual_clock_loads_as_fast_as_the_wall_s(
    processes: int, minibatch_s: float, each_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = {
        "name": "loading",
        "model": {"target": f"{__name__}:model", "leaves": ["1"]},
        "dataset": {
            "target": f"{__name__}:data", "minibatch_s": minibatch_s, "loader_processes": processes,
            "loss": "cross_entropy", "metrics": {"top1": "top1"},
        },
        "train": {"minibatch_size": _MINIBATCH, "max_epochs": 1, "optimizer": {"name": "sgd", "lr": 0.01}},
        "cluster": {"name": "local"},
        "parallelism": {"mode": "single"},
    }  # fmt: skip
    Path("loading.yaml").write_text(yaml.safe_dump(recipe))
    engine = {"device": "cpu", "timing": "measured", "threads": 1}
    virtual_s, wall_s = (
        pipebench.run("loading.yaml", on_progress=lambda _: None, engine={**engine, "kind": kind}).metrics[
            "epoch_time_s"
        ]
        for kind in ("virtual", "distributed")
    )
    assert virtual_s == pytest.approx(wall_s, rel=0.1)
    assert virtual_s == pytest.approx(_SAMPLES / _MINIBATCH * each_s, rel=0.1)
