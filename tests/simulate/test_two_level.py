"""All-reduces in two levels, and messages that travel through hosts: times, bytes and weights."""

from dataclasses import replace

import pytest
import torch

from pipebench.cluster import TWO_LEVEL, Cluster, Level
from pipebench.schedule.pipeline import Pipeline, chain
from pipebench.schedule.syncs import ALL_REDUCE
from pipebench.simulate.network import Network
from tests.models import SkipNet
from tests.oracles.two_level import sent_bytes
from tests.simulate.test_simulate import compute, simulate, stage
from tests.support import Blobs, make_engine, make_setup, parameters_of

LEVELS = (Level("server", 4, 100.0, 0.125), Level("cluster", 3, 10.0, 0.5))
NESTED = Cluster("nested", "unit", None, LEVELS, TWO_LEVEL)


def summed(cluster: Cluster, devices: tuple[int, ...], num_bytes: int) -> tuple[float, Network]:
    network, ends = Network(cluster, devices), list[float]()
    network.sum_up(network.group(ALL_REDUCE, ALL_REDUCE, range(len(devices))), "r", num_bytes, 0.0, ends.append)
    network.agenda.play()
    return ends[0], network


@pytest.mark.parametrize("num_elements", [1, 7, 100])
@pytest.mark.parametrize("devices", [(0, 1, 4, 5), (0, 1, 2, 4), (0, 4, 8), (1, 2, 3), (0, 1, 2, 3, 4, 8, 9), (7, 0)])
def test_bytes_equal_the_oracle_s(devices: tuple[int, ...], num_elements: int) -> None:
    _, network = summed(NESTED, devices, 4 * num_elements)
    expected = sent_bytes([device // 4 for device in devices], num_elements)
    found = {kind_and_level[1] == "cluster": sent for kind_and_level, sent in (+network.num_bytes).items()}
    assert found == expected
    assert sum(found.values()) == 2 * (len(devices) - 1) * 4 * num_elements, "as many as a ring sends"


def test_the_time_is_the_sum_of_three_phases() -> None:
    """3 servers of 4, 1200 bytes: 3 steps of 300 inside, 2 x 2 steps of a third between servers, 3 steps inside."""
    inside_s, between_s = 3 * (300 / 100 + 0.125), 4 * (400 / 10 + 0.5)
    found, _ = summed(NESTED, tuple(range(12)), 1200)
    assert found == pytest.approx(inside_s + between_s + inside_s)
    ring, _ = summed(replace(NESTED, all_reduce="ring"), tuple(range(12)), 1200)
    fast, slow = 22 - 2 * 3, 2 * 3  # hops of a chunk that twice makes all but one fast hop of 9 fast and 3 slow ones
    assert ring == pytest.approx(22 * 100 / 10 + fast * 0.125 + slow * 0.5), "a latency per hop, not the slowest's"


def test_servers_of_two_sum_inside_first() -> None:
    """2 servers of 2, 120 bytes: a step of 60 inside, 2 steps of a half of it between servers, a step inside."""
    inside_s, between_s = 60 / 100 + 0.125, 2 * (60 / 10 + 0.5)
    found, _ = summed(NESTED, (0, 1, 4, 5), 120)
    assert found == pytest.approx(inside_s + between_s + inside_s)


def test_servers_of_different_sizes_wait_for_the_largest() -> None:
    inside_s, between_s = 2 * (40 / 100 + 0.125), 2 * (60 / 10 + 0.5)
    found, _ = summed(NESTED, (0, 1, 2, 4), 120)
    assert found == pytest.approx(inside_s + between_s + inside_s)


def test_inside_one_server_it_is_the_ring() -> None:
    assert summed(NESTED, (0, 1, 2), 120)[0] == summed(replace(NESTED, all_reduce="ring"), (0, 1, 2), 120)[0]


@pytest.mark.parametrize("replicas", [[4, 1], [3, 2]], ids=str)
def test_an_engine_sums_in_two_levels(replicas: list[int]) -> None:
    """Weights equal a ring's up to the order of additions; bytes equal the prediction, level by level."""
    levels = (Level("server", 2, 1e6, 1e-3), Level("cluster", 3, 1e5, 1e-3))
    cluster = Cluster("nested", "unit", None, levels, TWO_LEVEL)
    engines = []
    for each in (cluster, replace(cluster, all_reduce="ring")):
        setup = make_setup(SkipNet(), ([4], replicas), dataset=Blobs(num_train=48), cluster=each)
        engine = make_engine(setup)
        engine.train(0, 12)
        engine.evaluate()
        engines.append(engine)
    two, ring = engines
    assert two.num_bytes == two.network.num_bytes
    assert two.num_bytes["all-reduce", "cluster"] < ring.num_bytes["all-reduce", "cluster"]
    assert sum(two.num_bytes.values()) == sum(ring.num_bytes.values())
    for name, parameter in parameters_of(two).items():
        torch.testing.assert_close(parameter, parameters_of(ring)[name], rtol=1e-12, atol=1e-13)


def test_messages_through_hosts_occupy_both_ends() -> None:
    """20 bytes: 2 s from the device to its host, 0.2 + 0.5 s on the link, 2 s to the other device, and back alike."""
    level = Level("server", 2, 100.0, 0.5, host_copy_bytes_per_s=10.0)
    cluster = Cluster("staged", "unit", None, (level,))
    events, _ = simulate(Pipeline((1, 1), chain(2), "1f1b", True, 1), 1, [stage()] * 2, 20, cluster)
    there_s = 1 + 2 + 0.7 + 2
    assert [start_s for _, start_s, _ in compute(events, 1)][:2] == [pytest.approx(there_s), pytest.approx(there_s + 1)]
    assert [start_s for _, start_s, _ in compute(events, 0)][1] == pytest.approx(there_s + 3 + 4.7)
    sends = [event.end_s - event.start_s for event in events if "SEND" in event.instruction.op.name]
    assert sends == [pytest.approx(2.0)] * 2
