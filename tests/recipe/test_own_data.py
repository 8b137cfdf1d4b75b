"""Users' data sets, and the processes that read them ahead."""

import os
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from pipebench.errors import UserCodeError
from pipebench.model.loading import Loaders, Task
from pipebench.recipe.own_data import own_dataset
from pipebench.zoo.registry import Dataset as OfTheZoo


class Opening(Dataset[Any]):
    """Opens a file when the first sample is read, as of a zip file; a sample says which process did."""

    def __init__(self) -> None:
        self.opened_by: int | None = None

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        if self.opened_by is None:
            self.opened_by = os.getpid()
        return torch.tensor([self.opened_by, os.getpid()]), 0


class OpeningOfTheZoo(OfTheZoo):
    """The same as a data set of the zoo; finds out by itself whether it has opened its file."""

    inputs, targets, metrics, num_train, num_eval = ("input",), (), {}, 4, 4

    def example(self, num_samples: int) -> dict[str, torch.Tensor]:
        return {"input": torch.empty(num_samples, 2, dtype=torch.int64, device="meta")}

    def fetch(
        self, split: str, indices: Sequence[int], fields: Sequence[str], draw: int = 0
    ) -> dict[str, torch.Tensor]:
        if not hasattr(self, "opened_by"):
            self.opened_by = os.getpid()
        return {"input": torch.tensor([[self.opened_by, os.getpid()]])}

    def loss(self, output: Any, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        raise NotImplementedError


class Naming(OpeningOfTheZoo):
    """Has a metric with the name of a value that every run records."""

    inputs, targets, metrics, num_train, num_eval = ("input",), (), {"train_loss": "min"}, 4, 4


def test_a_data_set_of_the_zoo_whose_metric_has_the_name_of_a_curve_is_refused() -> None:
    with pytest.raises(UserCodeError, match="a metric train_loss, the name of what every run records"):
        own_dataset({"target": f"{__name__}:Naming"})


class Counting(nn.Module):
    """A loss of how often it has been called."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.calls = 0
        self.factor: torch.Tensor
        self.register_buffer("factor", torch.tensor(factor))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return output.mean() + self.factor * self.calls


def numbers() -> tuple[Any, ...]:
    return TensorDataset(torch.zeros(4, 2), torch.zeros(4)), TensorDataset(torch.zeros(2, 2), torch.zeros(2))


def test_an_object_of_a_class_computes_one_loss_and_is_on_the_output_s_device() -> None:
    count = {"target": f"{__name__}:Counting", "factor": 3.0}
    given = {"target": f"{__name__}:numbers", "loss": count, "metrics": {"count": {**count, "best": "min"}}}
    data = pickle.loads(pickle.dumps(own_dataset(given)))  # as for other processes
    for device in ("cpu", "cpu", "meta"):
        output, targets = torch.zeros(2, device=device), {"target": torch.zeros(2, device=device)}
        measured = data.loss(output, targets), data.score(output, targets)["count"]
        assert {each.device.type for each in measured} == {device}
        assert device == "meta" or measured == (6.0, 6.0)


def pair() -> tuple[Any, ...]:
    return Opening(), Opening()


KEPT: tuple[Any, ...] = (ConcatDataset([Subset(Opening(), range(4))]), Opening())


def opened() -> tuple[Any, ...]:
    return KEPT


@pytest.mark.parametrize("target", ["pair", "opened", "OpeningOfTheZoo"])
def test_loader_processes_share_no_file_that_was_opened_before(target: str) -> None:
    """Forked processes share a file's position: each would move that of the others."""
    given = {
        "target": f"{__name__}:{target}",
        "loader_processes": 2,
        "loss": None if target == "OpeningOfTheZoo" else "mse",
    }
    data = own_dataset(given)
    data.check()
    assert int(data.fetch("train", [0], ["input"])["input"][0, 0]) == os.getpid()
    loaders = Loaders(data.feeding(["input"]), torch.device("cpu"))
    processes = loaders.of("reader", 2)
    assert processes is not None
    tasks = (Task([index]) for index in range(4))
    read = [fields["input"][0].tolist() for fields in processes.minibatches("train", ["input"], tasks)]
    loaders.close()
    assert len({reader for _, reader in read}) == 2
    assert all(opened_by == reader for opened_by, reader in read)
    assert data.loader_processes == 2
