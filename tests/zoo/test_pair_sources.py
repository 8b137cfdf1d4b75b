"""What a user's pair of PyTorch data sets may be."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, random_split

from pipebench.engine.feed import Feed
from pipebench.model.loading import Loaders
from pipebench.zoo.measures import LOSSES
from pipebench.zoo.plain import DatasetPair
from tests.support import make_setup


class Doubling(TensorDataset):
    """Has a collate function of its own."""

    def collate_fn(self, samples: list[Any]) -> Any:
        points, labels = zip(*samples, strict=True)
        return 2 * torch.stack(points), torch.stack(labels)


def test_the_collate_fn_of_a_subset_s_data_set_makes_minibatches() -> None:
    """0.2.0: samples of `random_split` were collated as if their data set had no such function."""
    samples: Dataset[Any] = Doubling(torch.ones(8, 3), torch.arange(8))
    train, held_out = random_split(samples, [6, 2])
    data = DatasetPair(train, Subset(held_out, [1, 0]), LOSSES["cross_entropy"], {})
    for split in ("train", "eval"):
        assert data.fetch(split, [0, 1], ["input"])["input"].tolist() == [[2.0] * 3] * 2


class Curriculum(Dataset[Any]):
    """Samples that say which epoch they are of."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples, self._epoch = num_samples, -1

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(self._epoch), float(index)]), torch.tensor(index % 2)


@pytest.mark.parametrize("loader_processes", [0, 2])
def test_a_data_set_is_told_the_epoch_of_every_minibatch(loader_processes: int) -> None:
    """0.2.0 left it in its first state, as nothing called `set_epoch`."""
    curriculum: Dataset[Any] = ConcatDataset([Curriculum(4), Subset(Curriculum(8), [6, 7])])
    data = DatasetPair(curriculum, Curriculum(3), LOSSES["cross_entropy"], {}, loader_processes)
    data.check()
    setup = make_setup(
        nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)), ([2], [1, 1]), dataset=data, minibatch_size=2
    )
    loaders = Loaders(data, setup.device)
    feed = Feed(setup, "train", 0, 7, loaders)
    (name,) = setup.graph.inputs
    found = [feed.inputs(0, 0, unit, [name])[0][:, 0].tolist() for unit in range(7)]
    feed.close()
    held_out = Feed(setup, "eval", 0, 2, loaders)
    assert held_out.inputs(0, 0, 0, [name])[0][:, 0].tolist() == [-1.0] * 2
    held_out.close()
    loaders.close()
    assert found == [[float(k // 3)] * 2 for k in range(7)]
