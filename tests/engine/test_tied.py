"""Weights that layers of several stages share: a copy per stage, whose gradients are summed before every update."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipebench.engine.setup import Setup
from pipebench.engine.virtual import VirtualEngine
from pipebench.model.optimizer import MakeOptimizer
from pipebench.model.sampling import Sampler
from tests.oracles import sequential
from tests.support import Blobs, make_engine, make_setup

SIZE = 4


class TiedEnds(nn.Module):
    """A language model's shape: both ends share a matrix, and two layers between share another."""

    def __init__(self, *, seed: int = 3) -> None:
        super().__init__()
        torch.default_generator.manual_seed(seed)
        self.words, self.one, self.norm = nn.Linear(6, 4, bias=False), nn.Linear(4, 4), nn.LayerNorm(4)
        self.two, self.three, self.classifier = nn.Linear(4, 4), nn.Linear(4, 6), nn.Linear(6, 4, bias=False)
        self.classifier.weight = self.words.weight
        self.two.weight = self.one.weight
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, 6] to [n, 4]."""
        hidden = self.norm(torch.tanh(self.one(torch.tanh(self.words(x)))))
        output: torch.Tensor = self.classifier(torch.tanh(self.three(torch.tanh(self.two(hidden)))))
        return output


# Layers: words, tanh, one, tanh, norm, two, tanh, three, tanh, classifier.
ENDS, BOTH, THREE = [5], [3, 5, 8], [2, 6]


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, 0.9, weight_decay=0.01)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.1, fused=True)


def plainly(
    data: Blobs, groups: Sequence[range], make: MakeOptimizer, clip_norm: float | None
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train the tied model in a plain loop on groups of minibatches, one update each."""
    model, sampler = TiedEnds(), Sampler(data.num_train, SIZE, 0)

    def minibatch(k: int) -> Any:
        fields = data.fetch("train", sampler.indices(k), ["x", "label"])
        return (fields["x"],), fields["label"]

    losses = sequential.train(
        model,
        make(list(model.parameters())),
        [[minibatch(k) for k in group] for group in groups],
        lambda output, target: functional.cross_entropy(output, target, reduction="sum"),
        lambda target: float(len(target)),
        clip_norm,
    )
    return {name: p.detach() for name, p in model.named_parameters()}, losses


def copies_of(engine: VirtualEngine) -> dict[str, list[torch.Tensor]]:
    """Return every replica's copy of each parameter, by the model's own name."""
    found: dict[str, list[torch.Tensor]] = {}
    for worker in engine.workers:
        for stage, replica in worker.replicas.items():
            for name, parameter in zip(replica.weights.names, replica.weights.newest.parameters, strict=True):
                found.setdefault(worker.shares[stage].names[name], []).append(parameter.detach())
    return found


def check(setup: Setup, group: int, *, clip_norm: float | None = None, bits: bool = False) -> VirtualEngine:
    """Train two epochs, and compare with the plain loop; all copies of a weight must be equal to the bit."""
    data, total = setup.dataset, 2 * setup.sampler.minibatches_per_epoch
    engine = make_engine(setup)
    for first in range(0, total, total // 2):
        engine.train(first, total // 2)
    starts = [*range(0, total // 2, group), *range(total // 2, total, group)]
    ends = [min(start + group, total // 2 if start < total // 2 else total) for start in starts]
    expected, _ = plainly(data, [*map(range, starts, ends)], setup.make_optimizer, clip_norm)
    found = copies_of(engine)
    assert found.keys() == expected.keys()
    for name, copies in found.items():
        assert all(torch.equal(copies[0], each) for each in copies), name
        if bits:
            assert torch.equal(copies[0], expected[name]), name
        else:
            torch.testing.assert_close(copies[0], expected[name], rtol=1e-12, atol=1e-12)
    return engine


@pytest.mark.parametrize("make", [momentum, adamw])
@pytest.mark.parametrize("starts", [ENDS, THREE, BOTH], ids=str)
def test_model_parallelism_is_bit_identical_to_a_plain_loop(starts: list[int], make: MakeOptimizer) -> None:
    """One minibatch per update: a copy's gradient is one term, and two terms have the same sum in any order."""
    setup = make_setup(
        TiedEnds(), (starts, [1] * (len(starts) + 1)), weights="one", depth=1, ties=True, make_optimizer=make
    )
    assert setup.pipeline.ties
    engine = check(setup, 1, bits=True)
    assert engine.num_bytes == engine.network.num_bytes


SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {"order": "all-forwards", "microbatches": 3, "recompute": True},
    "flush": {"microbatches": 2},
    "accumulated": {"accumulate": 2},
    "zero-bubble": {"order": "zero-bubble", "backward": "split", "microbatches": 4},
}


@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("replicas", [(1, 1), (2, 1), (1, 2), (2, 2), (3, 2)], ids=str)
@pytest.mark.parametrize("name", SCHEDULES)
def test_flushing_modes_equal_a_plain_loop(name: str, replicas: tuple[int, int], clip_norm: float | None) -> None:
    shape = SCHEDULES[name]
    setup = make_setup(
        TiedEnds(), (ENDS, list(replicas)), weights="one", ties=True, clip_norm=clip_norm, make_optimizer=adamw,
        dataset=Blobs(num_train=46), **shape,
    )  # fmt: skip
    assert setup.pipeline.ties == ((0, 1),)
    engine = check(setup, setup.pipeline.period, clip_norm=clip_norm)
    assert engine.num_bytes == engine.network.num_bytes


@pytest.mark.parametrize("replicas", [1, 2])
def test_interleaved_stages_equal_a_plain_loop(replicas: int) -> None:
    """Stages 0 and 2, which share the inner weight with stage 2 too, are of one worker; the ends are of two."""
    setup = make_setup(
        TiedEnds(), ([2, 3, 6], [replicas] * 4), weights="one", order="interleaved", chunks=2, microbatches=4,
        ties=True, clip_norm=0.1, make_optimizer=adamw,
    )  # fmt: skip
    assert setup.pipeline.ties == ((0, 3), (1, 2))
    check(setup, setup.pipeline.period, clip_norm=0.1)


def test_copies_of_one_worker_are_summed_without_a_message() -> None:
    setup = make_setup(
        TiedEnds(), ([2, 3, 5], [1] * 4), weights="one", order="interleaved", chunks=2, microbatches=4, ties=True
    )
    assert setup.pipeline.ties == ((0, 3), (1, 3))
    alone = setup.pipeline.num_stages + 1
    assert len(setup.pipeline.members(alone)) == 1
    check(setup, setup.pipeline.period)
