"""The structure of a user's samples."""

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from pipebench.zoo.plain import DatasetPair
from pipebench.zoo.samples import Fields
from tests.zoo.made import Made

POINTS = torch.arange(24.0).reshape(8, 3)
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
