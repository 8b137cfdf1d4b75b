"""Evaluations of averaged SGD: the average is scored and exported, and training never continues from it."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call

from pipebench.engine.scores import WholeModel
from pipebench.model.optimizer import make_optimizer
from pipebench.recipe.schema import OptimizerRecipe
from tests.checkpoint.support import captured, restored
from tests.engine.test_recurrent import Recurrent
from tests.oracles import sequential
from tests.support import Blobs, Mlp, make_engine, make_setup, parameters_of

LR, T0 = 0.125, 2  # ASGD keeps its rate in single precision, which holds this one
ASGD = partial(make_optimizer, OptimizerRecipe("asgd", LR, arguments={"t0": T0, "lambd": 0.0}))


def held_out_loss(model: nn.Module, parameters: Mapping[str, torch.Tensor], data: Blobs) -> float:
    """Return the mean loss on all held-out samples."""
    fields = data.fetch("eval", range(data.num_eval), ["x", "label"])
    with torch.no_grad():
        output = functional_call(model, dict(parameters), (fields["x"],))
    return float(data.loss(output, fields)) / data.num_eval


@pytest.mark.parametrize("plan", [([], [1]), ([3, 5], [1, 1, 1])], ids=["single", "model"])
def test_evaluations_see_the_average_of_a_plain_loop_s_weights(plan: tuple[list[int], list[int]]) -> None:
    """The average of the weights after update t0 + 2 and later, as torch counts; before that, the newest weights."""
    data, model = Blobs(), Recurrent()
    setup = make_setup(Recurrent(), plan, weights="one", depth=1, dataset=data, make_optimizer=ASGD, lr=lambda *_: LR)
    engine, optimizer = make_engine(setup), torch.optim.SGD(model.parameters(), LR)
    seen: list[dict[str, torch.Tensor]] = []
    for k in range(8):
        fields = data.fetch("train", setup.sampler.indices(k), ["x", "label"])
        sequential.train(model, optimizer, [[((fields["x"],), fields)]], data.loss, lambda t: float(len(t["label"])))
        seen.append({name: p.detach().clone() for name, p in model.named_parameters()})
        engine.train(k, 1)
        counted = seen[T0 + 1 :] or seen[-1:]
        average = {name: torch.stack([each[name] for each in counted]).mean(0) for name in seen[0]}
        assert engine.evaluate()["eval_loss"] == pytest.approx(held_out_loss(model, average, data), rel=1e-6)
        newest = parameters_of(engine)
        assert all(torch.allclose(newest[n], p, rtol=1e-9, atol=1e-12) for n, p in seen[-1].items()), "it goes on"
    assert held_out_loss(model, average, data) != pytest.approx(held_out_loss(model, seen[-1], data), rel=1e-4)


@pytest.mark.parametrize("plan", [([2, 4], [1, 1, 1]), ([2, 4], [2, 1, 1])], ids=["straight", "replicated"])
def test_minibatches_in_flight_keep_their_versions(plan: tuple[list[int], list[int]]) -> None:
    """With stashing: an evaluation between two segments changes nothing, and a restored run scores the same."""
    make = partial(make_setup, Mlp(), plan, make_optimizer=ASGD)
    engine, other = make_engine(make()), make_engine(make())
    engine.train(0, 9)
    other.train(0, 9)
    scores = engine.evaluate()
    state = captured(engine)
    averages = {name: kept["ax"] for name, kept in state.optimizer.items()}
    assert {*averages} == {name for name, _ in Mlp().named_parameters()}
    assert scores["eval_loss"] == pytest.approx(held_out_loss(Mlp(), averages, Blobs()), rel=1e-12)
    assert scores["eval_loss"] != pytest.approx(held_out_loss(Mlp(), state.parameters, Blobs()), rel=1e-4)
    assert restored(make(), state).evaluate() == scores
    engine.train(9, 5)
    other.train(9, 5)
    mine, theirs = parameters_of(engine), parameters_of(other)
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
    assert engine.evaluate() == other.evaluate() != scores


class Whole(Blobs):
    """Stores the model that it is given to score."""

    def whole_model_metrics(self, model: nn.Module) -> dict[str, float]:
        self.model = model
        return {}


def test_metrics_of_the_whole_model_use_averages() -> None:
    engine = make_engine(make_setup(Mlp(), ([2, 4], [1, 1, 1]), make_optimizer=ASGD))
    engine.train(0, 9)
    data = Whole()
    WholeModel(replace(engine.setup, dataset=data)).metrics(worker.tensors() for worker in engine.workers)
    averages = {name: kept["ax"] for name, kept in captured(engine).optimizer.items()}
    assert all(torch.equal(value, averages[name]) for name, value in data.model.named_parameters())


def test_a_buffer_for_averages_lasts_until_the_next_update() -> None:
    engine = make_engine(make_setup(Mlp(), ([], [1]), weights="one", depth=1, make_optimizer=ASGD))
    engine.train(0, 6)
    (replica,) = engine.replicas
    engine.evaluate()
    first = replica.weights.evaluated
    assert first is replica.weights.evaluated is not replica.weights.newest
    engine.train(6, 1)
    assert replica.weights.evaluated is not first
    assert replica.weights.num_alive == 1
