"""Functions that processes run in tests of the warm-up and of tensors sent apart from their headers; called by name.

Gloo stands in for NCCL, so no GPU is needed. Gloo connects when a group is made, so a first all-reduce that waits for
the others is added; it sends tensors in the host's memory as NCCL does those of a GPU.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pipebench.distributed import channel, reducer, warm_up
from pipebench.distributed import collectives as together
from pipebench.distributed import engine as distributed
from pipebench.distributed.world import World
from pipebench.engine.setup import Setup
from pipebench.engine.worker import Worker
from tests.distributed.cases import Case, Outcome, in_processes, small_setup
from tests.distributed.cases import distributed as run_case
from tests.distributed.zoo_cases import ZooCase
from tests.unwatched import unwatched

_PATIENCE = timedelta(seconds=60)  # only a test that fails waits for so long


class _Connecting:
    """Wraps `torch.distributed`: the first all-reduce of a group and size waits until all members have called.

    So does NCCL, which connects then, even if the call is asynchronous.
    """

    def __init__(self, world: World, name: str) -> None:
        self._world, self._name = world, name
        self.known: set[tuple[tuple[int, ...], int]] = set()  # ranks and elements

    def all_reduce(self, data: torch.Tensor, *, group: Any, async_op: bool = False) -> Any:
        ranks = tuple(dist.get_process_group_ranks(group))
        if (ranks, data.numel()) not in self.known:
            self.known.add((ranks, data.numel()))
            key = f"{self._name}/{ranks}/{data.numel()}"
            self._world.store.set(f"{key}/{self._world.rank}", "here")
            self._world.store.wait([f"{key}/{rank}" for rank in ranks], _PATIENCE)
        return dist.all_reduce(data, group=group, async_op=async_op)

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)


def first_calls_wait(world: World, case: Case, name: str) -> Outcome:
    """Run a case whose groups connect at their first all-reduce, which is not in shared memory."""
    connecting, setup = _Connecting(world, name), small_setup(case)
    with _replaced(reducer, "dist", connecting), _replaced(together, "dist", connecting):
        outcome = in_processes(replace(world, shares_memory=False), setup, case.segments)
    stage = setup.pipeline.stages_of(world.rank)[0]
    buckets = setup.costs.stages[stage].buckets if setup.pipeline.replicas[stage] > 1 else ()
    float_bytes, of_gradients = 4, {num_elements for _, num_elements in connecting.known}
    assert all(bucket.num_bytes // float_bytes in of_gradients for bucket in buckets)
    return outcome


def warmed_up(world: World, cases: Sequence[Case | ZooCase]) -> list[Outcome]:
    """Run cases after a warm-up, as on GPUs, which must not change the random state."""
    found = []
    times = [0]

    def watched(setup: Setup, world: World, own: Worker) -> None:
        torch.default_generator.manual_seed(world.rank)
        before = torch.get_rng_state()
        warm_up.warm_up(setup, world, own)
        assert torch.equal(torch.get_rng_state(), before)
        times[0] += 1

    with _replaced(distributed, "needs_warm_up", lambda setup: True), _replaced(distributed, "warm_up", watched):
        for case in cases:
            if isinstance(case, ZooCase):
                found.append(in_processes(world, case.setup(), case.segments))
            else:
                found.append(run_case(world, case))
    assert times[0] == len(cases)
    return found


def facts_after_a_warm_up(world: World, case: Case) -> list[Any]:
    """Return an engine's counters, measured times and state when its clock starts, without and with a warm-up."""
    found: list[Any] = []
    for gains in (False, True):
        setup = small_setup(case)
        with _replaced(distributed, "needs_warm_up", lambda setup, gains=gains: gains):
            engine = distributed.DistributedEngine(setup, world, unwatched(setup))
        engine.start_clock()
        (replica,) = engine.worker.replicas.values()
        facts = engine.facts()
        del facts["meter"]
        tensors = {name: tensor.detach().clone() for name, tensor in replica.tensors().items()}
        held = (replica.live_bytes(), replica.weights.newest.number, replica.weights.optimizer_state(), replica.states)
        found.append((facts, engine.meter.busy_s, engine.meter.stall_s, held, tensors))
        engine.close()
    return found


class GlooForNccl(World):
    """A world whose tensors are sent apart from their headers, as by NCCL."""

    def new_group(
        self, backend: str, ranks: Sequence[int] | None = None, *, num_pairs: int = 0, limit_s: float | None = None
    ) -> Any:
        return super().new_group("gloo", ranks, limit_s=limit_s)


def directly(world: World, case: Case) -> tuple[Outcome, int]:
    """Run a case whose tensors are sent apart from their headers; return also the largest buffer of a message."""
    values = {each.name: getattr(world, each.name) for each in fields(world)}
    values["direct"] = True
    sizes: list[int] = []
    buffer = channel.ChannelLink.buffer

    def noting(link: channel.ChannelLink, num_bytes: int) -> torch.Tensor:
        sizes.append(num_bytes)
        return buffer(link, num_bytes)

    with _replaced(channel.ChannelLink, "buffer", noting):
        # Processes that share memory send no messages.
        outcome = run_case(GlooForNccl(**values), replace(case, shares_memory=False))
    return outcome, max(sizes, default=0)


@contextmanager
def _replaced(where: Any, name: str, stand_in: Any) -> Iterator[None]:
    before = getattr(where, name)
    setattr(where, name, stand_in)
    try:
        yield
    finally:
        setattr(where, name, before)


def compiled(world: World, case: Case) -> tuple[list[int], dict[str, torch.Tensor], list[Any]]:
    """Train a case, compiled or not; return the graphs compiled at the start and the end, and the trained weights.

    The third value is the engine's state when its clock started.
    """
    graphs: dict[str, int] = torch._dynamo.utils.counters["stats"]
    setup = small_setup(case)
    engine = distributed.DistributedEngine(setup, world, unwatched(setup))
    engine.start_clock()
    (replica,) = engine.worker.replicas.values()
    traces = [replica.gradients, replica.in_flight, replica.weights.newest.number, dict(replica.states)]
    buffers = {name: buffer.clone() for name, buffer in replica.module.named_buffers()}
    counts, done = [graphs["unique_graphs"]], 0
    for count in case.segments:
        done += engine.train(done, count)
    counts.append(graphs["unique_graphs"])
    trained = {name: tensor.detach().clone() for name, tensor in replica.weights.trained().items()}
    engine.close()
    return counts, trained, [traces, buffers]
