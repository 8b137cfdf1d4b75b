"""Asynchronous data parallelism in processes: for a given order of pushes, weights equal the virtual engine's bits."""

import threading
from dataclasses import replace
from typing import cast

import pytest

from pipebench.extensions.asynchronous.pushes import Pushes
from pipebench.extensions.asynchronous.server import ParameterServer
from pipebench.extensions.asynchronous.serving import Serving
from pipebench.recipe.schema import OptimizerRecipe
from tests.distributed.cases import Case, Outcome, compare, virtually
from tests.patience import wait_for
from tests.processes import Processes

AVERAGING = OptimizerRecipe("asgd", 0.1, arguments={"t0": 3, "lambd": 0.0})
ASP = {"weights": "newest-pulled", "sync": "asynchronous", "depth": 1}
CASES = {
    "two": Case("skip", (), (2,), ASP),
    "two, with statistics and a short minibatch": Case("conv", (), (2,), ASP, segments=(5, 7)),
    "two, clipped, recomputing": Case("skip", (), (2,), ASP | {"clip_norm": 0.3, "recompute": True}),
    "two, types and no gradients": Case("mixed", (), (2,), ASP | {"sizes": (2, 4)}),
    "two, bf16": Case("conv", (), (2,), ASP | {"precision": "bf16", "clip_norm": 0.5}),
    "two, averages": Case("mlp", (), (2,), ASP, optimizer=AVERAGING),
    "three": Case("skip", (), (3,), ASP, segments=(8, 4, 1, 5)),
}


def ordered(case: Case, pushes: list[Pushes]) -> Case:
    return replace(case, columns={**case.columns, "push_order": {each.first: each.minibatches for each in pushes}})


def run(processes: Processes, case: Case) -> list[Outcome]:
    return processes.run("tests.distributed.cases:distributed", case)


def pushes_of(outcomes: list[Outcome]) -> list[Pushes]:
    return next(outcome.pushes for outcome in outcomes if outcome.pushes)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_the_virtual_engine_repeats_the_processes_order(request: pytest.FixtureRequest, name: str) -> None:
    """Their order depends on the wall clock; given that order, one process computes the same weights, to the bit."""
    case = CASES[name]
    processes: Processes = request.getfixturevalue(name.split(",")[0])
    found = run(processes, case)
    pushes = pushes_of(found)
    for segment, count in zip(pushes, case.segments, strict=True):
        assert sorted(segment.minibatches) == list(range(count))
        assert all(0 <= updates < count for updates in segment.staleness)
    again = virtually(ordered(case, pushes))
    assert again.pushes == pushes
    compare(found, again, 0.0)


def test_the_first_replica_notes_its_memory_when_its_turn_comes() -> None:
    """While it waits for its turn, other replicas' pushes make new weights beside the version that it holds."""
    done: list[str] = []

    class Server:
        def begin(self, first: int) -> None: ...
        def apply(self, minibatch: int, *_: object, **__: object) -> None:
            done.append(f"push {minibatch}")

    serving = Serving(cast("ParameterServer", Server()), [], lambda: done.append("note"))
    serving.begin(0, [1, 0], lambda: 2)
    own = threading.Thread(target=serving.push, args=(0, 0, []))
    own.start()
    wait_for(lambda: 0 in serving._there)
    serving._apply(1, 0, [], of_first=False)
    own.join()
    assert done == ["push 1", "note", "push 0"]


@pytest.mark.parametrize("name", ["two", "three"])
def test_processes_repeat_an_order(request: pytest.FixtureRequest, name: str) -> None:
    """An order that doesn't occur by itself: all of the last replica's pushes come long before the first's."""
    case = CASES[name]
    processes: Processes = request.getfixturevalue(name)
    r = case.replicas[0]
    pushes, first = [], 0
    for count in case.segments:
        order = sorted(range(count), key=lambda k: (-(k % r), k))
        pushes.append(Pushes(first, order))
        first += count
    given = ordered(case, pushes)
    found = run(processes, given)
    assert [each.minibatches for each in pushes_of(found)] == [each.minibatches for each in pushes]
    expected = virtually(given)
    assert expected.pushes == pushes_of(found)
    assert max(expected.pushes[0].staleness) >= case.segments[0] // 2
    compare(found, expected, 0.0)
    (first, *others), (at_least, *exactly) = [peak for each in found for peak in each.peaks], expected.peaks
    assert others == exactly
    # What others' pushes have made when the first's turn comes; on the wall clock some come during its passes.
    assert first >= at_least
