"""Measures the machine with every process busy, for predictions.

Everything is measured before any comparison and never adjusted afterwards: a profile of every layer; profiles in situ
(`pipebench.engine.in_situ`), with the model cut where the profile balances, by order of work and number of
microbatches; the link between two processes; and the CPU time of communication.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import distributed

from pipebench.cluster import Cluster, Level
from pipebench.distributed.host import host_costs, in_situ, in_turns
from pipebench.distributed.shared_memory import SharedReceiver, SharedSender, connect
from pipebench.distributed.world import World, current
from pipebench.engine.in_situ import entries, in_use, mean, profile_in_situ
from pipebench.model.rounded_data import RoundedData
from pipebench.profile.enough import StopRule
from pipebench.profile.measure import mean_profile, measured_profile
from pipebench.profile.model import Profile
from pipebench.profile.request import ProfileRequest
from pipebench.profile.stored import read_profile, write_profile
from pipebench.simulate.costs import NO_HOST_COSTS, HostCosts
from pipebench.typed_json import read
from pipebench.zoo.registry import Dataset
from tests.bench.processes import workers
from tests.bench.processes.subject import OPTIMIZER, Case, Subject, cut_at, make_setup

_SMALL_BYTES, _LARGE_BYTES = 4, 4 << 20
_TRIPS, _WARM_UPS = 200, 10
_ADDS_UP, _TRIES = 0.1, 3  # largest relative difference of layers' sum and whole steps, and measurements until then
_MICROBATCHES = (1, 2, 4, 8)
_UNUSED = (1e9, 1e-6)  # bytes/s and s of the link of a single process, which sends nothing


@dataclass(frozen=True)
class Machine:
    """The measurements of a machine."""

    profile: Profile  # of every layer at every size that travels
    in_use: Mapping[tuple[str, int], Profile]  # profiles in situ, by mode and microbatches
    cluster: Cluster  # the processes, with the link between two of them
    host: HostCosts = NO_HOST_COSTS  # CPU time that communication takes

    def profile_of(self, case: Case) -> Profile:
        """Return the profile in situ of a case; for a mode that wasn't profiled, that of 1F1B."""
        known = (case.mode, "pipedream", "pipedream-flush") if case.starts else (case.mode, "dp")
        found = (self.in_use.get((mode, case.microbatches)) for mode in known)
        return next(filter(None, found), self.profile)


def sizes(subject: Subject, num_processes: int = 2) -> list[int]:
    """Return the sizes of microbatches in any case of `num_processes`."""
    return [subject.minibatch_size // count for count in _MICROBATCHES[: None if num_processes > 1 else 1]]


def _rounded(subject: Subject) -> Dataset:
    """Return the data in the precision that the layers compute in."""
    rounding = subject.graph().rounding
    return subject.data() if rounding is None else RoundedData(subject.data(), rounding.low_type)


def measure(subject: Subject, num_processes: int, environment: dict[str, str] | None = None) -> Machine:
    """Measure in all processes at once, and the link between the first two; return the mean over processes.

    If the layers of the profile don't add up to whole steps, other programs have disturbed the measurement, and it is
    repeated, at most twice.
    """
    arguments = {"subject": asdict(subject)}
    for _ in range(_TRIES):
        found = workers.run(measure_here, num_processes, arguments, environment=environment, device=subject.device)[0]
        profile = read_profile(found["profile"])
        if all(abs(ratio - 1) <= _ADDS_UP for ratio in profile.sum_over_whole.values()):
            break
    used = {(mode, microbatches): read_profile(text) for mode, microbatches, text in found["in_use"]}
    cluster = Cluster("loopback", "local", None, (Level("machine", num_processes, *found["link"]),))
    return Machine(profile, used, cluster, read(HostCosts, found["host"]))


def measure_here(subject: dict[str, Any]) -> dict[str, Any]:
    """Return the measurements of all processes together, as JSON can hold them; a job for workers."""
    model = Subject(**subject)
    world = current()
    assert world is not None
    link = link_between_first_two()
    world.barrier()
    request = ProfileRequest(model.graph(), _rounded(model), sizes(model, world.size), OPTIMIZER, str(model))
    mine = in_turns(world, partial(measured_profile, request, world.device, engine=model.engine))
    profile = mean_profile([read_profile(text) for text in world.exchange(write_profile(mine))])
    host = host_costs(world, fetches=True)
    return {
        "profile": write_profile(profile),
        # Only where runs profile in situ, too.
        "in_use": _in_use(model, profile, world) if model.device == "cpu" or host.shared else [],
        "link": link,
        "host": asdict(host),
    }


def _in_use(subject: Subject, profile: Profile, world: World) -> list[tuple[str, int, str]]:
    """Return the profiles in situ, as JSON, with mode and microbatches."""
    cluster = Cluster("alone", "local", None, (Level("machine", 2, 1e9, 1e-6),))
    cut = cut_at(profile, subject.minibatch_size)
    cases = [Case("dp", (), (2,)), Case("pipedream", (cut,), (1, 1))] if world.size > 1 else [Case("single", (), (1,))]
    cases += [
        Case(mode, (cut,), (1, 1), microbatches=count)
        for mode in ("gpipe", "pipedream-flush")
        for count in _MICROBATCHES[1 if world.size > 1 else len(_MICROBATCHES) :]
    ]
    setups = [make_setup(subject, case, profile, cluster) for case in cases]
    measure = partial(profile_in_situ, rule=StopRule(most=3))
    found = [world.exchange(entries(in_situ(world, setup, measure))) for setup in setups]
    if not all(map(all, found)):  # the model didn't fit on some GPU
        return []
    used = [in_use(profile, setup, mean(times)) for setup, times in zip(setups, found, strict=True)]
    return [(case.mode, case.microbatches, write_profile(each)) for case, each in zip(cases, used, strict=True)]


def link_between_first_two() -> tuple[float, float]:
    """Return bandwidth [bytes/s] and latency [s] of messages between ranks 0 and 1, from round trips of two sizes.

    The sizes alternate, and messages take the same way as a run's. On ranks above 1 both are 0.
    """
    world = current()
    assert world is not None
    if world.size == 1:
        return _UNUSED
    group = world.new_group("nccl", [0, 1]) if world.direct else None
    shared = None if world.device.type == "cuda" else connect(world, [(0, 1), (1, 0)], time.perf_counter)
    if world.rank > 1:
        return 0.0, 0.0
    exchange = _by_group(group) if shared is None else _in_memory(shared[world.rank][0], shared[1 - world.rank][1])
    place = world.device if world.direct else None
    messages = [torch.zeros(num_bytes, dtype=torch.uint8, device=place) for num_bytes in (_SMALL_BYTES, _LARGE_BYTES)]
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
    workers.wait_for_device()
    return (time.perf_counter() - started) / 2


def _by_group(group: Any) -> _Exchange:
    peer = 1 - distributed.get_rank()
    return lambda it: distributed.send(it, peer, group), lambda it: distributed.recv(it, peer, group)


def _in_memory(sender: SharedSender | None, receiver: SharedReceiver | None) -> _Exchange:
    assert sender is not None
    assert receiver is not None
    return lambda message: sender.send(0, message, 0.0), lambda message: receiver.receive(0)
