"""What a user's pair of PyTorch data sets may be."""

from typing import Any

import torch
from torch.utils.data import Dataset, Subset, TensorDataset, random_split

from pipebench.zoo.measures import LOSSES
from pipebench.zoo.plain import DatasetPair


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
