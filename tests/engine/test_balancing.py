"""Algorithm 1 on the virtual clock: stages that were cut badly are balanced while they train."""

from dataclasses import replace
from typing import Any

import pytest

from pipebench.engine.setup import Setup
from pipebench.model.plan import recut
from pipebench.schedule.moves import Move
from pipebench.schedule.programs import most_in_flight
from pipebench.simulate.memory import stage_memories
from tests.checkpoint.support import captured
from tests.checkpoint.test_round_trips import OPTIMIZERS, bits
from tests.models import SkipNet
from tests.support import Blobs, Mlp, make_engine, make_setup

SGD = OPTIMIZERS["fused-momentum"]


def balancing(starts: list[int], *, live: bool, model: Any = Mlp, **columns: Any) -> Setup:
    data = Blobs(num_train=4 * 200)
    setup = make_setup(model(), (starts, [1] * (len(starts) + 1)), make_optimizer=SGD, dataset=data, **columns)
    return replace(setup, repartitions=True, balances=True, live=live)


def slowest_s(setup: Setup) -> float:
    size = setup.costs.most_samples
    return max(stage.forward_s[size] + stage.backward_s[size] for stage in setup.costs.stages)


def played(setup: Setup, total: int) -> tuple[Any, list[tuple[int, tuple[int, ...]]]]:
    """Train so many minibatches; return the engine and what was decided, minibatches counted from the start."""
    engine, done, made = make_engine(setup), 0, []
    while done < total:
        first = done
        done += engine.train(done, total - done)
        for move in engine.take_decisions():
            made.append((first + move.at, tuple(move.starts)))
            if not setup.live:
                engine.replan(recut(setup.graph, engine.setup.plan, move.starts))
    return engine, made


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize(
    ("starts", "columns"),
    [([1, 2], {}), ([5, 6], {}), ([1], {}), ([1, 2], {"weights": "one", "microbatches": 2})],
    ids=["all at the end", "all at the start", "two stages", "a flush"],
)
def test_bad_cuts_are_balanced(starts: list[int], columns: Any, live: bool) -> None:
    setup = balancing(starts, live=live, **columns)
    engine, made = played(setup, 120)
    best_s = 3.0 * -(-7 // (len(starts) + 1))  # seven layers of a forward of 1 s and a backward of 2 s
    assert slowest_s(engine.setup) == best_s < slowest_s(setup)
    assert 1 <= len(made) <= 9
    assert all(at >= 2 * setup.pipeline.depth for at, _ in made)


@pytest.mark.parametrize("live", [True, False])
def test_what_was_decided_can_be_done_again_by_hand(live: bool) -> None:
    setup = balancing([6, 7], live=live, model=SkipNet)
    engine, made = played(setup, 80)
    again = make_engine(replace(setup, balances=False))
    done = 0
    if live:
        for at, starts in made:
            again.announce(Move(at, starts))
    for at, starts in [] if live else made:
        again.train(done, at - done)
        again.replan(recut(setup.graph, again.setup.plan, starts))
        done = at
    again.train(done, 80 - done)
    assert made
    assert bits(captured(engine)) == bits(captured(again))
    assert engine.clock_s == again.clock_s, "reports and decisions travel along"


def test_nothing_is_decided_where_a_stage_waits_for_no_gradients() -> None:
    """The second stage picks features of the data: it may be anywhere, and hears of nothing."""
    setup = balancing([1, 2], live=True, model=SkipNet)
    assert not any(edge.has_gradient for edge in setup.pipeline.edges if edge.source == 1)
    assert played(setup, 60)[1] == []


def test_balanced_stages_stay_and_training_is_what_it_was() -> None:
    setup = balancing([3], live=True)
    engine, made = played(setup, 40)
    other = make_engine(replace(setup, balances=False, repartitions=False))
    other.train(0, 40)
    assert not made or slowest_s(engine.setup) < slowest_s(setup)
    if not made:
        assert bits(captured(engine)) == bits(captured(other))


def test_throughput_grows_while_it_goes_on() -> None:
    balanced, _ = played(balancing([1, 2], live=True), 150)
    drained, _ = played(balancing([1, 2], live=False), 150)
    bad = make_engine(replace(balancing([1, 2], live=True), balances=False))
    bad.train(0, 150)
    assert balanced.clock_s < drained.clock_s < bad.clock_s


@pytest.mark.parametrize("starts", [(1, 2), (5, 6)])
def test_stages_are_balanced_within_the_memory_of_their_devices(starts: tuple[int, ...]) -> None:
    free = balancing([*starts], live=True)
    capped = replace(free, cluster=replace(free.cluster, memory_bytes=2600))
    (engine, _), (other, _) = played(free, 120), played(capped, 120)
    needed = [
        memory.most_bytes(setup.costs.most_samples, depth, depth)
        for setup in (engine.setup, other.setup)
        for memory, depth in zip(
            stage_memories(setup.profile, setup.plan, setup.pipeline), most_in_flight(setup.pipeline), strict=True
        )
    ]
    assert max(needed[:3]) > 2600 >= max(needed[3:])
    assert slowest_s(other.setup) < slowest_s(free)
