"""Groups of layers whose replicas shard gradients or parameters, and which share weights: each group has a copy."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from pipebench.checkpoint.state import ModelState
from pipebench.engine.virtual import VirtualEngine
from pipebench.model.large_batch import LAMB
from pipebench.model.optimizer import MakeOptimizer
from pipebench.planner.predict import payload
from pipebench.recipe.schema import LossScaleRecipe
from pipebench.schedule.instructions import BACKWARDS
from pipebench.schedule.modes import MODES
from pipebench.schedule.operations import Op
from pipebench.simulate.kinds import WHATEVER_SIZE
from pipebench.simulate.simulation import TimelineEvent
from tests.engine.test_tied import SIZE, plainly
from tests.models import WideTied
from tests.oracles import sharding
from tests.simulate.test_memory import Levels, live
from tests.support import Blobs, make_engine, make_setup

SHARDS = ("gradients", "parameters")
WORDS, INNER = 6 * 300, 40 * 40  # elements of the tied weights, more than a shard


# Layers: words, tanh, down, tanh, one, tanh, two, tanh, three, tanh, up, classifier
CUTS = {"each end": [2, 11], "inner": [5, 7], "all": [2, 5, 7, 10]}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.01, weight_decay=0.1, fused=True)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.01, momentum=0.9, fused=True)


def engine_of(shard: str, replicas: int, cuts: str = "all", *observers: Any, **given: Any) -> VirtualEngine:
    dtype = given.pop("dtype", torch.float64)
    starts = [] if shard == "none" else CUTS[cuts]
    columns: dict[str, Any] = {
        "weights": "one", "depth": 1, "sums": "ordered", "dataset": Blobs(56, dtype=dtype), "lr": lambda *_: 0.01,
        "make_optimizer": adamw,
    }  # fmt: skip
    if starts:
        columns |= {"shard": shard, "order": "sequential", "chunks": len(starts) + 1, "ties": True}
    plan = starts, [replicas] * (len(starts) + 1)
    return make_engine(make_setup(WideTied(dtype), plan, **columns | given), *observers)


def state_of(engine: VirtualEngine) -> ModelState:
    return ModelState.joined(ModelState.from_plain(state.to_plain()) for _, state in engine.parts())


def check_copies(engine: VirtualEngine) -> int:
    """Check that a replica's shards of all copies are equal to the bit, and averages too; return how many."""
    compared = 0
    for worker in engine.workers:
        held: dict[str, tuple[torch.Tensor, Any]] = {}
        for stage, replica in worker.replicas.items():
            state = replica.weights.optimizer_state()
            for name, piece in replica.weights.trained().items():
                own = worker.shares[stage].names[name]
                value, averages = held.setdefault(own, (piece, state[name]))
                assert torch.equal(value, piece), name
                assert all(torch.equal(averages[key], each) for key, each in state[name].items()), name
                compared += value is not piece
    return compared


@pytest.mark.sampled(12)
@pytest.mark.parametrize("make", [adamw, momentum])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("shard", SHARDS)
def test_copies_stay_equal_and_are_those_of_a_plain_loop(
    shard: str, replicas: int, cuts: str, clip_norm: float | None, accumulate: int, make: MakeOptimizer
) -> None:
    """The last round is short: some replicas have no unit of it, and join with zeros."""
    engine = engine_of(
        shard, replicas, cuts, clip_norm=clip_norm, accumulate=accumulate, make_optimizer=make, minibatch_size=SIZE
    )
    assert engine.setup.pipeline.ties
    engine.train(0, 13)
    size = replicas * accumulate
    rounds = [range(first, min(first + size, 13)) for first in range(0, 13, size)]
    expected, _ = plainly(engine.setup.dataset, rounds, make, clip_norm, WideTied)
    found = state_of(engine).parameters
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-13)
    assert check_copies(engine) >= replicas
    assert engine.num_bytes == engine.network.num_bytes


OTHERS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16", "make_optimizer": momentum},
    "fp16": {
        "precision": "fp16", "loss_scale": LossScaleRecipe(initial=2.0**20), "clip_norm": 0.05,
        "make_optimizer": momentum,
    },
    "whole": {"make_optimizer": lambda p: LAMB(p, lr=0.01), "steps_on_whole": True},
    "ring": {"sums": "ring"},
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("shard", SHARDS)
def test_copies_stay_equal_in_16_bits_and_whole(shard: str, name: str) -> None:
    """Near the unsharded run, whose one weight adds its two gradients before the sum over replicas."""
    engine, plain = (engine_of(each, 3, dtype=torch.float32, **OTHERS[name]) for each in (shard, "none"))
    for each in (engine, plain):
        each.train(0, 13)
        assert all(0 < skipped < 5 for worker in each.workers for _, skipped in worker.loss_scales)
    assert check_copies(engine) >= 3
    found, expected = (state_of(each).parameters for each in (engine, plain))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0.02, atol=2e-3)


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("shard", SHARDS)
def test_every_copy_is_gathered_and_scattered(shard: str, replicas: int) -> None:
    engine = engine_of(shard, replicas, dataset=Blobs(4 * 3 * replicas))
    engine.train(0, 3 * replicas)
    copies = 8 * (WORDS + 2 * INNER)
    weights = sum(p.nbytes for p in WideTied().parameters()) + copies
    assert sum(engine.num_bytes.values()) == 3 * sharding.sent_bytes(shard, weights, replicas)
    assert {kind for kind, _ in engine.num_bytes} == {"reduce-scatter", "all-gather"}
    mode = {"gradients": MODES["zero2"], "parameters": MODES["fsdp"]}[shard]
    predicted = payload(engine.setup.profile.rows, engine.setup.plan, mode, 1, 1)
    assert {kind: num_bytes * 3 * replicas for kind, num_bytes in predicted.items() if num_bytes} == {
        kind: num_bytes for (kind, _), num_bytes in engine.num_bytes.items()
    }


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("shard", SHARDS)
def test_predicted_memory_equals_that_of_live_tensors(shard: str, accumulate: int) -> None:
    """To the byte, but for gradients: borders of shards are at rows of 512 elements."""
    compared = 0

    def observe(event: TimelineEvent) -> None:
        nonlocal compared
        it, worker = event.instruction, event.worker
        size = engine.workers[worker].feed.size(it.number) if it.op in (Op.FORWARD, *BACKWARDS) else 0
        levels.execute(worker, it, size)
        held, found = levels.held(worker, it.stage), live(engine.workers[worker].replicas[it.stage])
        for kind in WHATEVER_SIZE:
            assert held[kind] == pytest.approx(found[kind], abs=8 * 512 * 2), (it, kind)
        compared += 1

    engine = engine_of(shard, 2, "all", observe, make_optimizer=momentum, accumulate=accumulate)
    levels = Levels(engine.setup)
    levels.drain()
    engine.train(0, 12)
    assert compared > 90


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("before", "after"), [("parameters", "none"), ("none", "gradients"), ("gradients", "parameters")]
)
def test_a_checkpoint_has_a_tied_weight_once_and_any_mode_resumes_it(before: str, after: str) -> None:
    first, second = engine_of(before, 3), engine_of(after, 2, "inner")
    first.train(0, 6)
    state = state_of(first)
    assert sorted(state.parameters) == sorted(dict(WideTied().named_parameters())) == sorted(state.optimizer)
    second.restore(state, None, 0.0)
    reference = engine_of("none", 2)
    reference.restore(state, None, 0.0)
    for each in (second, reference):
        each.train(6, 8)
    found, expected = state_of(second), state_of(reference)
    for name, value in expected.parameters.items():
        torch.testing.assert_close(found.parameters[name], value, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("shard", SHARDS)
def test_evaluations_are_those_of_the_tied_model(shard: str) -> None:
    engine = engine_of(shard, 2)
    engine.train(0, 6)
    model = WideTied()
    model.load_state_dict(state_of(engine).parameters, strict=False)  # which lacks the other names of tied ones
    data = engine.setup.dataset
    fields = data.fetch("eval", range(data.num_eval), ["x", "label"])
    loss = functional.cross_entropy(model(fields["x"]), fields["label"]).detach()
    assert engine.evaluate()["eval_loss"] == pytest.approx(float(loss), rel=1e-12)
