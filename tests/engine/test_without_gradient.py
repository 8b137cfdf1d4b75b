"""Parameters that no gradient reaches have none behind any cut, as in a plain loop, whose optimizer skips them."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pipebench.model.graph import trace
from tests.engine.test_users_models import UPDATES, Net, assert_as_expected, compares_apart, decaying, detaches, plainly
from tests.evaluations import mode_setup, trained
from tests.support import Blobs, Mlp, parameters_of


def test_a_stage_between_others_may_have_no_gradient() -> None:
    graph = trace(Net(detaches))
    starts = [graph.index_of("b"), graph.index_of("detach")]
    for backward in ("whole", "split"):
        setup = mode_setup(Net(detaches), "gpipe", starts, backward=backward, make_optimizer=decaying)
        assert_as_expected(setup, plainly(Net(detaches), 2, 2))


def test_without_a_flush_decay_does_not_change_parameters_without_a_gradient() -> None:
    """For every cut: a plain loop's optimizer skips parameters without a gradient."""
    begin = dict(Net(compares_apart).named_parameters())
    for start in range(1, len(trace(Net(compares_apart)).layers)):
        setup = mode_setup(Net(compares_apart), "pipedream", [start], make_optimizer=decaying)
        found = parameters_of(trained(setup, UPDATES))
        assert {n for n, value in found.items() if torch.equal(value, begin[n])} == {"b.weight", "b.bias"}, start


class TwoHeads(Mlp):
    """Also returns features that the loss doesn't read."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(6, 8).double()

    def forward(self, x: torch.Tensor) -> Any:
        """Return [samples, 4] and [samples, 8]."""
        features = self.features(x)
        return super().forward(x), features


class OfFirst(Blobs):
    """The loss is of the first output."""

    def loss(self, output: Any, targets: Any) -> torch.Tensor:
        return super().loss(output[0], targets)


def test_an_output_that_the_loss_does_not_read_gets_no_gradient() -> None:
    def loss(output: Any, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output[0], target, reduction="sum")

    expected = plainly(TwoHeads(), 4, 1, loss=loss)
    for start in (1, 3):
        setup = mode_setup(TwoHeads(), "model", [start], make_optimizer=decaying, dataset=OfFirst())
        assert_as_expected(setup, expected)
