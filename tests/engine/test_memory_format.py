"""Channels last (`engine.channels_last`): the same results, in that format on both sides of a cut, in equal bytes."""

import copy
from functools import partial
from typing import Any

import pytest
import torch

from pipebench.checkpoint.state import ModelState
from pipebench.engine.setup import Setup
from pipebench.model.memory_format import is_channels_last
from pipebench.model.optimizer import make_optimizer
from pipebench.recipe.schema import OptimizerRecipe
from tests.engine.test_modes import images
from tests.models import ConvNet
from tests.support import make_engine, make_setup, parameters_of

MODES: dict[str, Any] = {
    "pipedream": {"plan": ([4], [1, 1])},
    "dp": {"plan": ([], [2]), "weights": "one"},
    "gpipe, recomputed": {"plan": ([4], [1, 1]), "weights": "one", "microbatches": 2, "recompute": True},
    "bf16": {"plan": ([4], [1, 1]), "precision": "bf16"},
}
ADAM = OptimizerRecipe("adam", 0.01)
SGD = OptimizerRecipe("sgd", 0.1, momentum=0.9)


def setup(columns: dict[str, Any], optimizer: OptimizerRecipe = SGD, *, last: bool = True) -> Setup:
    # A bias before BatchNorm has a gradient of 0 but for rounding, of which Adam makes whole steps.
    model = ConvNet(norm=optimizer is not ADAM)
    return make_setup(
        model, dataset=images(), make_optimizer=partial(make_optimizer, optimizer), channels_last=last, **columns
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize("mode", MODES)
def test_channels_last_trains_the_same_weights(mode: str, optimizer: OptimizerRecipe) -> None:
    """Fused optimizers walk through memory: gradients that lie in another order would be other parameters'."""
    engines = [make_engine(setup(MODES[mode], optimizer, last=last)) for last in (False, True)]
    for engine in engines:
        engine.train(0, 8)
        engine.evaluate()
        engine.train(8, 4)
    plain, last = (parameters_of(engine) for engine in engines)
    rounding = dict.fromkeys(plain, 0.0)
    if mode == "bf16":  # grows with training, more on some processors: twice as far as from full precision
        full = make_engine(setup(MODES["pipedream"], optimizer, last=False))
        full.train(0, 8)
        full.train(8, 4)
        rounding = {
            name: 0.02 + 2 * float((plain[name] - value).abs().max()) for name, value in parameters_of(full).items()
        }
    for name, value in plain.items():
        torch.testing.assert_close(last[name], value, rtol=2e-4, atol=2e-4 + rounding[name])
    assert engines[0].num_bytes == engines[1].num_bytes


def test_weights_gradients_and_messages_are_channels_last() -> None:
    engine = make_engine(setup(MODES["pipedream"]))
    seen: list[torch.Tensor] = []
    for replica in engine.replicas:
        for part in replica.module.modules():
            part.register_forward_hook(lambda module, given, found: seen.append(found))
    engine.train(0, 3)
    images_seen = [t for t in seen if isinstance(t, torch.Tensor) and t.dim() == 4]
    assert len(images_seen) >= 3 * 6
    assert all(map(is_channels_last, images_seen))
    for replica in engine.replicas:
        (weight,) = (p for p in replica.weights.newest.parameters if p.dim() == 4)
        assert is_channels_last(weight)
        (state,) = (s for p, s in replica.weights.optimizer.state.items() if p is weight)  # type: ignore[union-attr]
        assert is_channels_last(state["momentum_buffer"])


@pytest.mark.parametrize(("before", "after"), [(False, True), (True, False)])
def test_a_checkpoint_goes_on_in_the_other_order(before: bool, after: bool) -> None:
    ends = []
    for second in (before, after):
        first, then = (make_engine(setup(MODES["pipedream"], last=last)) for last in (before, second))
        first.train(0, 5)
        state = ModelState.merge(copy.deepcopy(part) for worker in first.workers for _, part in worker.parts())
        for worker in then.workers:
            worker.restore(state)
        then.train(5, 5)
        ends.append(parameters_of(then))
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=2e-4, atol=2e-4)
