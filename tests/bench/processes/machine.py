"""What the machine is like with every process busy: the profile and the links that predictions are made from.

Both are measured before anything else is, and never adjusted afterwards.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch
from torch import distributed

from pipebench.cluster import Cluster, Level
from pipebench.distributed.host import host_costs
from pipebench.distributed.shared_memory import SharedReceiver, SharedSender, connect
from pipebench.distributed.world import current
from pipebench.profile.measure import mean_profile, measured_profile
from pipebench.profile.model import Profile
from pipebench.profile.stored import read_profile, write_profile
from pipebench.recipe.schema import EngineRecipe
from pipebench.simulate.costs import HostCosts
from tests.bench.processes import crew
from tests.bench.processes.subject import OPTIMIZER, Subject
from zoo.mnist5k import mnist5k

_SMALL_BYTES, _LARGE_BYTES = 4, 4 << 20
_TRIPS, _WARM_UPS = 200, 10
_PASSES = 21
_ADDS_UP, _TRIES = 0.1, 3


def measure(
    subject: Subject, num_processes: int, sizes: Sequence[int], environment: dict[str, str] | None = None
) -> tuple[Profile, Cluster, HostCosts]:
    """Profile every layer in all processes of a crew at once, what communication costs, and the first two's link.

    Args:
        subject: the model.
        num_processes: as many as a run has.
        sizes: numbers of samples that travel.
        environment: of the crew.

    Returns:
        The mean of the processes' profiles, the processes as a cluster of one level, and what communication takes of
        their processors. Taken again, twice at most, when the layers of a profile don't add up to whole steps:
        something else was running then.
    """
    arguments = {"width": subject.width, "minibatch_size": subject.minibatch_size, "sizes": list(sizes)}
    for _ in range(_TRIES):
        found = crew.run(measure_here, num_processes, arguments, environment=environment)
        profile = mean_profile([read_profile(text) for text, _, _ in found])
        if all(abs(ratio - 1) <= _ADDS_UP for ratio in profile.sum_over_whole.values()):
            break
    _, (bandwidth_bytes_per_s, latency_s), host = found[0]
    level = Level("machine", num_processes, bandwidth_bytes_per_s, latency_s)
    return profile, Cluster("loopback", "local", None, (level,)), HostCosts(*host)


def measure_here(width: float, minibatch_size: int, sizes: list[int]) -> tuple[str, tuple[float, float], list[float]]:
    """Return this process's profile as JSON, (bytes/s, seconds) of a link, and host costs; a job for a crew."""
    subject = Subject(width, minibatch_size)
    link = link_between_first_two()
    distributed.barrier()
    device = torch.device("cpu")
    engine = EngineRecipe(threads=1)
    profile = measured_profile(
        subject.graph(), mnist5k(), sizes, OPTIMIZER, device, str(subject), _PASSES, engine=engine
    )
    distributed.barrier()
    world = current()
    assert world is not None
    return write_profile(profile), link, list(asdict(host_costs(world)).values())


def link_between_first_two() -> tuple[float, float]:
    """Return bandwidth [bytes/s] and latency [s] of messages between ranks 0 and 1, from round trips of two sizes.

    The sizes take turns, and travel as a run's messages do. On ranks that take no part both are 0.
    """
    world = current()
    assert world is not None
    shared = connect(world, [(0, 1), (1, 0)], time.perf_counter)
    if world.rank > 1:
        return 0.0, 0.0
    exchange = _by_sockets() if shared is None else _in_memory(shared[world.rank][0], shared[1 - world.rank][1])
    messages = [torch.zeros(num_bytes, dtype=torch.uint8) for num_bytes in (_SMALL_BYTES, _LARGE_BYTES)]
    trips = [[_trip_s(message, exchange) for message in messages] for _ in range(_WARM_UPS + _TRIPS)][_WARM_UPS:]
    latency_s = statistics.median(small_s for small_s, _ in trips)
    return (_LARGE_BYTES - _SMALL_BYTES) / statistics.median(large_s - small_s for small_s, large_s in trips), latency_s


_Exchange = tuple[Callable[[torch.Tensor], object], Callable[[torch.Tensor], object]]  # what sends, what receives


def _trip_s(message: torch.Tensor, exchange: _Exchange) -> float:
    """Return the seconds of a message one way: half of a round trip."""
    send, receive = exchange
    started = time.perf_counter()
    if distributed.get_rank() == 0:
        send(message)
        receive(message)
    else:
        receive(message)
        send(message)
    return (time.perf_counter() - started) / 2


def _by_sockets() -> _Exchange:
    peer = 1 - distributed.get_rank()
    return lambda message: distributed.send(message, peer), lambda message: distributed.recv(message, peer)


def _in_memory(sender: SharedSender | None, receiver: SharedReceiver | None) -> _Exchange:
    assert sender is not None
    assert receiver is not None
    return lambda message: sender.send(0, message, 0.0), lambda message: receiver.receive(0)
