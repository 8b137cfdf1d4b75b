"""The processor time that communication takes from computation, measured by all processes of a run at once.

Messages cost copies, system calls and time of Gloo's threads. A loop of matrix products runs with and without messages
or an all-reduce. The difference in processor time, over all threads of a process, is the cost.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from pipebench.distributed.channel import LANES, ChannelLink, ChannelSender, Receiver
from pipebench.distributed.cores import processor_shares, shared_processors, turns_of
from pipebench.distributed.ends import ReceivingEnd, SendingEnd
from pipebench.distributed.launch_join import leave, peers
from pipebench.distributed.reducer import RingSum, Sum
from pipebench.distributed.shared_memory import connect
from pipebench.distributed.shared_sum import SharedSum, share
from pipebench.distributed.world import World
from pipebench.engine.in_situ import InSituTimes, least_bytes, profile_in_situ
from pipebench.engine.setup import Setup
from pipebench.errors import is_out_of_memory, print_notice
from pipebench.formats import num_bytes
from pipebench.model.allocator import release_copies
from pipebench.model.host_memory import available_bytes
from pipebench.simulate.costs import NO_HOST_COSTS, HostCosts, SharedProcessors

_SMALL_BYTES, _LARGE_BYTES, _RING_BYTES = 1 << 14, 1 << 20, 1 << 22  # of two messages and an all-reduce
_ITERATIONS, _REPEATS = 8, 7
_WORK_S = 8e-3  # of one iteration: longer than a large message takes over loopback
_TAG = 64
_MOST_LEAVING = 4  # messages under way, so that buffers are reused
T = TypeVar("T")


def host_costs(world: World, *, fetches: bool = False) -> HostCosts:
    """Measure the costs of communication on hosts; all processes call it.

    A single process has none, nor have GPUs; the result says how GPUs are shared.

    Args:
        world: the processes.
        fetches: whether workers fetch their inputs themselves.
    """
    if world.size == 1:
        return NO_HOST_COSTS
    shared = _shared(world)
    if world.device.type != "cpu":
        return HostCosts(shared=shared)
    work = _work()
    groups = [world.new_group("gloo") for _ in range(2 * LANES + 1)]
    small_s = _beside(world, work, _messages(world, groups[:LANES], _SMALL_BYTES))
    large_s = _beside(world, work, _messages(world, groups[LANES:-1], _LARGE_BYTES))
    ring_s = _beside(world, work, _all_reduces(world, groups[-1]))
    world.barrier()
    leave(groups)
    per_byte_s = max(0.0, large_s - small_s) / (_LARGE_BYTES - _SMALL_BYTES)
    sent_bytes = _RING_BYTES * 2 * (world.size - 1) / world.size
    # An iteration sends a message and receives one: two ends.
    message_s = max(0.0, small_s - per_byte_s * _SMALL_BYTES) / 2
    return HostCosts(message_s, per_byte_s / 2, ring_s / sent_bytes, fetches, shared)


def in_turns(world: World, work: Callable[[], T]) -> T:
    """Do some work in all processes, in turns so that each has cores, or a GPU, of its own; return its result."""
    turns = turns_of(world.exchange(processor_shares(world.device)))
    result: list[T] = []
    for turn in range(max(turns) + 1):
        world.barrier()
        if turn == turns[world.rank]:
            result.append(work())
    world.barrier()
    return result[0]


def in_situ(world: World, setup: Setup, measure: Callable[..., InSituTimes] = profile_in_situ) -> InSituTimes:
    """Measure how long a worker's instructions take in use, by `profile_in_situ`; all processes call it.

    Processes on CPUs compute at the same time. On shared cores the clock counts the thread's processor time, so it
    leaves out waits for a core, but includes the other processes' effect on caches. GPUs have no such clock, so
    processes that share one take turns.

    Returns:
        Times of this process's instructions; none if its stage doesn't fit on a shared GPU beside the others, or if
        some host has too little memory for its processes.
    """
    if world.device.type == "cpu":
        if not all(world.exchange(_fits_on_host(world, setup))):
            return {}
        now = time.perf_counter if _shared(world) is None else time.thread_time
        return measure(setup, lambda enough: all(world.exchange(enough)), now)

    def measured_alone() -> InSituTimes:
        try:
            return measure(setup, lambda enough: enough)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return {}
        finally:
            release_copies(world.device, setup.graph.root)  # also if it didn't fit, because others are next

    return in_turns(world, measured_alone)


def _fits_on_host(world: World, setup: Setup) -> bool:
    """Return whether this host may have the memory for all its processes to measure at once; else print that."""
    needed, available = least_bytes(setup) * world.place.local_size, available_bytes()
    if needed <= available:
        return True
    if world.place.local_rank == 0:
        print_notice(
            f"stages aren't measured in use: gradients and optimizer state of {world.place.local_size} processes take "
            f"{num_bytes(needed)}, and this host has {num_bytes(available)} left; predictions add up single layers"
        )
    return False


def _shared(world: World) -> SharedProcessors | None:
    return shared_processors(world.exchange(processor_shares(world.device)))


def _work() -> Callable[[], None]:
    """Return a function that takes about `_WORK_S`."""
    matrix, result = torch.ones(192, 192), torch.empty(192, 192)

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(matrix, matrix, out=result)

    multiply(20)
    start_s = time.perf_counter()
    multiply(200)
    times = max(1, round(_WORK_S / (time.perf_counter() - start_s) * 200))
    return lambda: multiply(times)


_Pass = tuple[Callable[[], None], Callable[[], None]]  # begin and end of an iteration's communication


def _beside(world: World, work: Callable[[], None], communication: _Pass) -> float:
    """Return the processor seconds that communication adds to an iteration: the mean of the processes' medians."""

    def timed(begin: Callable[[], None], end: Callable[[], None]) -> float:
        world.barrier()
        start_s = time.process_time()
        for _ in range(_ITERATIONS):
            begin()
            work()
            end()
        return (time.process_time() - start_s) / _ITERATIONS

    def nothing() -> None:
        pass

    timed(*communication)
    differences = [timed(*communication) - timed(nothing, nothing) for _ in range(_REPEATS)]
    return max(0.0, statistics.fmean(world.exchange(statistics.median(differences))))


def _messages(world: World, lanes: Sequence[Any], num_bytes: int) -> _Pass:
    """Return functions that send a message to the next rank, and receive the previous rank's last message but one."""
    sender, receiver = _ends(world, lanes, num_bytes)
    values = {0: torch.zeros(num_bytes // 4)}
    receiver.expect((1 + _REPEATS) * _ITERATIONS)
    unit = -1

    def begin() -> None:
        nonlocal unit
        unit += 1
        sender.send(unit, values, 0.0, _MOST_LEAVING)

    def end() -> None:
        if unit > 0:
            receiver.receive(unit - 1)

    return begin, end


def _ends(world: World, lanes: Sequence[Any], num_bytes: int) -> tuple[SendingEnd, ReceivingEnd]:
    """Return the ends of channels to the next rank and from the previous, as in a run."""
    to, back = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    shared = connect(world, [(rank, (rank + 1) % world.size) for rank in range(world.size)], time.perf_counter)
    if shared is None:
        links = [ChannelLink(rank, lanes, _TAG, None, world.device, time.perf_counter) for rank in (to, back)]
        return ChannelSender(links[0], num_bytes), Receiver(links[1], num_bytes)
    sender, receiver = shared[world.rank][0], shared[back][1]
    assert sender is not None
    assert receiver is not None
    return sender, receiver


def _all_reduces(world: World, group: Any) -> _Pass:
    """Return functions that copy gradients into a bucket and start its all-reduce, and wait for it."""
    gradients = torch.zeros(_RING_BYTES // 4)
    shared = share(world, range(world.size), _RING_BYTES)
    total: Sum
    if shared is None:
        total = RingSum(torch.zeros_like(gradients), group)
    else:
        total = SharedSum(len(gradients), gradients.dtype, shared, 0, 1)

    def begin() -> None:
        total.free()
        total.data.copy_(gradients)
        total.start()

    def end() -> None:
        with peers():
            total.go_on()
            total.wait()

    return begin, end
