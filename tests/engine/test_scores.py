"""The copy of the whole model that scores evaluations."""

from dataclasses import replace

import torch
from torch import nn

from pipebench.engine.scores import WholeModel
from tests.support import Blobs, Mlp, make_setup


class Sharing(Mlp):
    """Two of its modules have the same buffer."""

    def __init__(self) -> None:
        super().__init__()
        num_calls = torch.zeros(1)
        for module in (self, self.body):
            module.register_buffer("num_calls", num_calls)


class Whole(Blobs):
    """Stores the model that it is given to score."""

    def whole_model_metrics(self, model: nn.Module) -> dict[str, float]:
        self.model = model
        return {}


def test_modules_of_the_whole_model_share_buffers_on_another_device_too() -> None:
    """`Module.to` copied it for each: values that one wrote while generating text were not read by the other."""
    data, model = Whole(), Sharing()
    setup = replace(make_setup(model, ([], [1]), weights="one", depth=1, dataset=data), device=torch.device("meta"))
    WholeModel(setup).metrics([])
    assert data.model.num_calls.device.type == "meta"
    assert data.model.num_calls is data.model.body.num_calls  # type: ignore[union-attr]
    assert model.num_calls.device.type == "cpu"
