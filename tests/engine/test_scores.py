"""Scores of evaluations: samples whose outputs are NaN, and the copy of the whole model."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from pipebench.engine.scores import Scores, WholeModel
from tests.support import Blobs, Mlp, make_setup

LABELS = {"label": torch.tensor([0, 0, 1])}  # the first class, which `argmax` gives for NaN, is most samples'
RIGHT = torch.eye(4)[LABELS["label"]]
NAN = torch.full((3, 4), math.nan)


class Distance(Blobs):
    """Also scores a metric to minimise."""

    metrics: Mapping[str, str] = {"top1": "max", "distance": "min"}

    def score(self, output: Any, targets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return super().score(output, targets) | {"distance": output.abs().sum()}


@pytest.mark.parametrize(("outputs", "top1"), [([RIGHT, RIGHT], 1.0), ([RIGHT, NAN], 0.5), ([NAN, NAN], 0.0)])
def test_nan_outputs_count_as_wrong(outputs: list[torch.Tensor], top1: float) -> None:
    scores = Scores(Distance())
    for output in outputs:
        scores.add(output, LABELS, 3.0)
    found = scores.metrics()
    has_nan = any(output is NAN for output in outputs)
    assert {*found} == {"eval_loss", "top1", "distance"}
    assert found["top1"] == top1
    assert (math.isnan(found["eval_loss"]), math.isnan(found["distance"])) == (has_nan, has_nan)


def test_a_loss_that_is_nan_of_outputs_that_are_numbers_leaves_scores_as_they_are() -> None:
    class Strange(Distance):
        def loss(self, output: Any, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
            return torch.tensor(math.nan)

    scores = Scores(Strange())
    scores.add(RIGHT, LABELS, 3.0)
    found = scores.metrics()
    assert (found["top1"], found["distance"]) == (1.0, 1.0)
    assert math.isnan(found["eval_loss"])


def test_workers_add_up_what_they_have_scored() -> None:
    data, each = Blobs(), []
    for output in (RIGHT, NAN):
        scores = Scores(data)
        scores.add(output, LABELS, 3.0)
        each.append(scores.sums)
    scores.merge([*each, {}])
    assert scores.metrics()["top1"] == 0.5


class Sharing(Mlp):
    """Two of its modules have the same buffer."""

    def __init__(self) -> None:
        super().__init__()
        num_calls = torch.zeros(1)
        for module in (self, self.body):
            module.register_buffer("num_calls", num_calls)


class Whole(Blobs):
    """Keeps the model that it was to score."""

    def whole_model_metrics(self, model: nn.Module) -> dict[str, float]:
        self.model = model
        return {}


def test_modules_of_the_whole_model_share_buffers_on_another_device_too() -> None:
    """`Module.to` gave each of them its own: what one wrote while it generated text, the other didn't read."""
    data, model = Whole(), Sharing()
    setup = replace(make_setup(model, ([], [1]), weights="one", depth=1, dataset=data), device=torch.device("meta"))
    WholeModel(setup).metrics([])
    assert data.model.num_calls.device.type == "meta"
    assert data.model.num_calls is data.model.body.num_calls  # type: ignore[union-attr]
    assert model.num_calls.device.type == "cpu"
