"""The structure of a user's samples."""

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from pipebench.zoo.measures import LOSSES
from pipebench.zoo.plain import DatasetPair
from pipebench.zoo.samples import Fields
from tests.zoo.made import Made

POINTS, LABELS = torch.arange(24.0).reshape(8, 3), torch.arange(8)
Pair = namedtuple("Pair", ["hard", "soft"])


@dataclass
class Record:
    x: Any
    hard: Any
    soft: Any
    name: str = "a"


@pytest.mark.parametrize(
    ("make", "fields", "target"),
    [
        (lambda x, *ys: (x, Pair(*ys)), None, Pair(0, 1)),
        (lambda x, *ys: (x, [*ys]), None, (0, 1)),
        (lambda x, *ys: (x, dict(zip("01", ys, strict=True))), None, {"0": 0, "1": 1}),
        (lambda x, *ys: (x, dict(zip((1, 2), ys, strict=True))), None, {1: 0, 2: 1}),
        (lambda *parts: (*parts, "a"), Fields([0], [1, 2]), (0, 1)),
        (lambda *parts: parts, Fields([0]), (0, 1)),
        (lambda x, *ys: {"x": x, 7: ys[0], 8: ys[1]}, Fields(["x"]), {7: 0, 8: 1}),
        (lambda *parts: Record(*parts), Fields(["x"], ["soft", "hard"]), {"soft": 1, "hard": 0}),
        (lambda x, *ys: namedtuple("Named", "x hard soft")(x, *ys), Fields(["x"], ["hard"]), 0),
    ],
)  # fmt: skip
def test_losses_get_targets_in_the_samples_structure(make: Callable[..., Any], fields: Any, target: Any) -> None:
    """0.2.0: named tuples came as tuples, and dicts whose keys are numbers, or look like numbers, under other keys."""
    samples, found = Made(lambda i: make(POINTS[i], torch.tensor(0), torch.tensor(1))), list[Any]()

    def loss(output: torch.Tensor, given: Any) -> torch.Tensor:
        found.append(given)
        return output.mean()

    data = DatasetPair(samples, samples, loss, {}, fields=fields)
    data.loss(torch.ones(1), data.fetch("train", [0], data.targets))
    assert type(found[0]) is type(target) or isinstance(target, int)
    assert found[0] == target


@pytest.mark.parametrize("in_minibatch", [False, True])
def test_texts_are_no_targets_unless_they_are_named(in_minibatch: bool) -> None:
    """0.2.0: a name beside the tensors had to be left out by naming the targets, even if the model gives the loss."""
    texts = {"name": ["a", "b"], "empty": None} if in_minibatch else {"name": "a", "empty": None}
    assert Fields(["x"]).pair({"x": 1, "y": 2, **texts}) == ({"x": 1}, 2)
    assert Fields(["x", "y"]).pair({"x": 1, "y": 2, **texts}) == ({"x": 1, "y": 2}, 2)
    assert Fields(["x"], ["name"]).pair({"x": 1, **texts})[1] == texts["name"]


def _first(samples: list[Any]) -> Any:
    return samples[0][0].unsqueeze(0), torch.from_numpy(samples[0][1]).view(1)


@pytest.mark.parametrize("collate", [_first, lambda samples: (POINTS[:1], LABELS[:1])])
def test_minibatches_share_no_memory_with_the_data_set(collate: Callable[[list[Any]], Any]) -> None:
    """0.2.0: a model that changes its input in place changed the data set, but not that of other processes."""
    before = POINTS.clone()
    samples = DataLoader(Made(lambda i: (POINTS[0], LABELS[:1].numpy()), 1), collate_fn=collate)
    data = DatasetPair(samples, samples, LOSSES["cross_entropy"], {})
    fetched = data.fetch("train", [0], ["input", "target"])
    fetched["input"].zero_()
    fetched["target"].fill_(7)
    assert torch.equal(POINTS, before)
    assert LABELS[0] == 0


def test_samples_that_a_teacher_computes_have_no_gradient() -> None:
    """0.2.0: refused, as a loss with parameters of its own, if the data set didn't turn gradients off."""
    teacher = torch.nn.Linear(3, 2)
    samples = Made(lambda i: (POINTS[i], teacher(POINTS[i]).softmax(0)))
    data = DatasetPair(samples, samples, LOSSES["cross_entropy"], {})
    assert not data.fetch("train", [0, 1], ["target"])["target"].requires_grad
