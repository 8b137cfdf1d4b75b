"""Helpers of tests that compare evaluated scores with plain torch, without code of the engine's evaluation."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import distributed, nn
from torch.nn import functional

from pipebench.engine.setup import Setup
from pipebench.engine.virtual import VirtualEngine
from pipebench.simulate.timeline import EVALUATION
from pipebench.zoo.registry import SetMetric
from tests.support import Blobs, make_engine, make_setup

# Arguments of `make_setup` for every order of work, weight policy and kind of plan; `stages` is 1 for no cuts.
MODES: Mapping[str, Mapping[str, Any]] = {
    "single": {"weights": "one", "depth": 1, "stages": 1},
    "dp": {"weights": "one", "depth": 1, "stages": 1, "replicas": 2},
    "model": {"weights": "one", "depth": 1},
    "gpipe": {"order": "all-forwards", "weights": "one", "microbatches": 2, "recompute": True},
    "pipedream-flush": {"weights": "one", "microbatches": 2},
    "pipedream": {},
    "pipedream-vertical-sync": {"weights": "stash-vertical-sync"},
    "pipedream-replicated": {"replicas": 2},
}


class Images(Blobs):
    """Random images; of models with several outputs, the first is scored and the losses are added."""

    def __init__(self, size: int = 32, num_train: int = 8, num_eval: int = 6) -> None:
        super().__init__(num_train, num_eval, shape=(3, size, size))

    def loss(self, output: Any, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the summed cross-entropy of all outputs."""
        outputs = [output] if isinstance(output, torch.Tensor) else [each for each in output if each is not None]
        return sum(  # type: ignore[return-value]
            functional.cross_entropy(each, targets["label"], reduction="sum") for each in outputs
        )

    def score(self, output: Any, targets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return super().score(output if isinstance(output, torch.Tensor) else output[0], targets)


class Ranking:
    """Area under the curve of class 0 against the others, by the sum of its samples' ranks; outputs have no ties."""

    def __init__(self) -> None:
        self.scores: list[float] = []
        self.positive: list[bool] = []

    def update(self, output: torch.Tensor, targets: Mapping[str, torch.Tensor]) -> None:
        assert output.device.type == targets["label"].device.type == "cpu"
        self.scores += output[:, 0].tolist()
        self.positive += (targets["label"] == 0).tolist()

    def compute(self) -> Any:
        assert not distributed.is_initialized()  # torchmetrics' own would now exchange with processes that don't
        ranks = torch.tensor(self.scores, dtype=torch.float64).argsort().argsort() + 1
        num = sum(self.positive)
        return (int(ranks[torch.tensor(self.positive)].sum()) - num * (num + 1) / 2) / (num * (len(ranks) - num))


class Order(Ranking):
    """Depends on the order of minibatches."""

    def compute(self) -> torch.Tensor:
        return torch.tensor(self.scores) @ torch.arange(1.0, 1 + len(self.scores))


class RankedBlobs(Blobs):
    """Random features and labels, with metrics of the whole held-out set."""

    metrics: Mapping[str, str] = {"top1": "max", "area": "max", "order": "min"}

    def whole_set_metrics(self) -> Mapping[str, SetMetric]:
        return {"area": Ranking(), "order": Order()}


def area_under_curve(scores: torch.Tensor, positive: torch.Tensor) -> float:
    """Return the share of pairs of a positive and another sample in which the positive one scores higher."""
    pairs = [float(a > b) + 0.5 * float(a == b) for a in scores[positive] for b in scores[~positive]]
    return sum(pairs) / len(pairs)


def mode_setup(model: nn.Module, mode: str, starts: Sequence[int], **options: Any) -> Setup:
    """Return a setup of a model in one of `MODES`, cut before the layers `starts` if the mode has several stages."""
    columns = dict(MODES[mode])
    own = [] if columns.pop("stages", None) == 1 else list(starts)
    replicas = [columns.pop("replicas", 1), *([1] * len(own))]
    # BatchNorm refuses to train on one sample, so only minibatches of 4 and their halves are profiled.
    return make_setup(model, (own, replicas), **({"sizes": (2, 4)} | columns | options))


def trained(setup: Setup, num_minibatches: int = 3) -> VirtualEngine:
    """Return an engine that has trained some minibatches."""
    engine = make_engine(setup)
    engine.train(0, num_minibatches)
    return engine


def plain_model(engine: VirtualEngine, model: nn.Module) -> nn.Module:
    """Return a copy of `model`, the module before tracing, with the trained weights, in evaluation mode."""
    model = copy.deepcopy(model)
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    with torch.no_grad():
        for replica in engine.replicas:
            for name, tensor in replica.tensors().items():
                if not name.startswith("_tensor_constant"):  # tracing adds tensors that `forward` makes
                    own[name.removeprefix("model.") if name not in own else name].copy_(tensor)
    return model.eval()


def plain_scores(engine: VirtualEngine, model: nn.Module) -> dict[str, float]:
    """Return the scores of the trained weights in plain torch; `model` is the module before tracing."""
    model = plain_model(engine, model)
    setup, total, right, count = engine.setup, 0.0, 0, 0
    with torch.no_grad():
        for k in range(setup.held_out.minibatches_per_epoch):
            fields = setup.dataset.fetch("eval", setup.held_out.indices(k), ["x", "label"])
            output = model(fields["x"])
            total += float(setup.dataset.loss(output, fields))
            right += int(setup.dataset.score(output, fields)["top1"])
            count += len(fields["label"])
    return {"eval_loss": total / count, "top1": right / count}


def assert_scores_are_the_weights(engine: VirtualEngine, model: nn.Module) -> None:
    """Evaluate, and compare scores with plain torch, and bytes sent with those that the simulated network counts."""
    found = engine.evaluate()
    expected = plain_scores(engine, model)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert abs(found[name] - value) <= 1e-9 * max(1.0, abs(value)), (name, found[name], value)
    sent, simulated = (
        {key: n for key, n in table.items() if key[0] == EVALUATION and n > 0}
        for table in (engine.num_bytes, engine.network.num_bytes)
    )
    assert sent == simulated
