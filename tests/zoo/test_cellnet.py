"""The network of cells: shapes, sizes, and that a new cell is the identity."""

import pytest
import torch

from pipebench import zoo
from pipebench.zoo.cellnet import Cell, cellnet


def test_shapes_and_size() -> None:
    model = zoo.MODELS["cellnet"].make()
    assert model(torch.zeros(3, 1, 28, 28)).shape == (3, 10)
    # stem 16*9+16 and its norm 32; cells of 16 and 32 channels with windows 3, 5, 3, 7; 3x3 between; classifier
    cells = sum(c * k * k + c * c + 4 * c for c in (16, 32) for k in (3, 5, 3, 7))
    assert sum(p.numel() for p in model.parameters()) == 160 + 32 + cells + 16 * 32 * 9 + 32 + 32 * 10 + 10 == 15_466


def test_groups_and_cells_can_be_chosen() -> None:
    model = cellnet(width=4, groups=3, cells=2, num_classes=5, in_channels=3)
    assert sum(isinstance(module, Cell) for module in model.modules()) == 6
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 5)


def test_a_new_cell_is_the_identity() -> None:
    x = torch.randn(4, 8, 6, 6)
    assert torch.equal(Cell(8, 5)(x), x)


@pytest.mark.parametrize("option", ["width", "groups", "cells", "num_classes", "in_channels"])
def test_options_out_of_range_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"cellnet: {option} is 0, allowed is 1 or more"):
        zoo.MODELS["cellnet"].make(**{option: 0})
