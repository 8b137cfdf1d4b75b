"""Workers killed while layers move or an architecture's turn begins: the resumed run ends as an undisturbed one.

Each case starts new processes, since one of them dies; runs resume in those that all tests share.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from pipebench.checkpoint.store import Checkpoints
from pipebench.engine.virtual import VirtualEngine
from pipebench.train.engines import on_virtual_clock
from pipebench.train.loop import TrainingLoop
from pipebench.train.result import RunResult
from tests.distributed.jobs import MOVES_AT, SEGMENT, Fault, Moving, Searching
from tests.processes import Processes
from tests.train.test_training import Silent

_TRAINED = "tests.distributed.jobs:trained"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


_LEFT, _RIGHT = Moving("left"), Moving("right")  # the second move is from stage 1 to 0, and the other way
_expected: dict[Moving | Searching, tuple[list[dict[str, torch.Tensor]], RunResult]] = {}


def expected(what: Moving | Searching) -> tuple[list[dict[str, torch.Tensor]], RunResult]:
    """Return all workers' weights, and the result, of an undisturbed run on the virtual engine."""
    if what not in _expected:
        given, engines = what.job(), list[VirtualEngine]()
        make = on_virtual_clock(given)

        def keep(*listeners: Any) -> Any:
            engines.append(make(*listeners))  # type: ignore[arg-type]
            return engines[0]

        result, _ = TrainingLoop(given, keep, Silent(), lambda point: None).run()
        tensors = [
            {name: tensor for replica in worker.replicas.values() for name, tensor in replica.tensors().items()}
            for worker in engines[0].workers
        ]
        _expected[what] = tensors, result
    return _expected[what]


def compare(found: list[Any], what: Moving | Searching) -> RunResult:
    """Compare the processes with the virtual engine, to the bit; return the first one's result."""
    weights, _ = expected(what)
    for worker, tensors, _ in found:
        assert tensors.keys() == weights[worker].keys()
        assert all(torch.equal(tensor, weights[worker][name]) for name, tensor in tensors.items())
    assert sorted(worker for worker, _, _ in found) == [*range(len(weights))]
    return found[0][2]


def kill(what: Moving | Searching, fault: Fault, folder: Path, *, shares_memory: bool = True) -> None:
    with Processes(3) as doomed:
        doomed.run(_TRAINED, what, str(folder), fault, shares_memory, lost=[0, 1, 2])
    assert Path(f"{folder}.struck").exists(), "they ended for another reason"


def newest_step(folder: Path) -> int:
    """Return the minibatch of the newest checkpoint that is whole."""
    found = Checkpoints(folder).latest()[0]
    assert found is not None
    return found.step


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("what", "fault"),
    [
        (way, Fault(rank, place, nth, after))
        for way, giver, taker in ((_LEFT, 1, 0), (_RIGHT, 0, 1))
        for rank, place, nth, after in (
            (giver, "RECUT", 0, True),
            (giver, "GIVE_UNIT", 0, True),  # one unit is given, another isn't
            (giver, "GIVE", 0, False),
            (giver, "GIVE", 0, True),  # nobody has the block, but the wire
            (taker, "TAKE_UNIT", 0, False),
            (taker, "FORWARD_AGAIN", 1, False),
            (taker, "TAKE", 0, False),
            (taker, "TAKE", 0, True),
        )
    ],
    ids=lambda it: it.last if isinstance(it, Moving) else f"{it.rank} {'after' if it.after else 'before'} {it.place}",
)
def test_a_run_whose_worker_is_killed_in_a_move_resumes_from_the_checkpoint(
    three: Processes, folder: Path, what: Moving, fault: Fault
) -> None:
    shares_memory = fault.after  # half of them by sockets
    kill(what, fault, folder, shares_memory=shares_memory)
    assert newest_step(folder) == SEGMENT
    result = compare(three.run(_TRAINED, what, str(folder), None, shares_memory), what)
    assert [(each.minibatch, each.live) for each in result.moves] == [(at, True) for at in MOVES_AT]
    assert [each.cuts for each in result.moves] == [each.cuts for each in expected(what)[1].moves]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("what", "fault", "step"),
    [
        (Moving("left", live=False), Fault(0, "hand_over", 1), 10),
        (Moving("right", live=False), Fault(1, "hand_over", 1, after=True), 10),
        (_LEFT, Fault(0, "write_part", 1), 10),
        (_RIGHT, Fault(1, "write_part", 1, after=True), 10),
        (_LEFT, Fault(0, "commit", 2), 10),
        (_RIGHT, Fault(0, "commit", 2, after=True), 20),
        (Moving("left", live=False), Fault(2, "write_part", 1, after=True), 10),
    ],
    ids=str,
)
def test_a_run_whose_worker_is_killed_at_or_after_a_move_s_drain_resumes(
    three: Processes, folder: Path, what: Moving, fault: Fault, step: int
) -> None:
    """While the pipeline is empty for a move, and in the checkpoint after one."""
    kill(what, fault, folder)
    assert newest_step(folder) == step
    result = compare(three.run(_TRAINED, what, str(folder)), what)
    assert [(each.minibatch, each.live) for each in result.moves] == [(at, what.live) for at in MOVES_AT]


@pytest.mark.parametrize(("weights", "shares_memory"), [("one", True), ("stash", False)])
def test_a_search_in_processes_equals_the_virtual_engine_s(
    three: Processes, folder: Path, weights: str, shares_memory: bool
) -> None:
    what = Searching(weights)
    result = compare(three.run(_TRAINED, what, str(folder), None, shares_memory), what)
    _assert_same_search(result, what)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "fault", [Fault(0, "switch_setup", 2), Fault(1, "hand_over", 4, after=True), Fault(0, "commit", 5)], ids=str
)
def test_a_search_that_lost_a_worker_ends_as_an_undisturbed_one(three: Processes, folder: Path, fault: Fault) -> None:
    what = Searching("stash")
    kill(what, fault, folder)
    assert newest_step(folder) > 0
    _assert_same_search(compare(three.run(_TRAINED, what, str(folder)), what), what)


def _assert_same_search(result: RunResult, what: Searching) -> None:
    """Assert the same individuals with the same scores; times are not compared."""
    found, wanted = result.search, expected(what)[1].search
    assert found is not None
    assert wanted is not None
    assert [(e.number, e.parent, e.minibatch, e.cells, e.scores) for e in found.individuals] == [
        (e.number, e.parent, e.minibatch, e.cells, e.scores) for e in wanted.individuals
    ]
    assert (found.best, found.hurdles) == (wanted.best, wanted.hurdles)
