"""Layers that move while training goes on: every update of every layer against the oracle, to the bit."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipebench.engine.virtual import VirtualEngine
from pipebench.errors import PlanError
from pipebench.extensions.moves.engine import moves_of, moving
from pipebench.extensions.moves.migration import MigratingReplica
from pipebench.extensions.moves.repartition_plan import Repartition, layout_of
from pipebench.extensions.moves.worker import moving_worker
from pipebench.model.optimizer import MakeOptimizer
from pipebench.model.plan import recut
from pipebench.schedule.modes import KEEP, RECOMPUTE, SWAP
from pipebench.schedule.operations import Op
from pipebench.simulate.simulation import TimelineEvent
from tests.oracles import migration
from tests.support import Blobs, Mlp, make_engine, make_setup, parameters_of

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "momentum": lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.01),
}
TRAINED = 22  # minibatches
Starts = tuple[int, ...]
Loss = Callable[[nn.Module, Callable[[torch.Tensor], torch.Tensor], int], torch.Tensor]


def newest_of_all(engine: VirtualEngine, stage: int) -> dict[str, torch.Tensor]:
    """Return the newest parameters of a stage, wherever layers are on their way."""
    worker = engine.workers[stage]
    running = worker.running[stage]
    parts = running._parts if isinstance(running, MigratingReplica) else ()
    replicas = [part.replica for part in parts] or [worker.replicas[stage]]
    return {n: p for r in replicas for n, p in zip(r.weights.names, r.weights.newest.parameters, strict=True)}


def run(
    starts: Starts,
    moves: Sequence[Repartition],
    *,
    model: nn.Module | None = None,
    plan: Any = None,
    dataset: Any = None,
    optimizer: str = "momentum",
    count: int = TRAINED,
    announced_at: int | None = None,
    **columns: Any,
) -> tuple[VirtualEngine, dict[tuple[str, int], torch.Tensor]]:
    """Train while layers move; return the engine, and every parameter after every update by (name, minibatch).

    Moves are announced before the segment, or when minibatch `announced_at` begins.
    """
    setup = make_setup(
        model or Mlp(), plan or (starts, [1] * (len(starts) + 1)), dataset=dataset or Blobs(num_train=4 * count),
        make_optimizer=OPTIMIZERS[optimizer], **columns,
    )  # fmt: skip
    seen: dict[tuple[str, int], torch.Tensor] = {}

    def observe(event: TimelineEvent) -> None:
        op, stage, number, *_ = event.instruction
        if op is Op.UPDATE:
            for name, tensor in newest_of_all(engine, stage).items():
                assert (name, number) not in seen, f"update {number} of {name} was made twice"
                seen[name, number] = tensor.detach().clone()
        if op is Op.FORWARD and stage == 0 and number == announced_at:
            announce()

    def announce() -> None:
        for move in moves:
            moves_of(engine).announce(move)

    engine = make_engine(moving(setup.under(setup.plan)), observe)
    if announced_at is None:
        announce()
    assert engine.train(0, count) == count
    return engine, seen


def mean_loss(engine: VirtualEngine) -> Loss:
    data, sampler = engine.setup.dataset, engine.setup.sampler

    def loss(_: nn.Module, run: Callable[[torch.Tensor], torch.Tensor], k: int) -> torch.Tensor:
        fields = data.fetch("train", sampler.indices(k), ["x", "label"])
        return functional.cross_entropy(run(fields["x"]), fields["label"], reduction="sum") / sampler.size(k)

    return loss


def check(
    starts: Starts,
    moves: Sequence[Repartition],
    *,
    model: nn.Module | None = None,
    wraps: Callable[[nn.Module, Callable[[], int]], nn.Module] = lambda model, k: model,
    loss: Loss | None = None,
    tolerance: float = 0.0,
    optimizer: str = "momentum",
    count: int = TRAINED,
    **given: Any,
) -> VirtualEngine:
    """Compare every update of every layer, and in the end the buffers, with the oracle's; return the engine."""
    model = model or Mlp()
    engine, seen = run(starts, moves, model=model, optimizer=optimizer, count=count, **given)
    layers = engine.setup.graph.layers
    of_minibatch, now = loss or mean_loss(engine), [0]

    def loss_of(forward: Callable[[torch.Tensor], torch.Tensor], k: int) -> torch.Tensor:
        now[0] = k
        return of_minibatch(model, forward, k)

    wanted = migration.train(
        wraps(model, lambda: now[0]),
        {name: index for index, layer in enumerate(layers) for name in layer.parameters},
        lambda k: next((move.starts for move in reversed(moves) if move.at <= k), starts),
        loss_of,
        OPTIMIZERS[optimizer],
        count,
    )
    names = {name for name, _ in model.named_parameters()}
    assert seen.keys() == {(name, k) for name in names for k in range(count)}
    for (name, k), mine in seen.items():
        worst = (mine - wanted[k][name]).abs().max().item()
        assert worst <= tolerance, f"{name} after minibatch {k} is {worst:g} off"
    buffers = {n: b for r in engine.replicas for n, b in r.module.named_buffers()}
    assert buffers.keys() == dict(model.named_buffers()).keys()
    assert all(torch.equal(buffer, wanted[-1][name]) for name, buffer in buffers.items())
    last = moves[-1].starts
    assert [stage.start for stage in engine.setup.plan.stages[1:]] == [*last]
    for replica, stage in zip(engine.replicas, engine.setup.plan.stages, strict=True):
        assert {*replica.weights.names} == {n for x in layers[stage.start : stage.stop] for n in x.parameters}
    return engine


ONE_BOUNDARY = [
    ((3,), (4,)), ((4,), (2,)), ((2,), (1,)), ((3, 5), (4, 5)), ((3, 5), (2, 5)), ((2, 4), (2, 6)), ((2, 5), (2, 3)),
    ((1, 3, 5), (2, 3, 5)), ((1, 3, 5), (1, 4, 5)), ((1, 3, 5), (1, 2, 5)), ((1, 3, 5), (1, 3, 4)),
]  # fmt: skip
SEVERAL = [
    ((2, 4), (3, 5)), ((2, 4), (1, 3)), ((2, 5), (3, 4)), ((3, 4), (2, 6)), ((1, 3, 5), (2, 4, 6)),
    ((2, 4, 6), (1, 3, 5)), ((1, 3, 5), (2, 4, 6)), ((2, 3, 5), (1, 4, 6)), ((2, 4, 5), (3, 4, 6)),
]  # fmt: skip


@pytest.mark.sampled(6)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("before", "after"), ONE_BOUNDARY)
def test_a_boundary_moves(before: Starts, after: Starts, optimizer: str) -> None:
    check(before, [Repartition(9, after)], optimizer=optimizer)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("at", [8, 13])
@pytest.mark.parametrize(("before", "after"), SEVERAL)
def test_several_boundaries_move_at_once(before: Starts, after: Starts, at: int) -> None:
    check(before, [Repartition(at, after)])


def test_moves_follow_each_other() -> None:
    """Layers move and move back as soon as is allowed."""
    check((2, 4), [Repartition(6, (3, 5)), Repartition(12, (2, 4)), Repartition(18, (1, 3))])
    check((1, 3, 5), [Repartition(8, (2, 4, 6)), Repartition(16, (1, 3, 5))], optimizer="adam")


@pytest.mark.parametrize("announced_at", [0, 3, 8])
def test_a_move_is_announced_during_training(announced_at: int) -> None:
    check((2, 4), [Repartition(announced_at + 7, (3, 5))], announced_at=announced_at)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("at", range(10, 19))
@pytest.mark.parametrize("after", [(3, 5), (1, 3), (1, 5), (3, 4)])
def test_a_segment_may_end_before_in_or_after_a_move(after: Starts, at: int) -> None:
    """After 13 minibatches, so that the pipeline drains while layers move, or before they would."""
    check((2, 4) if after != (3, 4) else (2, 5), [Repartition(at, after)], count=13)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("after", [(3, 5), (1, 3), (1, 5)])
@pytest.mark.parametrize("at", range(9, 15))
def test_a_stop_during_a_move_ends_the_move_first(after: Starts, at: int) -> None:
    """The segment is cut short when minibatch 9 begins: every worker ends at the same minibatch, with its layers."""
    starts = (2, 4)
    setup = moving(make_setup(Mlp(), (starts, [1] * 3), dataset=Blobs(num_train=4 * 22)))

    def stop(event: TimelineEvent) -> None:
        if event.instruction.op is Op.FORWARD and event.instruction[1:3] == (0, 9):
            engine._stop.reason = "asked to"

    engine = make_engine(setup, stop)
    moves_of(engine).announce(Repartition(at, after))
    done = engine.train(0, 22)
    assert 9 < done < 14
    assert [stage.start for stage in engine.setup.plan.stages[1:]] == [*after]
    again = make_engine(setup)
    moves_of(again).announce(Repartition(at, after))
    again.train(0, done)
    mine, theirs = parameters_of(engine), parameters_of(again)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("after", [(3, 5), (1, 3), (1, 5)])
def test_a_move_at_a_drain_equals_a_new_run_with_the_later_plan(after: Starts) -> None:
    """Both then train and evaluate with the same results."""
    made = []
    for live in (True, False):
        setup = make_setup(Mlp(), ((2, 4), [1] * 3), make_optimizer=OPTIMIZERS["adam"], dataset=Blobs(num_train=80))
        engine = make_engine(moving(setup))
        if live:
            moves_of(engine).announce(Repartition(9, after))
        engine.train(0, 9)
        if not live:
            engine.replan(recut(setup.graph, setup.plan, after))
        found = engine.evaluate()
        engine.train(9, 8)
        made.append((parameters_of(engine), found, engine.evaluate()))
    assert made[0][1:] == made[1][1:]
    assert all(torch.equal(made[0][0][name], tensor) for name, tensor in made[1][0].items())


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "columns", [{"order": "1f1b"}, {"order": "all-forwards"}, {"order": "1f1b", "accumulate": 3}], ids=str
)
@pytest.mark.parametrize("after", [(3, 5), (1, 3), (1, 5), (3, 4)])
def test_with_a_flush_layers_move_between_two_updates(after: Starts, columns: dict[str, Any]) -> None:
    """Nothing is in flight between updates, so the weights are those of a run without moves."""
    starts = (2, 5) if after == (3, 4) else (2, 4)
    columns |= {"weights": "one", "microbatches": 2, "make_optimizer": OPTIMIZERS["adam"]}
    found = []
    for moves in ([], [Repartition(6, after), Repartition(12, starts), Repartition(30, after)]):
        setup = make_setup(Mlp(), (starts, [1] * 3), dataset=Blobs(num_train=80), **columns)
        engine = make_engine(moving(setup))
        for move in moves:
            moves_of(engine).announce(move)
        engine.train(0, 20)
        found.append(parameters_of(engine))
    assert [stage.start for stage in engine.setup.plan.stages[1:]] == [*after]
    assert all(torch.equal(found[0][name], tensor) for name, tensor in found[1].items())


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("before", "after"), SEVERAL)
def test_the_versions_of_a_worker_while_layers_move(before: Starts, after: Starts) -> None:
    """At most as many versions as minibatches in flight; afterwards, as much as with the last cuts from the start."""
    moved, _ = run(before, [Repartition(9, after)])
    stayed, _ = run(after, [])
    for mine, theirs in zip(moved.workers, stayed.workers, strict=True):
        assert mine.versions_max <= moved.setup.pipeline.warmups[mine.index]
        assert [r.live_bytes() for r in mine.replicas.values()] == [r.live_bytes() for r in theirs.replicas.values()]
        assert not any(isinstance(each, MigratingReplica) for each in mine.running.values())
        crossing, given = mine.crossing, moving_worker(mine)._given_units
        assert not any((crossing._outgoing, crossing._received, crossing._arriving, crossing._returning, given))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("after", [(3, 5), (1, 3), (1, 5)])
@pytest.mark.parametrize("memory", ["sssssss", "ksrsksr"])
def test_layers_with_swapped_activations_move(after: Starts, memory: str) -> None:
    """Swapped activations stay on the host of the stage that runs the unit's backward."""
    words = {"k": "keep", "s": "swap", "r": "recompute"}
    engine = check(
        (2, 4), [Repartition(9, after), Repartition(16, (2, 4))], memory=[words[letter] for letter in memory]
    )
    assert engine.num_bytes["swap-out", "pcie"] == engine.num_bytes["swap-in", "pcie"] > 0


WORDS = {"k": KEEP, "s": SWAP, "r": RECOMPUTE}


def policies(letters: str) -> tuple[str, ...]:
    return tuple(WORDS[letter] for letter in letters)


POLICIES: dict[str, tuple[Starts, list[tuple[Starts, str]]]] = {
    "two stages": ((3,), [((4,), "sssrrrk"), ((2,), "kkkssss"), ((2,), "rrrrrrr")]),
    "swap on": ((2, 4), [((3, 5), "sssssss"), ((3, 5), "kkkkkkk")]),
    "recompute on": ((2, 4), [((1, 3), "rrrrrrr"), ((2, 4), "kkkkkkk")]),
    "no layer moves": ((2, 4), [((2, 4), "srksrks"), ((2, 4), "kkrrssk")]),
    "one stage changes": ((2, 4), [((2, 4), "kkssrkk"), ((2, 5), "kkssrkk")]),
    "both ways": ((2, 4), [((1, 5), "ssrrkss"), ((2, 4), "krsksrk")]),
    "a stage that only gives": ((3, 5), [((2, 5), "srsrsrs"), ((2, 4), "rsrsrsr")]),
    "four stages": ((1, 3, 5), [((2, 4, 6), "srksrks"), ((1, 3, 5), "rssskrk")]),
    "four stages, one boundary": ((2, 3, 5), [((2, 4, 5), "sssssss"), ((1, 4, 6), "kkkrrrr")]),
}  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", POLICIES)
def test_policies_change_with_a_move(name: str, optimizer: str) -> None:
    """The oracle has no policies. Units in flight keep theirs, and all that is copied out is copied back."""
    starts, changes = POLICIES[name]
    depth = len(starts) + 1
    moves = [Repartition(2 * depth * (i + 1), cuts, policies(letters)) for i, (cuts, letters) in enumerate(changes)]
    engine = check(starts, moves, optimizer=optimizer, count=2 * depth * (len(moves) + 1))
    assert layout_of(engine.setup.plan).memory == moves[-1].memory
    swaps = any("s" in letters for _, letters in changes)
    assert (engine.num_bytes["swap-out", "pcie"] > 0) is swaps
    assert engine.num_bytes["swap-out", "pcie"] == engine.num_bytes["swap-in", "pcie"]
    for worker in engine.workers:
        assert worker.versions_max <= engine.setup.pipeline.warmups[worker.index]
        assert not any(isinstance(each, MigratingReplica) for each in worker.running.values())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("at", range(9, 15))
@pytest.mark.parametrize("after", [(2, 4), (3, 5), (1, 3)])
def test_a_stop_around_new_policies(after: Starts, at: int) -> None:
    """The segment is cut short when minibatch 9 begins, before or after the policies hold."""
    setup = make_setup(Mlp(), ((2, 4), [1] * 3), make_optimizer=OPTIMIZERS["momentum"], dataset=Blobs(num_train=88))
    engine = make_engine(moving(setup), lambda event: stop(event))

    def stop(event: TimelineEvent) -> None:
        if event.instruction.op is Op.FORWARD and event.instruction[1:3] == (0, 9):
            engine._stop.reason = "asked to"

    moves_of(engine).announce(Repartition(at, after, policies("srksrks")))
    done = engine.train(0, 22)
    assert 9 < done < 14
    assert layout_of(engine.setup.plan) == (after, policies("srksrks"))
    again = make_engine(moving(setup))
    if after != (2, 4):
        moves_of(again).announce(Repartition(at, after))
    again.train(0, done)
    mine, theirs = parameters_of(engine), parameters_of(again)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("columns", [{"order": "1f1b"}, {"order": "all-forwards"}], ids=str)
def test_with_a_flush_policies_change_between_two_updates(columns: dict[str, Any]) -> None:
    columns |= {"weights": "one", "microbatches": 2, "make_optimizer": OPTIMIZERS["adam"]}
    moves = [Repartition(3, (2, 4), policies("sssrrrk")), Repartition(9, (3, 5), policies("rrkksss"))]
    found, copied = [], []
    for made in ([], moves):
        engine = make_engine(moving(make_setup(Mlp(), ((2, 4), [1] * 3), dataset=Blobs(num_train=56), **columns)))
        for move in made:
            moves_of(engine).announce(move)
        engine.train(0, 14)
        found.append(parameters_of(engine))
        copied.append(engine.num_bytes["swap-out", "pcie"])
    assert all(torch.equal(found[0][name], tensor) for name, tensor in found[1].items())
    assert copied[0] == 0 < copied[1]


def test_layers_that_recompute_after_a_move_take_the_time_of_it() -> None:
    """Seven layers of 1 s forward and 2 s backward: layers that recompute then take 4 s, those that swap no more."""
    times = []
    for letters in ("kkkkkkk", "rrrrrrr", "sssssss"):
        engine, _ = run((2, 4), [Repartition(9, (2, 5), policies(letters))], count=40)
        times.append(engine.clock_s)
    assert times[1] - times[0] == pytest.approx((40 - 9) * 3, abs=3 * 3)
    assert times[2] - times[0] < 1


At = Repartition  # so that a row is a line
REFUSED = {
    "too few": ({}, [At(9, (3, 5), (KEEP,) * 6)], "says of every layer what it does, of 7; got 6 policies"),
    "too early": ({}, [At(5, (3, 5))], "comes too early: 0 minibatches have begun, .* from 6 on"),
    "too close": ({}, [At(6, (3, 5)), At(11, (2, 4))], "the move before is from minibatch 6 on.* from 12 on"),
    "replicated": ({"plan": ((2, 4), (1, 2, 1))}, [At(9, (3, 5))], "one replica, and stage 1 has 2; set vpipe.live"),
    "one stage": ({"plan": ((), (1,))}, [At(9, ())], "there are several stages, and there is one"),
    "far": ({}, [At(9, (5, 6))], "stage 1, 2 to 3, stays; go there in two moves"),
    "empty": ({}, [At(9, (4, 4))], "leaves stage 1 without layers"),
    "fewer": ({}, [At(9, (4,))], "keeps the number of stages, 3; got cuts for 2"),
    "nothing": ({}, [At(9, (2, 4))], "moves nothing"),
    "vertical sync": ({"weights": "stash-vertical-sync"}, [At(9, (3, 5))], "weights: stash, or every update flushes"),
    "no stash": ({"weights": "none"}, [At(9, (3, 5))], "weights: stash, or every update flushes; got none"),
    "depth": ({"depth": 2}, [At(9, (3, 5))], "in flight as there are stages, 3, .* got depth: 2"),
    "split": ({"weights": "one", "backward": "split", "order": "zero-bubble"}, [At(9, (3, 5))], "backward: whole"),
    "flush": ({"weights": "one", "accumulate": 4}, [At(10, (3, 5))], "from 4 on, a multiple of 4"),
    "relay": ({"relay": True}, [At(9, (3, 5))], "set relay: false"),
}  # fmt: skip


@pytest.mark.parametrize(("columns", "moves", "sentence"), REFUSED.values(), ids=REFUSED)
def test_refused_moves(columns: dict[str, Any], moves: Sequence[Repartition], sentence: str) -> None:
    plan = columns.pop("plan", ((2, 4), (1, 1, 1)))
    engine = make_engine(moving(make_setup(Mlp(), plan, **columns)))
    for move in moves[:-1]:
        moves_of(engine).announce(move)
    with pytest.raises(PlanError, match=sentence):
        moves_of(engine).announce(moves[-1])


def test_a_move_that_is_announced_too_late_is_refused() -> None:
    with pytest.raises(PlanError, match=r"6 minibatches have begun, .* from 12 on"):
        run((2, 4), [Repartition(11, (3, 5))], announced_at=5)
