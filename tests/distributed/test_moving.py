"""Stages that measure and balance themselves in processes: their decisions, and the weights afterwards."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from pipebench.engine.virtual import VirtualEngine
from pipebench.extensions.moves.engine import moves_of, moving
from pipebench.extensions.moves.repartition_plan import Repartition
from pipebench.model.plan import recut
from pipebench.simulate.network import Network
from tests.distributed.cases import Case, small_setup
from tests.distributed.scenarios import _MINIBATCHES, balanced_setup
from tests.processes import Processes


@pytest.mark.sampled(2)
@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("size", [2, 3])
def test_stages_balance_themselves_and_the_weights_are_the_virtual_engine_s(
    request: pytest.FixtureRequest, size: int, live: bool
) -> None:
    """Measured times and so decisions differ from run to run; repeated with the same moves, a run has the same bits."""
    processes: Processes = request.getfixturevalue({2: "two", 3: "three"}[size])
    starts = [1, 2][: size - 1]
    found = processes.run("tests.distributed.scenarios:balanced", starts, live, f"balanced {size} {live}")
    (made, *others) = [decided for _, decided in found]
    assert made
    assert all(each == made for each in others), "all have heard the same"
    again = virtually_again(starts, made, live=live)
    for worker, (outcome, _) in enumerate(sorted(found, key=lambda each: each[0].worker)):
        (tensors,) = outcome.tensors
        expected = again.workers[worker].tensors()
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
    counts = [len([name for name in outcome.tensors[0] if name.endswith("weight")]) for outcome, _ in found]
    assert max(counts) < 7 - (size - 1), (
        f"all linear layers but one for each other stage were on the last, now {counts}"
    )


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("shares_memory", [True, False])
@pytest.mark.parametrize(
    ("case", "courses"),
    [
        (Case("conv", (3,), (1, 1), {}, (60, 30)), ((5,), (2,), (3,))),
        (Case("skip", (5, 12), (1, 1, 1), {}, (70, 40)), ((7, 9), (4, 14), (5, 12))),
    ],
    ids=["two", "three"],
)
def test_the_latest_possible_decision_reaches_all_processes_in_time(
    request: pytest.FixtureRequest, case: Case, courses: Sequence[Sequence[int]], shares_memory: bool, seed: int
) -> None:
    """Moves back and forth, with values that skip a stage: all processes make the same ones, with the same bits."""
    processes: Processes = request.getfixturevalue({2: "two", 3: "three"}[len(case.replicas)])
    case = replace(case, shares_memory=shares_memory)
    found = processes.run("tests.distributed.scenarios:decided_late", case, courses, seed)
    made = found[0][1]
    assert all(others == made for _, others in found), "all have heard the same"
    assert len(made[0]) >= 3
    setup = moving(small_setup(case))
    engine, done = VirtualEngine(setup, Network(setup.cluster, setup.devices)), 0
    for moves, count in zip(made, case.segments, strict=True):
        for at, starts in moves:
            moves_of(engine).announce(Repartition(at, tuple(starts)))
        done += engine.train(done, count)
    for outcome, _ in found:
        (tensors,) = outcome.tensors
        expected = engine.workers[outcome.worker].tensors()
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())


def virtually_again(starts: list[int], made: list[tuple[int, list[int]]], *, live: bool) -> VirtualEngine:
    """Return a virtual engine that has made the moves that processes decided."""
    setup = balanced_setup(starts, live=live, balances=False)
    engine = VirtualEngine(replace(setup), Network(setup.cluster, setup.devices))
    done = 0
    if live:
        for at, cuts in made:
            moves_of(engine).announce(Repartition(at, tuple(cuts)))
    for at, cuts in [] if live else made:
        if at < _MINIBATCHES:
            done += engine.train(done, at - done)
        else:
            done += engine.train(done, _MINIBATCHES - done)
        engine.replan(recut(setup.graph, engine.setup.plan, cuts))
    engine.train(done, _MINIBATCHES - done)
    return engine
