"""Layers that move while training goes on: every update of every layer against the oracle, to the bit."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipebench.engine.virtual import VirtualEngine
from pipebench.model.optimizer import MakeOptimizer
from pipebench.schedule.instructions import Op
from pipebench.schedule.moves import Move
from pipebench.simulate.simulation import Event
from tests.oracles import migration
from tests.support import Blobs, Mlp, make_engine, make_setup

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "momentum": lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.01),
}
NUM_MINIBATCHES = 22


def run(
    starts: Sequence[int],
    moves: Sequence[Move],
    *,
    model: nn.Module | None = None,
    optimizer: str = "momentum",
    count: int = NUM_MINIBATCHES,
    told_at: int | None = None,
    **more: Any,
) -> tuple[VirtualEngine, dict[tuple[str, int], torch.Tensor]]:
    """Train while layers move; return the engine, and every parameter after every update by (name, minibatch)."""
    made = model or Mlp()
    setup = make_setup(
        made, (starts, [1] * (len(starts) + 1)), dataset=Blobs(num_train=4 * count),
        make_optimizer=OPTIMIZERS[optimizer], **more,
    )  # fmt: skip
    seen: dict[tuple[str, int], torch.Tensor] = {}

    def observe(event: Event) -> None:
        op, stage, number, *_ = event.instruction
        if op is Op.UPDATE:
            for name, tensor in newest(engine, stage).items():
                assert (name, number) not in seen, f"update {number} of {name} was made twice"
                seen[name, number] = tensor.detach().clone()
        if told_at is not None and op is Op.FORWARD and stage == 0 and number == told_at:
            for move in moves:
                engine.announce(move)

    engine = make_engine(replace(setup, repartitions=True), observe)
    if told_at is None:
        for move in moves:
            engine.announce(move)
    assert engine.train(0, count) == count
    return engine, seen


def newest(engine: VirtualEngine, stage: int) -> dict[str, torch.Tensor]:
    running = engine.workers[stage]._running[stage]
    replicas = [running] if not hasattr(running, "_parts") else [part.replica for part in running._parts]
    return {n: p for r in replicas for n, p in zip(r.weights.names, r.weights.newest.parameters, strict=True)}


def expected(
    starts: Sequence[int],
    moves: Sequence[Move],
    *,
    model: nn.Module | None = None,
    optimizer: str = "momentum",
    count: int = NUM_MINIBATCHES,
    **more: Any,
) -> list[dict[str, torch.Tensor]]:
    made = model or Mlp()
    dataset = Blobs(num_train=4 * count)
    setup = make_setup(made, ([], [1]), dataset=dataset)
    layer_of = {name: i for i, layer in enumerate(setup.graph.layers) for name in layer.parameters}

    def cuts_of(k: int) -> Sequence[int]:
        return next((move.starts for move in reversed(moves) if move.at <= k), starts)

    def loss_of(run: Callable[[torch.Tensor], torch.Tensor], k: int) -> torch.Tensor:
        indices = setup.sampler.indices(k)
        fields = dataset.fetch("train", indices, ["x", "label"])
        return functional.cross_entropy(run(fields["x"]), fields["label"], reduction="sum") / len(indices)

    return migration.train(made, layer_of, cuts_of, loss_of, OPTIMIZERS[optimizer], count)


def check(starts: Sequence[int], moves: Sequence[Move], **more: Any) -> VirtualEngine:
    engine, seen = run(starts, moves, **more)
    more.pop("told_at", None)
    wanted = expected(starts, moves, **more)
    names = {name for name, _ in seen}
    for k, at in enumerate(wanted):
        for name in names:
            assert torch.equal(seen[name, k], at[name]), f"{name} after minibatch {k}"
    assert len(seen) == len(names) * len(wanted)
    last = moves[-1].starts if moves else starts
    assert [stage.start for stage in engine.setup.plan.stages[1:]] == [*last]
    for worker, stage in zip(engine.workers, engine.setup.plan.stages, strict=True):
        names_here = {n for layer in engine.setup.graph.layers[stage.start : stage.stop] for n in layer.parameters}
        assert {*worker.replicas[worker.index].weights.names} == names_here
    return engine


ONE_BOUNDARY = [
    ((3,), (4,)), ((4,), (2,)), ((3, 5), (4, 5)), ((3, 5), (2, 5)), ((2, 4), (2, 6)), ((2, 5), (2, 3)),
    ((1, 3, 5), (2, 3, 5)), ((1, 3, 5), (1, 4, 5)), ((1, 3, 5), (1, 2, 5)), ((1, 3, 5), (1, 3, 4)),
]  # fmt: skip


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("before", "after"), ONE_BOUNDARY)
def test_a_boundary_moves(before: tuple[int, ...], after: tuple[int, ...], optimizer: str) -> None:
    check(before, [Move(9, after)], optimizer=optimizer)


SEVERAL = [
    ((2, 4), (3, 5)), ((2, 4), (1, 3)), ((2, 5), (3, 4)), ((3, 4), (2, 6)), ((1, 3, 5), (2, 4, 6)),
    ((2, 4, 6), (1, 3, 5)), ((1, 3, 5), (2, 4, 4 + 2)), ((2, 3, 5), (1, 4, 6)), ((2, 4, 6), (3, 5, 5 + 1)),
]  # fmt: skip


@pytest.mark.parametrize("at", [8, 9, 13])
@pytest.mark.parametrize(("before", "after"), SEVERAL)
def test_several_boundaries_move_at_once(before: tuple[int, ...], after: tuple[int, ...], at: int) -> None:
    check(before, [Move(at, after)])


def test_moves_follow_each_other() -> None:
    """There and back again, as close as they may."""
    check((2, 4), [Move(6, (3, 5)), Move(12, (2, 4)), Move(18, (1, 3))])
    check((1, 3, 5), [Move(8, (2, 4, 6)), Move(16, (1, 3, 5))], optimizer="adam")


@pytest.mark.parametrize("told_at", [0, 3, 8])
def test_a_move_is_announced_while_training_goes_on(told_at: int) -> None:
    check((2, 4), [Move(told_at + 7, (3, 5))], told_at=told_at)


@pytest.mark.parametrize("at", range(10, 20))
@pytest.mark.parametrize("after", [(3, 5), (1, 3), (1, 5), (3, 4 + 1)])
def test_a_segment_may_end_before_in_or_after_a_move(after: tuple[int, ...], at: int) -> None:
    """Of 13 minibatches, so that the pipeline drains while layers move, or before they would."""
    before, count = (2, 4), 13
    engine, seen = run(before, [Move(at, after)], count=count)
    wanted = expected(before, [Move(at, after)], count=count)
    assert all(torch.equal(tensor, wanted[k][name]) for (name, k), tensor in seen.items())
    assert len(seen) == 8 * count
    assert [stage.start for stage in engine.setup.plan.stages[1:]] == [*after]
