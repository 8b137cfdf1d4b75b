"""Repeated operations on the meta device have the outputs and costs, when looked up, that they have when run."""

from typing import Any

import pytest
import torch
from torch import nn

from pipebench.profile import roofline
from pipebench.profile.devices import DEVICES
from pipebench.profile.repeated import call_of, outputs_of
from pipebench.profile.roofline import Roofline

aten = torch.ops.aten
WIDTHS = (8, 8, 4)


class Block(nn.Module):
    """Convolution, normalisation and attention, some of it in place, some of it twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.attention, self.width = nn.MultiheadAttention(8, 2, batch_first=True), width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images = torch.relu_(self.norm(self.convolution(x[..., : self.width])))
        rows = images.flatten(2).transpose(1, 2)
        made, _ = self.attention(rows, rows, rows)
        return x * torch.softmax(made.sum((1, 2)), 0)[:, None, None, None] + torch.ones(1, device="meta")


def costs() -> tuple[Any, ...]:
    with torch.device("meta"):
        blocks, x = [Block(width) for width in WIDTHS], torch.empty(2, 8, 8, 8, requires_grad=True)
    with Roofline(DEVICES["V100"]) as priced:
        out = x
        for block in blocks:
            out = block(out)
        torch.autograd.backward((out * out.detach()).sum())
    gradients = [(each.grad.shape, each.grad.stride()) for block in blocks for each in block.parameters()]  # type: ignore[union-attr]
    return priced.flops, priced.moved_bytes, priced.launches, priced.seconds, out.shape, out.stride(), gradients


def test_a_model_costs_as_much_as_if_every_operation_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    found = costs(), costs()
    calls: Any = roofline._known_operations(DEVICES["V100"], DEVICES["V100"].efficiencies)
    names = {str(func) for func, *_ in calls}
    assert {"aten.convolution.default", "aten.convolution_backward.default", "aten.mul.Tensor"} <= names
    assert not any(name.split(".")[1].endswith("_") for name in names)
    monkeypatch.setattr(roofline, "call_of", lambda *_: None)
    assert found == (costs(),) * 2


def test_numbers_that_are_equal_but_not_the_same_are_told_apart() -> None:
    x = torch.empty(3, dtype=torch.int64, device="meta")
    calls = {call_of(aten.mul.Scalar, (x, number), {}) for number in (1, 1.0, True)}
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("operation", "args"),
    [(aten.add_.Tensor, (1.0,)), (aten.view.default, ([2, 3],)), (aten.mul.out, (2.0,)), (aten.mul.Tensor, ("cpu",))],
)
def test_operations_that_change_arguments_or_read_values_are_run(operation: Any, args: tuple[Any, ...]) -> None:
    """`"cpu"` stands for a tensor that has numbers."""
    given = [torch.ones(()) if each == "cpu" else each for each in args]
    assert call_of(operation, (torch.empty(6, device="meta"), *given), {}) is None


def test_views_of_arguments_and_of_each_other_are_not_counted_as_new_tensors() -> None:
    x = torch.empty(4, 6, device="meta")
    whole = torch.empty(8, device="meta")
    assert outputs_of(aten.unsafe_split.Tensor(x, 2), (x,)) is None
    assert outputs_of([whole, whole[:2]], ()) is None
    assert outputs_of(whole[2:], ()) is None
    made = outputs_of((x, None), ())
    assert made is not None
    tensor, nothing = made.made()
    assert (tensor.shape, tensor.dtype, tensor.is_meta, nothing) == (x.shape, x.dtype, True, None)
