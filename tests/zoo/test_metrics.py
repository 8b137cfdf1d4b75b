"""Metrics and losses on logits small enough to count by hand."""

import math

import pytest
import torch

from pipebench.zoo.metrics import classification_loss, main_logits, num_correct


@pytest.mark.parametrize(("k", "expected"), [(1, 1), (2, 2), (3, 3), (9, 3)])
def test_num_correct(k: int, expected: int) -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    assert num_correct(logits, torch.tensor([0, 1, 2]), k).item() == expected


def test_auxiliary_logits_weigh_four_tenths() -> None:
    """Logits (ln 3, 0) give the classes probabilities 3/4 and 1/4; equal logits give one half each."""
    logits, auxiliary = torch.tensor([[math.log(3), 0.0]] * 2), torch.zeros(2, 2)
    labels = torch.tensor([0, 1])
    main = math.log(4 / 3) + math.log(4)
    assert classification_loss(logits, labels).item() == pytest.approx(main)
    assert classification_loss((logits, auxiliary), labels).item() == pytest.approx(main + 0.4 * 2 * math.log(2))
    assert main_logits((logits, auxiliary)) is logits
    assert main_logits(logits) is logits
