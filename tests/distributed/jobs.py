"""Training loops for the processes of the tests: with moves or a search, killed at a given place, and resumed."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pipebench.checkpoint.store import MANIFEST, Checkpoints
from pipebench.distributed.engine import DistributedEngine
from pipebench.distributed.launch_join import PeerLostError
from pipebench.distributed.world import World
from pipebench.engine.engine import TrainingEngine
from pipebench.engine.worker import Worker
from pipebench.extensions.moves.engine import moving
from pipebench.extensions.moves.planned import MovesPlanned, planned_moves
from pipebench.extensions.moves.recipe import parse_moves
from pipebench.extensions.moves.settings import MOVES
from pipebench.recipe.schema import PeriodRecipe
from pipebench.schedule.instructions import Instruction
from pipebench.schedule.operations import Op
from pipebench.train import checkpointing
from pipebench.train.checkpointing import CheckpointPolicy, newest
from pipebench.train.job import Job
from pipebench.train.loop import TrainingLoop
from pipebench.train.periods import Periods
from pipebench.train.result import RunResult
from tests.distributed.cases import momentum
from tests.engine.test_cells import whole
from tests.search.test_searching import job as search_job
from tests.search.test_searching import recipe_of
from tests.support import Blobs, Mlp, make_setup
from tests.train.test_training import Silent, recipe
from tests.unwatched import unwatched

SEGMENT, MOVES_AT = 10, (8, 18)  # minibatches between checkpoints; of the run, from which layers move


@dataclass(frozen=True)
class Moving:
    """A run of three stages in which a layer moves from the first to the second and back."""

    last: str  # which way it moves the second time, `left` or `right`
    live: bool = True  # whether training goes on meanwhile

    def job(self) -> Job:
        sequences = {"left": ([3, 4], ("body_2", "body_4"), ("body_3", "body_4"))}
        sequences["right"] = ([2, 4], *sequences["left"][:0:-1])
        starts, *cuts = sequences[self.last]
        moves = [{"at": {"minibatches": at}, "cuts": list(to)} for at, to in zip(MOVES_AT, cuts, strict=True)]
        data = Blobs(num_train=46)
        setup = make_setup(Mlp(), (starts, [1, 1, 1]), dataset=data, make_optimizer=momentum)
        setup = moving(setup, live=self.live)
        every = PeriodRecipe(minibatches=SEGMENT)
        given = recipe(target=None, max_epochs=2, evaluate_every=every, checkpoint_every=every)
        periods = Periods.of(given.train, setup.sampler.minibatches_per_epoch)
        planned = planned_moves(parse_moves(moves), setup, periods)
        return Job(given, setup.cluster, setup, extensions={MOVES: MovesPlanned(given, planned)})


@dataclass(frozen=True)
class Searching:
    """A search of ten individuals of three stages."""

    weights: str  # the policy

    def job(self) -> Job:
        return search_job(whole(weights=self.weights), recipe_of(checkpoint_every=PeriodRecipe(minibatches=3)))


@dataclass(frozen=True)
class Fault:
    """The place where a worker is killed."""

    rank: int  # which one
    place: str  # an instruction's name in `Op`, or that of a function below
    nth: int = 0  # when it comes there for the nth time, from 0
    after: bool = False  # once that is done; otherwise right before


_FUNCTIONS: dict[str, type] = {
    "hand_over": World, "write_part": Checkpoints, "commit": Checkpoints, "switch_setup": DistributedEngine,
}  # fmt: skip


def trained(
    world: World, what: Moving | Searching, folder: str, fault: Fault | None = None, shares_memory: bool = True
) -> tuple[int, dict[str, torch.Tensor], RunResult]:
    """Train from the newest checkpoint on, if there is one; return the worker, its weights and the result.

    A worker with a fault is killed there, and leaves a file beside the folder; the others end when they hear of it.
    """
    if fault is not None and fault.rank == world.rank:
        _arm(fault, Path(folder))
    if fault is not None and fault.place == "write_part":
        checkpointing._LAST_WAIT_S = 0.0  # what the first process would wait for, 5 s, never comes
    given = what.job()
    given = replace(given, recipe=replace(given.recipe, engine=replace(given.recipe.engine, kind="distributed")))
    store, engines = Checkpoints(Path(folder)), list[DistributedEngine]()

    def make(*listeners: Callable[..., None]) -> TrainingEngine:
        on_loss, on_unit = listeners
        local = replace(world, shares_memory=shares_memory)
        engines.append(DistributedEngine(given.setup, local, unwatched(given.setup), on_loss=on_loss, on_unit=on_unit))
        return engines[0]

    try:
        policy = CheckpointPolicy(store, newest(store, given)[0])
        result, _ = TrainingLoop(given, make, Silent(), lambda point: None, policy).run()
    except PeerLostError:
        os._exit(3)
    worker = engines[0].worker
    tensors = {name: t.detach().clone() for r in worker.replicas.values() for name, t in r.tensors().items()}
    engines[0].close()
    return worker.index, tensors, result


def _arm(fault: Fault, folder: Path) -> None:
    """Let this process be killed at a place, unless in a checkpoint's work not before the first one is whole."""
    if fault.place in _FUNCTIONS:
        _strike(_FUNCTIONS[fault.place], fault, folder, lambda *given: True)
    else:
        op = Op[fault.place]
        _strike(Worker, fault, folder, lambda worker, instruction, *_: _is(instruction, op))


def _is(instruction: Instruction, op: Op) -> bool:
    return instruction.op is op


def _strike(where: type, fault: Fault, folder: Path, counts: Callable[..., bool]) -> None:
    """Wrap a method, and kill this process when it is called for the nth time."""
    name = fault.place if fault.place in _FUNCTIONS else "execute"
    function, times = getattr(where, name), [0]

    def die() -> None:
        while name not in ("write_part", "commit") and not [*folder.glob(f"step-*/{MANIFEST}")]:
            time.sleep(0.01)
        Path(f"{folder}.struck").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def struck(*given: Any, **named: Any) -> Any:
        if not counts(*given):
            return function(*given, **named)
        times[0] += 1
        if times[0] == fault.nth + 1 and not fault.after:
            die()
        found = function(*given, **named)
        if times[0] == fault.nth + 1:
            die()
        return found

    setattr(where, name, struck)
