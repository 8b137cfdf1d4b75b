"""Predicted and corrected weights against the papers' formulas, at every update of every stage."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pipebench.engine.prediction import Displacement
from pipebench.engine.virtual import VirtualEngine
from pipebench.model.optimizer import MakeOptimizer
from pipebench.schedule.modes import MODES
from pipebench.schedule.operations import Op
from pipebench.simulate.simulation import TimelineEvent
from tests.oracles import moved_weights, staleness
from tests.oracles.moved_weights import Rules
from tests.support import Blobs, Mlp, make_engine, make_setup

Plan = tuple[list[int], list[int]]
STRAIGHT: list[Plan] = [([2], [1, 1]), ([2, 4], [1, 1, 1]), ([2, 4, 6], [1, 1, 1, 1])]
REPLICATED: list[Plan] = [([4], [2, 1]), ([4], [3, 1]), ([2, 4], [1, 2, 1]), ([2], [1, 3])]
EQUAL: list[Plan] = [([4], [2, 2]), ([2, 4], [2, 2, 2])]
# torch's default betas and eps are those of the oracle.
OPTIMIZERS: dict[str, tuple[MakeOptimizer, Callable[..., Any], Callable[..., torch.Tensor]]] = {
    "momentum": (
        lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.01, fused=True),
        staleness.sgd(0.9, 0.01),
        moved_weights.momentum_direction,
    ),
    "adam": (
        lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.01, fused=True),
        staleness.adam(weight_decay=0.01),
        moved_weights.adam_direction,
    ),
}
COUNT = 23  # minibatches of 4 samples, the last of 2
DECAY = 0.3


def rate(stage: int, before: int, own: int) -> float:
    """Return a learning rate that no two updates of a stage share."""
    return (0.02 + 0.01 * stage) / (1 + before / 64)


def worst_difference(plan: Plan, optimizer: str, rules: Rules) -> tuple[float, VirtualEngine]:
    """Return the largest difference between engine and oracle over all updates of all workers."""
    model, dataset, (_, replicas) = Mlp(), Blobs(num_train=90), plan
    make_optimizer, step, direction = OPTIMIZERS[optimizer]
    setup = make_setup(
        model, plan, weights="predict" if rules.decay is None else "correct", dataset=dataset, lr=rate,
        make_optimizer=make_optimizer, microbatches=rules.microbatches, recompute=rules.recompute,
        correction_decay=rules.decay or 0.5,
    )  # fmt: skip
    versions: dict[int, list[dict[str, torch.Tensor]]] = {w: [] for w in range(sum(replicas))}

    def observe(event: TimelineEvent) -> None:
        if event.instruction.op is Op.UPDATE:
            store = engine.replicas[event.worker].weights
            now = {n: p.detach().clone() for n, p in zip(store.names, store.newest.parameters, strict=True)}
            versions[event.worker].append(now)

    def batch(k: int) -> tuple[torch.Tensor, torch.Tensor]:
        fields = dataset.fetch("train", setup.sampler.indices(k), ["x", "label"])
        return fields["x"], fields["label"]

    engine = make_engine(setup, observe)
    engine.train(0, COUNT)
    modules = [range(stage.start, stage.stop) for stage in setup.plan.stages]  # a layer of the graph is one of the body
    expected = moved_weights.train(
        Mlp().body, modules, replicas, batch, COUNT, step, direction, lambda s, k: rate(s, 4 * k, 0), rules
    )
    worst = 0.0
    for worker, seen in versions.items():
        wanted = expected[engine.replicas[worker].stage.index][1:]
        assert len(seen) == len(wanted) > 5
        for mine, theirs in zip(seen, wanted, strict=True):
            worst = max(worst, *((mine[name] - theirs[name.removeprefix("body.")]).abs().max().item() for name in mine))
    return worst, engine


@pytest.mark.sampled(2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("plan", STRAIGHT + REPLICATED + EQUAL, ids=lambda plan: "-".join(map(str, plan[1])))
def test_predicted_weights_are_the_formula_s(plan: Plan, optimizer: str) -> None:
    worst, _ = worst_difference(plan, optimizer, Rules())
    assert worst < 1e-12


@pytest.mark.sampled(4)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("plan", STRAIGHT + REPLICATED + EQUAL, ids=lambda plan: "-".join(map(str, plan[1])))
def test_corrected_weights_are_the_formula_s(plan: Plan, optimizer: str) -> None:
    worst, _ = worst_difference(plan, optimizer, Rules(decay=DECAY))
    assert worst < 1e-12


@pytest.mark.sampled(3)
@pytest.mark.parametrize("microbatches", [2, 3, 4])
@pytest.mark.parametrize("plan", STRAIGHT + EQUAL, ids=lambda plan: "-".join(map(str, plan[1])))
def test_microbatches_use_their_bellwether_s_prediction(plan: Plan, microbatches: int) -> None:
    worst, _ = worst_difference(plan, "adam", Rules(microbatches=microbatches))
    assert worst < 1e-12


@pytest.mark.parametrize("plan", STRAIGHT, ids=lambda plan: "-".join(map(str, plan[1])))
def test_whole_minibatches_share_a_prediction_as_microbatches_do(plan: Plan) -> None:
    """Two minibatches of two samples to an update, or one of four in two parts: the same units, the same weights."""
    columns: dict[str, Any] = {"weights": "predict", "make_optimizer": OPTIMIZERS["adam"][0]}
    whole = make_engine(make_setup(Mlp(), plan, minibatch_size=2, accumulate=2, **columns))
    cut = make_engine(make_setup(Mlp(), plan, minibatch_size=4, microbatches=2, **columns))
    whole.train(0, 20)
    cut.train(0, 10)
    for mine, theirs in zip(whole.replicas, cut.replicas, strict=True):
        for a, b in zip(mine.weights.newest.parameters, theirs.weights.newest.parameters, strict=True):
            assert (a - b).abs().max() < 1e-12


@pytest.mark.parametrize("decay", [None, DECAY])
def test_a_recomputation_uses_the_weights_of_the_backward(decay: float | None) -> None:
    worst, _ = worst_difference(STRAIGHT[2], "adam", Rules(decay, recompute=True))
    assert worst < 1e-12
    kept, _ = worst_difference(STRAIGHT[2], "adam", Rules(decay))
    assert kept < 1e-12


@pytest.mark.parametrize(("mode", "microbatches", "copies"), [("spectrain", 1, 1), ("xpipe", 4, 2), ("pipemare", 1, 2)])
def test_a_replica_keeps_one_version_and_as_many_copies_as_the_planner_says(
    mode: str, microbatches: int, copies: int
) -> None:
    row = MODES[mode]
    setup = make_setup(
        Mlp(), STRAIGHT[1], weights=row.weights, microbatches=microbatches, make_optimizer=OPTIMIZERS["adam"][0]
    )
    most = [0.0] * 3

    def observe(event: TimelineEvent) -> None:
        replica = engine.replicas[event.worker]
        own = 0 if replica.moved is None else replica.moved.num_bytes
        most[event.worker] = max(most[event.worker], own / replica.weights.version_bytes)
        assert replica.live_bytes() >= replica.weights.version_bytes + own

    engine = make_engine(setup, observe)
    engine.train(0, 12)
    last_moves = (
        mode != "pipemare"
    )  # PipeMare's last stage has no delay; predictions aim beyond the last stage's updates
    assert most == [copies, copies, most[2]]
    assert (most[2] > 0) == last_moves
    assert row.weight_sets == 1 + copies
    assert all(replica.weights.most_alive == 1 for replica in engine.replicas)


def test_without_an_earlier_step_nothing_is_predicted() -> None:
    """Before the first update, and for a parameter that no gradient has reached, nothing is predicted."""
    setup = make_setup(Mlp(), STRAIGHT[0], weights="predict", make_optimizer=OPTIMIZERS["momentum"][0])
    replica = make_engine(setup).replicas[0]
    assert replica.moved is not None
    moved = replica.moved.for_forward(0, Displacement(3, 0.1))
    for mine, newest in zip(moved.parameters, replica.weights.newest.parameters, strict=True):
        assert torch.equal(mine, newest)
        assert mine.untyped_storage().data_ptr() != newest.untyped_storage().data_ptr()


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_at_depth_1_nothing_is_late_and_nothing_is_predicted(optimizer: str, microbatches: int) -> None:
    """Of microbatches, too, the next one runs forward when the one before is back: that is sequential training."""
    columns: dict[str, Any] = {"depth": 1, "microbatches": microbatches, "make_optimizer": OPTIMIZERS[optimizer][0]}
    predicting, one_version = (
        make_engine(make_setup(Mlp(), STRAIGHT[2], weights=weights, **columns)) for weights in ("predict", "one")
    )
    for engine in (predicting, one_version):
        engine.train(0, 8)
    for mine, theirs in zip(predicting.replicas, one_version.replicas, strict=True):
        assert mine.moved is None
        for a, b in zip(mine.weights.newest.parameters, theirs.weights.newest.parameters, strict=True):
            assert (a - b).abs().max() < 1e-12


def test_a_drain_restarts_versions_and_keeps_the_predictor() -> None:
    """Two segments: the second's first forward predicts nothing, the next one uses the first segment's last step."""
    setup = make_setup(Mlp(), STRAIGHT[0], weights="predict", make_optimizer=OPTIMIZERS["momentum"][0])
    moves: list[tuple[int, bool]] = []

    def observe(event: TimelineEvent) -> None:
        it = event.instruction
        if it.op is Op.FORWARD and it.stage == 0:
            replica = engine.replicas[0]
            assert replica.moved is not None
            pairs = zip(replica.moved._working.parameters, replica.weights.newest.parameters, strict=True)
            moves.append((it.ahead, any(not torch.equal(mine, newest) for mine, newest in pairs)))

    engine = make_engine(setup, observe)
    engine.train(0, 3)
    engine.train(3, 3)
    assert moves == [(0, False), (1, False), (1, True), (0, False), (1, True), (1, True)]
