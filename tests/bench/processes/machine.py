"""What the machine is like with every process busy: the profile and the links that predictions are made from.

Both are measured before anything else is, and never adjusted afterwards.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import distributed

from pipebench.cluster import Cluster, Level
from pipebench.profile.measure import measured_profile
from pipebench.profile.model import LayerProfile, Profile
from tests.bench.processes import crew
from tests.bench.processes.subject import OPTIMIZER, Subject
from zoo.mnist5k import mnist5k

_SMALL_BYTES, _LARGE_BYTES = 4, 4 << 20
_TRIPS, _WARM_UPS = 200, 10
_PASSES = 21
_ADDS_UP, _TRIES = 0.1, 3


def measure(
    subject: Subject, num_processes: int, sizes: Sequence[int], environment: dict[str, str] | None = None
) -> tuple[Profile, Cluster]:
    """Profile every layer in all processes of a crew at once, and time the links between its first two.

    Args:
        subject: the model.
        num_processes: as many as a run has.
        sizes: numbers of samples that travel.
        environment: of the crew.

    Returns:
        The mean of the processes' profiles, and the processes as a cluster of one level. Taken again, twice at most,
        when the layers of a profile don't add up to whole steps: something else was running then.
    """
    arguments = {"width": subject.width, "minibatch_size": subject.minibatch_size, "sizes": list(sizes)}
    for _ in range(_TRIES):
        found = crew.run(measure_here, num_processes, arguments, environment=environment)
        profile = mean_profile([Profile.from_json(text) for text, _ in found])
        if all(abs(ratio - 1) <= _ADDS_UP for ratio in profile.sum_over_whole.values()):
            break
    _, (bandwidth_bytes_per_s, latency_s) = found[0]
    level = Level("machine", num_processes, bandwidth_bytes_per_s, latency_s)
    return profile, Cluster("loopback", "local", None, (level,))


def measure_here(width: float, minibatch_size: int, sizes: list[int]) -> tuple[str, tuple[float, float]]:
    """Return this process's profile as JSON, and (bytes/s, seconds) of a link; a job for a crew."""
    subject = Subject(width, minibatch_size)
    link = link_between_first_two()
    distributed.barrier()
    device = torch.device("cpu")
    profile = measured_profile(subject.graph(), mnist5k(), sizes, OPTIMIZER, device, str(subject), _PASSES)
    distributed.barrier()
    return profile.to_json(), link


def link_between_first_two() -> tuple[float, float]:
    """Return bandwidth [bytes/s] and latency [s] of messages between ranks 0 and 1, from round trips of two sizes.

    The sizes take turns. On ranks that take no part both are 0.
    """
    if distributed.get_rank() > 1:
        return 0.0, 0.0
    messages = [torch.zeros(num_bytes, dtype=torch.uint8) for num_bytes in (_SMALL_BYTES, _LARGE_BYTES)]
    trips = [[_trip_s(message) for message in messages] for _ in range(_WARM_UPS + _TRIPS)][_WARM_UPS:]
    latency_s = statistics.median(small_s for small_s, _ in trips)
    return (_LARGE_BYTES - _SMALL_BYTES) / statistics.median(large_s - small_s for small_s, large_s in trips), latency_s


def mean_profile(profiles: Sequence[Profile]) -> Profile:
    """Return the mean times of several processes' profiles of one model."""
    first, count = profiles[0], len(profiles)

    def mean(values: Sequence[float]) -> float:
        return sum(values) / count

    def row(rows: Sequence[LayerProfile]) -> LayerProfile:
        return replace(
            rows[0],
            forward_s=mean([row.forward_s for row in rows]),
            backward_s=mean([row.backward_s for row in rows]),
        )

    layers = {
        size: tuple(row(rows) for rows in zip(*(p.layers[size] for p in profiles), strict=True))
        for size in first.layers
    }
    return replace(
        first,
        note=f"mean of {count} processes at once, in each the {first.note}",
        layers=layers,
        update_s_per_byte=mean([p.update_s_per_byte for p in profiles]),
        update_floor_s=mean([p.update_floor_s for p in profiles]),
        load_s={size: mean([p.load_s[size] for p in profiles]) for size in first.load_s},
        whole_step_s={size: mean([p.whole_step_s[size] for p in profiles]) for size in first.whole_step_s},
    )


def _trip_s(message: torch.Tensor) -> float:
    """Return the seconds of a message one way: half of a round trip."""
    started = time.perf_counter()
    if distributed.get_rank() == 0:
        distributed.send(message, 1)
        distributed.recv(message, 1)
    else:
        distributed.recv(message, 0)
        distributed.send(message, 0)
    return (time.perf_counter() - started) / 2
