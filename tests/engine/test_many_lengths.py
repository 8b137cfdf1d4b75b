"""Minibatches that a user's collate function pads to their longest sample."""

import math
from contextlib import closing
from typing import Any

import pytest
import torch
from torch.nn import functional

from pipebench.engine.virtual import VirtualEngine
from pipebench.model.graph import trace
from pipebench.model.sampling import Sampler
from pipebench.simulate.network import Network
from pipebench.zoo.measures import COUNTS, Measure
from pipebench.zoo.plain import DatasetPair
from tests.evaluations import mode_setup, trained
from tests.lengths import LabelledTokens, Reader, Tagger, labelled_tokens, masked_mean, texts, token_mean
from tests.oracles import sequential
from tests.oracles.draws import augmentation
from tests.support import make_engine, make_setup, parameters_of

UPDATES = 5
CUTS = range(1, len(trace(Reader()).layers), 3)


@pytest.mark.parametrize(
    ("mode", "starts"), [("dp", []), *((mode, [start]) for mode in ("model", "gpipe") for start in CUTS)]
)
def test_they_train_as_samples_without_padding_do(mode: str, starts: list[int]) -> None:
    data, sampler, model = texts(), Sampler(46, 4, 0), Reader()
    per_update = 2 if mode == "dp" else 1

    def sample(index: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        fields = data.fetch("train", [index], ["input", "target"])
        assert (fields["input"] > 0).all()
        return (fields["input"],), fields["target"]

    sequential.train(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        [
            [sample(index) for k in range(per_update) for index in sampler.indices(update * per_update + k)]
            for update in range(UPDATES)
        ],
        lambda output, target: functional.cross_entropy(output, target, reduction="sum"),
        lambda target: float(len(target)),
    )
    engine = trained(mode_setup(Reader(), mode, starts, dataset=data, sizes=(1, 2, 4)), UPDATES * per_update)
    for name, parameter in parameters_of(engine).items():
        torch.testing.assert_close(parameter, dict(model.named_parameters())[name].detach(), rtol=1e-9, atol=1e-11)


FLUSHED: dict[str, Any] = {"weights": "one", "microbatches": 3}


def sample_of(data: DatasetPair, split: str, index: int, draw: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    fields = data.fetch(split, [index], ["input", "target"], draw)
    return (fields["input"],), fields["target"]


def num_labels(labels: torch.Tensor) -> float:
    return float((labels != -100).sum())


def summed_loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.transpose(1, 2), labels, reduction="sum")


@pytest.mark.parametrize(
    ("starts", "replicas", "columns", "loss"),
    [
        ([], [1], {"weights": "one", "depth": 1}, masked_mean),
        ([], [1], FLUSHED, token_mean),
        ([], [2], {"weights": "one", "depth": 1}, token_mean),
        ([], [3], FLUSHED, masked_mean),
        ([9], [1, 1], {**FLUSHED, "order": "all-forwards", "recompute": True}, masked_mean),
        ([9], [2, 1], FLUSHED, token_mean),
        ([4, 9], [1, 1, 2], {**FLUSHED, "accumulate": 2}, masked_mean),
    ],
)
def test_a_mean_over_labels_has_the_gradient_of_all_labels_of_an_update(
    starts: list[int], replicas: list[int], columns: dict[str, Any], loss: Measure
) -> None:
    """Microbatches and replicas have different numbers of labels, some none; which tokens have one is drawn."""
    data, sampler, model = labelled_tokens(), Sampler(46, 4, 0), Tagger()
    per_update = math.lcm(*replicas) * columns.get("accumulate", 1)
    counts: list[float] = []
    losses: list[tuple[float, float]] = []  # of units, with their weights

    def sample(k: int, index: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        inputs, labels = sample_of(data, "train", index, augmentation(0, k))
        counts.append(num_labels(labels))
        return inputs, labels

    sequential.train(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        [
            [sample(k, index) for k in range(first, first + per_update) for index in sampler.indices(k)]
            for first in range(0, UPDATES * per_update, per_update)
        ],
        summed_loss,
        num_labels,
    )
    assert {0.0, 1.0, 2.0, 3.0} <= {*counts}
    setup = make_setup(Tagger(), (starts, replicas), dataset=labelled_tokens(loss), sizes=(1, 2, 4), **columns)
    network = Network(setup.cluster, setup.devices, copies=setup.copies)
    engine = VirtualEngine(setup, network, on_loss=lambda loss, n, weight, s: losses.append((float(loss), weight)))
    engine.train(0, UPDATES * per_update)
    assert sum(weight for _, weight in losses) == sum(counts)
    assert all(math.isfinite(loss) for loss, _ in losses)
    for name, parameter in parameters_of(engine).items():
        torch.testing.assert_close(parameter, dict(model.named_parameters())[name].detach(), rtol=1e-9, atol=1e-11)
    with torch.no_grad():
        each = [sample_of(data, "eval", index, augmentation(0, index // 4)) for index in range(data.num_eval)]
        total = sum(float(summed_loss(model.eval()(*inputs), labels)) for inputs, labels in each)
    expected = total / sum(num_labels(labels) for _, labels in each)
    assert engine.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-9)


def test_with_loader_processes_the_process_that_trains_reads_no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are forked later would share the files that it opens, and samples would be mixed up."""
    read: list[int] = []
    fetched = LabelledTokens.__getitem__

    def reading(data: LabelledTokens, index: int) -> Any:
        read.append(index)
        return fetched(data, index)

    monkeypatch.setattr(LabelledTokens, "__getitem__", reading)
    found = []
    for loader_processes in (0, 2):
        data = labelled_tokens(loader_processes=loader_processes)
        setup = make_setup(Tagger(), ([9], [2, 1]), dataset=data, sizes=(1, 2, 4), **FLUSHED)
        read.clear()
        engine = make_engine(setup)
        with closing(engine.loaders):
            for first in (0, 8):
                engine.train(first, 8)
                engine.evaluate()
            found.append(parameters_of(engine))
        assert bool(read) == (loader_processes == 0)
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_held_out_samples_without_labels_have_no_loss() -> None:
    """A loss of 0 would be the best of all."""
    train, held_out = LabelledTokens(8, 1), torch.utils.data.Subset(LabelledTokens(16, 2), [0, 5, 10, 15])
    held_out.collate_fn = train.collate_fn  # type: ignore[attr-defined]
    data = DatasetPair(train, held_out, token_mean, {}, count=COUNTS["labels"])
    engine = make_engine(make_setup(Tagger(), ([], [1]), dataset=data, sizes=(4,), weights="one", depth=1))
    assert math.isnan(engine.evaluate()["eval_loss"])
