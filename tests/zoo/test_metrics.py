"""Metrics on logits small enough to count by hand."""

import pytest
import torch

from zoo.metrics import num_correct


@pytest.mark.parametrize(("k", "expected"), [(1, 1), (2, 2), (3, 3), (9, 3)])
def test_num_correct(k: int, expected: int) -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    assert num_correct(logits, torch.tensor([0, 1, 2]), k).item() == expected
