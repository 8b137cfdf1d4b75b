"""Functions that processes run in tests of the transport and of early ends; called by name, as those of `cases.py`."""

import itertools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined] # torch lists it nowhere

from pipebench.distributed import channel
from pipebench.distributed.control import STOP_KEY, Control
from pipebench.distributed.engine import DistributedEngine
from pipebench.distributed.launch_join import PeerLostError
from pipebench.distributed.message import HEADER_BYTES, read_header
from pipebench.distributed.shared_memory import SharedSender
from pipebench.distributed.world import World
from pipebench.engine.admission import EvaluationStoppedError
from pipebench.engine.setup import Setup
from pipebench.engine.worker import Worker
from pipebench.extensions.moves.balancing import RepartitionController
from pipebench.extensions.moves.engine import moves_of, moving
from pipebench.extensions.moves.repartition_plan import Repartition
from pipebench.model.plan import recut
from pipebench.model.sampling import InOrder
from pipebench.schedule.instructions import Instruction
from pipebench.schedule.operations import Op
from tests.distributed.cases import Case, Outcome, in_processes, momentum, small_setup
from tests.patience import PATIENCE_S, wait_for
from tests.support import Blobs, Mlp, make_setup
from tests.unwatched import unwatched

_SIZES = (3, 3, 40, 9, 9, 40, 200, 1, 3, 200, 9, 1)  # rows of every pair of samples: growing, shrinking, again
_HUGE_ROWS = 700_000  # of 6 numbers of 8 bytes for 2 samples: 67 MB


class Rows(Blobs):
    """Samples of many rows each, by pairs of different lengths; the longest of a unit's samples sets its length."""

    def __init__(self, num_rows: Sequence[int]) -> None:
        super().__init__(num_train=2 * len(num_rows), num_eval=4)
        self._num_rows = num_rows

    def fetch(
        self, split: str, indices: Sequence[int], fields: Sequence[str], draw: int = 0
    ) -> dict[str, torch.Tensor]:
        """Return x: [samples, rows, 6] float64, and labels."""
        found = super().fetch(split, indices, fields, draw)
        rows = max(self._num_rows[i // 2] for i in indices)
        if "x" in found:
            found["x"] = found["x"].unsqueeze(1).expand(-1, rows, -1).contiguous()
        return found


class RowNet(nn.Module):
    """Works on every row by itself, then on their mean."""

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(3)
        self.one, self.two, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [samples, rows, 6] to [samples, 4]."""
        return self.head(torch.tanh(self.two(torch.tanh(self.one(x)))).mean(1))


def rows_setup(sizes: Sequence[int] = _SIZES) -> Setup:
    """Return two stages that exchange values of changing shapes; the profile knows the first ones alone."""
    data = Rows(sizes)
    return make_setup(
        RowNet(), ([2], [1, 1]), dataset=data, make_optimizer=momentum, minibatch_size=2,
        sampler=InOrder(data.num_train, 2),
    )  # fmt: skip


def huge_setup() -> Setup:
    """Return two stages that exchange a value of more than 64 MB, after one that makes no room for it."""
    return rows_setup((3, _HUGE_ROWS, 3))


class _Counting:
    """Wraps `torch.distributed` in channels, and records what is sent."""

    def __init__(self) -> None:
        self.num_sends: Counter[int] = Counter()
        self.num_texts: Counter[int] = Counter()
        self.num_bytes: list[int] = []

    def isend(self, data: torch.Tensor, peer: int, **how: Any) -> Any:
        tag = how["tag"]
        self.num_sends[tag] += 1
        self.num_bytes.append(len(data))
        if tag % 2 == 0 and len(data) >= HEADER_BYTES:
            self.num_texts[tag] += read_header(data).text_bytes > 0
        return dist.isend(data, peer, **how)

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)


@contextmanager
def counting() -> Iterator[_Counting]:
    found = _Counting()
    channel.dist = found  # type: ignore[assignment, attr-defined]
    try:
        yield found
    finally:
        channel.dist = dist  # type: ignore[attr-defined]


def rows(world: World, huge: bool) -> tuple[Outcome, dict[int, int], dict[int, int], list[int]]:
    """Train on changing shapes; return also the messages and the layouts in words by tag, and all messages' sizes."""
    setup = huge_setup() if huge else rows_setup()
    with counting() as counted:
        outcome = in_processes(replace(world, shares_memory=False), setup, (3,) if huge else (7, 12, 5))
    return outcome, dict(counted.num_sends), dict(counted.num_texts), counted.num_bytes


class SlowWhenEvaluated(nn.Linear):
    """A stage that is slow in evaluation, so that the others could run far ahead of it."""

    one_layer = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As its class, after a while in evaluation."""
        if not self.training:
            time.sleep(0.01)
        return super().forward(x)


def shared_rows(world: World) -> tuple[Outcome, int]:
    """Train on changing shapes, in memory that is shared; return also the slots that this worker has made."""
    setup = rows_setup()
    engine = DistributedEngine(setup, world, unwatched(setup))
    engine.close()
    slots: list[int] = []
    take = SharedSender._take

    def noting(sender: SharedSender, num_bytes: int) -> int:
        slots.append(take(sender, num_bytes))
        return slots[-1]

    SharedSender._take = noting  # type: ignore[assignment, method-assign]
    outcome = in_processes(world, rows_setup(), (7, 12, 5))
    SharedSender._take = take  # type: ignore[method-assign]
    return outcome, len({*slots})


def slow_evaluation(world: World, shares_memory: bool) -> int:
    """Evaluate before a slow last stage; return the most messages that were on their way from this worker."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), SlowWhenEvaluated(6, 4)).double()
    setup = make_setup(model, ([1, 2], [1, 1, 1]), dataset=Blobs(num_eval=160))
    engine = DistributedEngine(setup, replace(world, shares_memory=shares_memory), unwatched(setup))
    engine.start_clock()
    most = [0]
    senders = list(engine._transport._senders.values())
    for sender in senders:
        send = sender.send

        def noting(*args: Any, send: Any = send, sender: Any = sender, **kwargs: Any) -> int:
            num_bytes: int = send(*args, **kwargs)
            left = sender._num_sent - sender._num_taken if shares_memory else len(sender._leaving)
            most[0] = max(most[0], left)
            return num_bytes

        sender.send = noting  # type: ignore[method-assign]
    engine.evaluate()
    engine.close()
    return most[0]


def buffers_of_a_segment(world: World, case: Case, num_minibatches: int) -> int:
    """Train; return how many buffers, or slots, this worker's busiest sender has made."""
    world = replace(world, shares_memory=case.shares_memory)
    setup = replace(small_setup(case), device=world.device)
    engine = DistributedEngine(setup, world, unwatched(setup))
    engine.start_clock()
    engine.train(0, num_minibatches)
    engine.close()
    made = "_slots" if case.shares_memory else "_free"
    return max((len(getattr(sender, made)) for sender in engine._transport._senders.values()), default=0)


def stopped(world: World, case: Case, name: str, after: int, asks: int, by_key: bool) -> Outcome:
    """Train until a worker asks for a stop, by its `Control` or by the store, within a segment."""
    setup, store = small_setup(case), PrefixStore(name, world.store)
    control = Control(store, world.rank, world.size, setup.pipeline, stall_limit_s=PATIENCE_S)
    control.start()
    seen = [0]

    def on_unit(samples: int, loss: float, clock_s: float) -> None:
        seen[0] += 1
        if seen[0] == after and world.rank == asks:
            if by_key:
                store.set(STOP_KEY, "enough")
            else:
                control.request_stop("enough")

    outcome = in_processes(world, setup, case.segments, control=control, on_unit=on_unit)
    assert control.stop_reason == "enough"
    control.close()
    world.barrier()
    return outcome


def stopped_in_an_evaluation(world: World, shares_memory: bool, asks: int) -> tuple[int, bool, int]:
    """Stop when a worker has evaluated two of 400 minibatches.

    Returns how many this worker has evaluated, whether its bytes are those of before, and how many it trains on then.
    """
    setup = make_setup(Mlp(), ([2, 4], [1, 1, 1]), dataset=Blobs(num_eval=1600))
    store = PrefixStore(f"evaluation {shares_memory}", world.store)
    control = Control(store, world.rank, world.size, setup.pipeline, stall_limit_s=PATIENCE_S)
    control.start()
    engine = DistributedEngine(setup, replace(world, shares_memory=shares_memory), control)
    engine.start_clock()
    engine.train(0, 4)
    evaluated, execute, bytes_before = [0], engine.worker.execute, engine.num_bytes.copy()

    def counting(it: Instruction, *others: Any) -> Any:
        if it.op is Op.FORWARD:
            evaluated[0] += 1
            if evaluated[0] == 2 and world.rank == asks:
                control.request_stop("enough")
            wait_for(lambda: evaluated[0] < 2 or world.rank != asks or control._answered)
        return execute(it, *others)

    engine.worker.execute = counting  # type: ignore[method-assign, assignment]
    with suppress(EvaluationStoppedError):
        engine.evaluate()
        raise AssertionError("the evaluation has ended")
    found = evaluated[0], engine.num_bytes == bytes_before, engine.train(4, 8)
    control.close()
    engine.close()
    world.barrier()
    return found


def balanced(world: World, starts: Sequence[int], live: bool, name: str) -> tuple[Outcome, list[tuple[int, list[int]]]]:
    """Train stages that are cut badly until they have been measured and balanced; return also what was decided."""
    setup, store = balanced_setup(starts, live=live), PrefixStore(name, world.store)
    control = Control(store, world.rank, world.size, setup.pipeline, stall_limit_s=PATIENCE_S)
    control.start()
    engine = DistributedEngine(replace(setup, device=world.device), world, control)
    engine.start_clock()
    made: list[tuple[int, list[int]]] = []
    done = 0
    while done < _MINIBATCHES:
        first = done
        done += engine.train(done, _MINIBATCHES - done)
        for move in moves_of(engine).take_decisions():
            made.append((first + move.at, list(move.starts)))
            if not live:
                engine.replan(recut(setup.graph, engine.setup.plan, move.starts))
    tensors = [{n: t.detach().clone() for n, t in r.tensors().items()} for r in engine.worker.replicas.values()]
    outcome = Outcome(engine.worker.index, tensors, [], [], dict(engine.num_bytes), [], [done])
    engine.close()
    control.close()
    world.barrier()
    return outcome, made


_MINIBATCHES = 120


class Slow(nn.Tanh):
    """A layer that takes a while, however busy the machine is, where that matters."""

    one_layer = True

    def __init__(self, pause_s: float) -> None:
        super().__init__()
        self._pause_s = pause_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self._pause_s)
        return super().forward(x)


def balanced_setup(starts: Sequence[int], *, live: bool, balances: bool = True) -> Setup:
    """Return a setup of twelve layers cut at `starts`; half of them are slow if it `balances`."""
    torch.default_generator.manual_seed(3)
    layers = [layer for _ in range(6) for layer in (nn.Linear(6, 6), Slow(0.004 * balances))]
    model = nn.Sequential(*layers[:-1], nn.Linear(6, 4)).double()
    data = Blobs(num_train=4 * _MINIBATCHES)
    plan = (list(starts), [1] * (len(starts) + 1))
    setup = make_setup(model, plan, dataset=data, make_optimizer=momentum)
    return moving(setup, balances=balances, live=live)


def decided_late(
    world: World, case: Case, courses: Sequence[Sequence[int]], seed: int
) -> tuple[Outcome, list[list[tuple[int, list[int]]]]]:
    """Train while the last stage decides, as often as it may, what cuts come next; return also that, by segment.

    Workers are delayed at random, one of them, which the seed draws, more than the others: these run as far ahead as
    they can.
    """
    setup = moving(small_setup(case), balances=True)
    coming, depth, execute = itertools.cycle(courses), setup.pipeline.depth, Worker.execute
    slow, chance = random.Random(seed).randrange(world.size), random.Random(f"{seed} {world.rank}")

    def decide(planner: Any, minibatch: int, reports: Any) -> Repartition:
        return Repartition(minibatch + 3 * depth + 1, tuple(next(coming)))

    def delayed(worker: Worker, it: Instruction, *others: Any) -> Any:
        if it.op in (Op.FORWARD, Op.BACKWARD) and (world.rank == slow or chance.random() < 0.2):
            time.sleep(0.003 * chance.random())
        return execute(worker, it, *others)

    with patch.object(RepartitionController, "decide", decide), patch.object(Worker, "execute", delayed):
        own_world = replace(world, shares_memory=case.shares_memory)
        engine = DistributedEngine(replace(setup, device=world.device), own_world, unwatched(setup))
        engine.start_clock()
        made = []
        for index, count in enumerate(case.segments):
            engine.train(sum(case.segments[:index]), count)
            made.append([(move.at, [*move.starts]) for move in moves_of(engine).take_decisions()])
    tensors = [{n: t.detach().clone() for n, t in r.tensors().items()} for r in engine.worker.replicas.values()]
    engine.close()
    return Outcome(engine.worker.index, tensors, [], [], {}, [], []), made


def killed(world: World, case: Case, victim: int) -> str:
    """Train until a worker is killed; return the others' error messages."""
    setup = small_setup(case)
    engine = DistributedEngine(setup, replace(world, shares_memory=case.shares_memory), unwatched(setup))
    engine.start_clock()
    seen = [0]

    def on_unit(samples: int, loss: float, clock_s: float) -> None:
        seen[0] += 1
        if seen[0] == 5 and world.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    engine._on_unit = on_unit
    try:
        engine.train(0, 1000)
    except PeerLostError as lost:
        return str(lost)
    return "nothing"
