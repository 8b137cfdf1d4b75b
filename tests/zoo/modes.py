"""A model of the zoo in every mode, against plain loops: sequential training, and the papers' formula of staleness."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from pipebench.model.graph import trace
from pipebench.model.sampling import Sampler, mix, name_hash
from pipebench.zoo.registry import Dataset
from tests.evaluations import MODES, mode_setup, trained
from tests.oracles import sequential, staleness
from tests.support import parameters_of

# Without a flush, and the columns that the formula of staleness gets.
STALE: dict[str, dict[str, Any]] = {
    "pipedream": {},
    "pipedream-vertical-sync": {"vertical_sync": True},
    "pipedream-replicated": {},
}
SEQUENTIAL = [mode for mode in MODES if mode not in STALE]
LR, MINIBATCH = 0.1, 4


class _OneInput(nn.Module):
    """The model with its inputs in one tuple, as the oracle passes them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> Any:
        return self.model(*inputs)


def check_mode(model: nn.Module, dataset: Dataset, mode: str, num_stages: int = 3, num_minibatches: int = 4) -> None:
    """Train in double precision, cut into stages of equally many layers, and compare all parameters with a plain loop.

    The model is without randomness, dropout probabilities are 0, and isn't changed; the data set has samples for so
    many minibatches of four.
    """
    model = copy.deepcopy(model).double().train()
    num_layers = len(trace(model).layers)
    starts = [stage * num_layers // num_stages for stage in range(1, num_stages)]
    sampler = Sampler(dataset.num_train, MINIBATCH, 0)
    setup = mode_setup(model, mode, starts, dataset=dataset, sampler=sampler, sizes=(1, 2, 3, 4))
    engine = trained(setup, num_minibatches)
    if mode in STALE:
        expected = _stale(model, dataset, sampler, engine, num_minibatches, mode)
    else:
        expected = _sequential(model, dataset, sampler, setup.pipeline.round_size(0), num_minibatches)
    found = parameters_of(engine)
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-8, atol=1e-10)
    started = dict(model.named_parameters())
    assert any((expected[name] - started[name]).abs().max() > 1e-4 for name in expected)


def _fields(dataset: Dataset, sampler: Sampler, k: int, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return minibatch k; random numbers for its samples are drawn from the run's seed, 0, and k."""
    fields = dataset.fetch("train", sampler.indices(k), names, mix(0, name_hash("augmentation"), k))
    return {name: value.double() if value.is_floating_point() else value for name, value in fields.items()}


def _sequential(
    model: nn.Module, dataset: Dataset, sampler: Sampler, group: int, num_minibatches: int
) -> dict[str, torch.Tensor]:
    def minibatch(k: int) -> tuple[tuple[torch.Tensor, ...], Any]:
        targets = _fields(dataset, sampler, k, dataset.targets)
        weight = dataset.weight("train", sampler.indices(k))
        return tuple(_fields(dataset, sampler, k, dataset.inputs).values()), (targets, weight)

    model = copy.deepcopy(model)
    sequential.train(
        model,
        torch.optim.SGD(model.parameters(), LR),
        [[minibatch(k) for k in range(a, a + group)] for a in range(0, num_minibatches, group)],
        lambda output, target: dataset.loss(output, target[0]),
        lambda target: target[1],
    )
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _stale(
    model: nn.Module, dataset: Dataset, sampler: Sampler, engine: Any, num_minibatches: int, mode: str
) -> dict[str, torch.Tensor]:
    stage_of = {f"model.{name}": r.stage.index for r in engine.replicas for name in r.weights.names}
    versions = staleness.train(
        _OneInput(model),
        stage_of.__getitem__,
        engine.setup.plan.replicas,
        lambda output, k: dataset.loss(output, _fields(dataset, sampler, k, dataset.targets)),
        lambda k: tuple(_fields(dataset, sampler, k, dataset.inputs).values()),  # type: ignore[arg-type, return-value]
        lambda k: dataset.weight("train", sampler.indices(k)),
        num_minibatches,
        staleness.sgd(),
        LR,
        **STALE[mode],
    )
    return {name.removeprefix("model."): p for stage in versions for name, p in stage[-1].items()}
