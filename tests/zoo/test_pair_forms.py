"""Minibatches of a pair of data sets of which those held out differ from those to train on."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from pipebench.zoo.measures import LOSSES, METRICS
from pipebench.zoo.plain import DatasetPair
from pipebench.zoo.registry import DataError
from tests.zoo.made import Made

POINTS, LABELS = torch.arange(24.0).reshape(8, 3), torch.arange(8) % 3


def test_targets_of_held_out_samples_may_be_of_another_kind() -> None:
    """0.2.0: refused, so that the usual MixUp, of which only training samples have soft labels, couldn't be trained."""

    def mixed(samples: list[Any]) -> Any:
        points, labels = default_collate(samples)
        return points, nn.functional.one_hot(labels, 8).float()

    pairs = TensorDataset(POINTS, LABELS)
    data = DatasetPair(DataLoader(pairs, collate_fn=mixed), pairs, LOSSES["cross_entropy"], {"top1": METRICS["top1"]})
    data.check()
    output, losses = torch.randn(8, 8), []
    for split in ("train", "eval"):
        losses.append(data.loss(output, data.fetch(split, range(8), ["target"])))
    torch.testing.assert_close(losses[0], losses[1])
    assert data.score(output, data.fetch("eval", range(8), ["target"]))["top1"].dim() == 0
    assert (data.example_note, len(data.examples(3))) == ("", 1)
    others = TensorDataset(POINTS.double(), LABELS)
    with pytest.raises(DataError, match=r"input of sample 0 of eval .* float64, .* first sample of train$"):
        DatasetPair(pairs, others, LOSSES["cross_entropy"], {}).check()


def test_held_out_samples_may_have_another_size() -> None:
    """0.2.0: only with a collate_fn of their own."""
    larger = Made(lambda i: (torch.zeros(5 if i < 7 else 6), i))
    data = DatasetPair(TensorDataset(POINTS, LABELS), larger, LOSSES["cross_entropy"], {})
    assert [[*each["input"].shape] for each in data.examples(2)] == [[2, 3], [2, 5]]
    assert data.example_note == "minibatches differ in shape, costs are of input [n, 3]"
    assert data.fetch("eval", [0, 6], ["input"])["input"].shape == (2, 5)
    with pytest.raises(DataError, match=r"sample 7 of eval is a tensor \[6\] .* \[5\] .* sample of eval: pad"):
        data.check()
