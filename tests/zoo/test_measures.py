"""Which part of a model's output is its loss."""

from typing import Any

import pytest
import torch

from pipebench.zoo.measures import beside_loss, loss_of_model

LOSS, OTHER = torch.tensor(1.0), torch.tensor(2.0)
EACH, SCORES, LOGITS = torch.ones(4), torch.zeros(4), torch.ones(4, 3)


@pytest.mark.parametrize(
    ("output", "loss", "rest"),
    [
        ((LOSS, LOGITS), LOSS, LOGITS),
        ((LOGITS, LOSS), LOSS, LOGITS),  # nanoGPT's order
        ((SCORES, LOSS), LOSS, SCORES),
        ([LOGITS, SCORES, LOSS], LOSS, (LOGITS, SCORES)),
        ((LOSS, OTHER), LOSS, OTHER),
        ((LOSS,), LOSS, ()),
        ((EACH, LOGITS), EACH, LOGITS),
        ((EACH, SCORES, LOGITS), EACH, (SCORES, LOGITS)),
        ({"logits": LOGITS, "loss": LOSS}, LOSS, LOGITS),
    ],
)
def test_the_loss_of_a_tuple_is_its_only_number(output: Any, loss: torch.Tensor, rest: Any) -> None:
    """0.2.0: of (logits, loss) the logits were minimised if they had one dimension, and refused if they had more."""
    assert loss_of_model(output, None) is loss
    kept = beside_loss(output)
    assert kept is rest or (type(kept) is type(rest) and [id(each) for each in kept] == [id(each) for each in rest])


@pytest.mark.parametrize("output", [(), (LOGITS, EACH), (SCORES, LOSS, LOSS), LOGITS, {"logits": LOGITS}, "loss"])
def test_outputs_whose_loss_may_be_any_part_are_refused(output: Any) -> None:
    with pytest.raises(ValueError, match="a tuple with the loss first, or an object or a dict with `loss`"):
        loss_of_model(output, None)
