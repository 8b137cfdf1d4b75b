"""Metrics of the whole held-out set."""

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from pipebench.engine.whole_set import WholeSet
from pipebench.model.rounded_data import RoundedData
from pipebench.zoo.registry import DataError, SetMetric
from tests.evaluations import MODES, RankedBlobs, area_under_curve, mode_setup, plain_model, trained
from tests.support import Blobs, Mlp


@pytest.mark.parametrize("mode", MODES)
def test_a_metric_of_the_whole_set_is_no_mean_over_minibatches(mode: str) -> None:
    data, model = RankedBlobs(num_eval=26), Mlp()
    engine = trained(mode_setup(model, mode, [4], dataset=data))
    found, plain, held_out = engine.evaluate(), plain_model(engine, model), engine.setup.held_out
    parts = [data.fetch("eval", held_out.indices(k), ["x", "label"]) for k in range(held_out.minibatches_per_epoch)]
    with torch.no_grad():
        scores = [plain(part["x"])[:, 0] for part in parts]
    positive = [part["label"] == 0 for part in parts]
    whole = area_under_curve(torch.cat(scores), torch.cat(positive))
    mixed = [pair for pair in zip(scores, positive, strict=True) if 0 < pair[1].sum() < len(pair[1])]
    mean = sum(area_under_curve(*pair) for pair in mixed) / len(mixed)
    assert found["area"] == pytest.approx(whole, abs=1e-12)
    assert abs(whole - mean) > 0.01
    in_order = torch.cat(scores).float() @ torch.arange(1.0, 1 + len(data._x) - data.num_train)
    assert found["order"] == pytest.approx(float(in_order), rel=1e-4)
    assert engine.evaluate() == found  # by new objects


class Recording:
    """A metric that does what a test asks for."""

    def __init__(self, value: Any = 0.0, fails: str = "") -> None:
        self.value, self.fails, self.seen = value, fails, list[Any]()

    def update(self, output: torch.Tensor, targets: Mapping[str, torch.Tensor]) -> None:
        if self.fails == "update":
            raise ArithmeticError("full")
        self.seen.append(output)

    def compute(self) -> Any:
        if self.fails == "compute":
            raise ArithmeticError("empty")
        return self.value


class Recorded(Blobs):
    """Has that metric."""

    def __init__(self, metric: Recording) -> None:
        super().__init__()
        self.metric = metric

    def whole_set_metrics(self) -> Mapping[str, SetMetric]:
        return {"mine": self.metric}


def test_minibatches_of_any_process_are_taken_in_their_order() -> None:
    metric = Recording(value=3)
    here, there = (WholeSet(Recorded(metric)) for _ in range(2))
    for k in (0, 3):
        here.add(k, torch.tensor([k]), {})
    for k in (4, 1, 2):
        there.add(k, torch.tensor([k]), {})
    assert there.compute() == {}
    assert [*there.waiting] == [4, 1, 2]
    here.take(there.waiting)
    assert [int(each) for each in metric.seen] == [0, 1, 2, 3, 4]
    assert here.compute() == {"mine": 3.0}


@pytest.mark.parametrize(
    ("recording", "sentence"),
    [
        ({"fails": "update"}, "the metric mine fails on the output, a tensor [2] float32"),
        ({"fails": "compute"}, "compute of the metric mine fails"),
        ({"value": torch.ones(2)}, "compute of the metric mine gives a tensor [2] float32, needed is a number"),
        ({"value": {"a": 1.0}}, "compute of the metric mine gives a dict of a: a float, needed is a number"),
        ({"value": None}, "compute of the metric mine gives None, needed is a number"),
    ],
)
def test_metrics_that_give_no_number_are_named(recording: dict[str, Any], sentence: str) -> None:
    whole_set = WholeSet(Recorded(Recording(**recording)))
    with pytest.raises(DataError, match=re.escape(sentence)):  # noqa: PT012
        whole_set.add(0, torch.ones(2), {})
        whole_set.compute()


def test_metrics_get_outputs_of_mixed_precision_in_fp32() -> None:
    metric = Recording()
    WholeSet(RoundedData(Recorded(metric), torch.bfloat16)).add(0, torch.ones(2, dtype=torch.bfloat16), {})
    assert metric.seen[0].dtype is torch.float32
