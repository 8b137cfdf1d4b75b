"""Links: concurrent messages share ports, and those of a connection stay in order."""

from collections.abc import Sequence
from typing import Any

import pytest

from pipebench.cluster import Cluster, Level
from pipebench.schedule.syncs import ALL_REDUCE, ALL_TO_ALL, ORDERED, PARAMETER_SERVER, REDUCE_SCATTER, RING
from pipebench.simulate.network import Message, Network
from pipebench.simulate.sums import faster_sums
from pipebench.simulate.timeline import Transfer


def flat(num_workers: int, latency_s: float = 0.0) -> Network:
    return Network(Cluster("flat", "unit", None, (Level("server", num_workers, 1.0, latency_s),)))


def send(network: Network, sender: int, receiver: int, num_bytes: int, now_s: float = 0.0) -> Message:
    return network.send(network.connection("activation", sender, receiver), num_bytes, now_s)


def reduce(network: Network, workers: range, num_bytes: int, now_s: float, ends: list[float]) -> None:
    network.sum_up(network.group(ALL_REDUCE, "all-reduce", workers), "r", num_bytes, now_s, ends.append)


def test_two_messages_through_one_port_get_half_of_it_each() -> None:
    network = flat(4, latency_s=0.5)
    messages = [send(network, 0, 2, 10), send(network, 1, 2, 4), send(network, 3, 1, 3)]
    network.agenda.play()
    assert [message.arrival_s for message in messages] == [14.5, 8.5, 3.5]


def test_messages_of_one_connection_stay_in_order_and_go_one_by_one() -> None:
    network = flat(2)
    messages = [send(network, 0, 1, 10), send(network, 0, 1, 1), send(network, 1, 0, 7)]
    network.agenda.play()
    assert [message.arrival_s for message in messages] == [10.0, 11.0, 7.0], "a port sends and receives at once"


def test_a_large_all_reduce_does_not_keep_a_small_activation_off_its_ports() -> None:
    """The ring alone takes 4 steps of 4 bytes: 16 s. An activation of 2 bytes has half of its ports: 4 s, not 18."""
    network, ends = flat(3), list[float]()
    reduce(network, range(3), 12, 0.0, ends)
    network.agenda.push(1.0, lambda now_s: network.sharing.notify(send(network, 0, 1, 2, now_s), ends.append, now_s))
    network.agenda.play()
    assert ends == [5.0, 18.0], "the ring goes on at half of its pace meanwhile, and loses what the activation took"


def test_sums_of_one_group_follow_each_other_and_those_of_two_groups_share() -> None:
    network, ends = flat(3), list[float]()
    reduce(network, range(2), 4, 0.0, ends)
    reduce(network, range(2), 4, 1.0, ends)
    network.agenda.play()
    assert ends == [4.0, 8.0]
    network, ends = flat(3), list[float]()
    reduce(network, range(2), 4, 0.0, ends)  # over both directions of both ports
    reduce(network, range(1, 3), 4, 0.0, ends)  # shares the ports of worker 1
    network.agenda.play()
    assert ends == [8.0, 8.0]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_ring_alone_takes_its_steps(size: int) -> None:
    network, ends = flat(size, latency_s=0.25), list[float]()
    reduce(network, range(size), 4 * size, 1.0, ends)
    network.agenda.play()
    assert ends == [pytest.approx(1.0 + 2 * (size - 1) * (4 + 0.25))]


def test_a_ring_goes_at_the_pace_of_its_slowest_link() -> None:
    levels = (Level("server", 2, 10.0, 0.125), Level("cluster", 2, 2.0, 0.5))
    network, ends = Network(Cluster("nested", "unit", None, levels)), list[float]()
    reduce(network, range(4), 16, 0.0, ends)
    network.agenda.play()
    hops_s = 2 * (2 * 0.125 + 2 * 0.5) - (0.125 + 0.5)  # twice around, but for two hops in a row
    assert ends == [6 * 4 / 2 + hops_s]
    assert network.num_bytes == {("all-reduce", "server"): 48, ("all-reduce", "cluster"): 48}


def test_devices_of_a_switch_share_only_its_port() -> None:
    """Two servers of two switches of two: everything crosses one level, and shares its ports with nothing else."""
    levels = (Level("switch", 2, 10.0, 0.0), Level("server", 2, 4.0, 0.0), Level("cluster", 2, 1.0, 0.0))
    network = Network(Cluster("switches", "unit", None, levels))
    messages = [send(network, *ends) for ends in ((0, 2, 8), (1, 3, 8), (0, 1, 20), (0, 4, 3))]
    network.agenda.play()
    assert [message.arrival_s for message in messages] == [4.0, 4.0, 2.0, 3.0]


def test_servers_share_their_ports_connection_by_connection() -> None:
    """Of a port that carries three pushes, an activation gets a fourth; a ring's one connection would leave it half."""
    network, ends = flat(4), list[float]()
    network.sum_up(network.group(PARAMETER_SERVER, PARAMETER_SERVER, range(4)), "r", 40, 0.0, ends.append)
    message = send(network, 0, 1, 2)
    network.agenda.play()
    assert message.arrival_s == 8.0
    # Pushes of 10 bytes: 2 until 8 s at a fourth, the others' ports too, since all go at one pace; 8 more at a third.
    assert ends == [8.0 + 3 * 8 + 3 * 10]


def test_observers_get_the_actual_times_of_transfers() -> None:
    observed: list[Transfer] = []
    network = Network(Cluster("flat", "unit", None, (Level("server", 3, 1.0, 0.5),)), observe=observed.append)
    first, second = send(network, 0, 1, 4), send(network, 0, 1, 2)
    group = network.group(ALL_REDUCE, "all-reduce", range(1, 3))
    network.agenda.push(20.0, lambda now_s: network.sum_up(group, "R0", 6, now_s, lambda _: None))
    network.agenda.play()
    network.arrived(first)
    network.arrived(second)
    assert observed == [
        Transfer("all-reduce", "R0", (1, 2), (1, 2), "server", 12, 20.0, 27.0),
        Transfer("activation", "", (0,), (1,), "server", 4, 0.0, 4.5),
        Transfer("activation", "", (0,), (1,), "server", 2, 4.0, 6.5),
    ]


def limited(num_workers: int, **limits: Any) -> Network:
    """Ports of 10 bytes/s whose level limits what one connection, message or sum gets."""
    return Network(Cluster("limited", "unit", None, (Level("server", num_workers, 10.0, 0.5, **limits),)))


@pytest.mark.parametrize(
    ("limits", "message_s", "ring_s", "servers_s"),
    [
        ({}, 6.0, 8.0, 8.0),  # 60 bytes at 10 per second; of 60 among 3 everybody sends 80, to servers side by side
        ({"flow_bytes_per_s": 4.0}, 15.0, 20.0, 10.0),  # each of a port's two connections to servers has 4 of its 10
        ({"ring_bytes_per_s": 5.0}, 6.0, 16.0, 16.0),  # both ways of summing take as much of a port
        ({"p2p_bytes_per_s": 2.0}, 30.0, 8.0, 8.0),
        ({"flow_bytes_per_s": 4.0, "ring_bytes_per_s": 2.0, "p2p_bytes_per_s": 6.0}, 15.0, 40.0, 40.0),
    ],
)
def test_a_single_transfer_has_the_smallest_of_its_limits_and_its_port(
    limits: dict[str, float], message_s: float, ring_s: float, servers_s: float
) -> None:
    network = limited(3, **limits)
    message = send(network, 0, 1, 60)
    network.agenda.play()
    assert message.arrival_s == message_s + 0.5
    for sync, steps, seconds in ((ALL_REDUCE, 4, ring_s), (PARAMETER_SERVER, 2, servers_s)):
        network, ends = limited(3, **limits), list[float]()
        network.sum_up(network.group(sync, sync, range(3)), "r", 60, 0.0, ends.append)
        network.agenda.play()
        assert ends == [pytest.approx(seconds + steps * 0.5)]


@pytest.mark.parametrize(
    ("connections", "values", "seconds"),
    [("per-pair", 3.0, 30.0), ("per-value", 1.0, 30.0), ("per-value", 3.0, 10.0), ("per-value", 8.0, 6.0)],
)
def test_values_with_separate_connections_have_a_limit_each(connections: str, values: float, seconds: float) -> None:
    """60 bytes at 2 per second and connection; eight connections have the port's 10 between them."""
    network = limited(2, p2p_bytes_per_s=2.0, connections=connections)
    message = network.send(network.connection("activation", 0, 1), 60, 0.0, values=values)
    network.agenda.play()
    assert message.arrival_s == seconds + 0.5


def test_two_messages_share_a_port_and_get_no_more_than_their_limit() -> None:
    """Two of 40 bytes at 4 of 10 each; three have a third of the port each, which is less than 4."""
    for count, seconds in ((2, 10.0), (3, 12.0)):
        network = limited(4, flow_bytes_per_s=4.0)
        messages = [send(network, sender, 3, 40) for sender in range(count)]
        network.agenda.play()
        assert [message.arrival_s for message in messages] == [pytest.approx(seconds + 0.5)] * count


def test_a_message_gets_the_bandwidth_that_a_limited_ring_leaves() -> None:
    network, ends = limited(3, ring_bytes_per_s=2.0), list[float]()
    reduce(network, range(3), 12, 0.0, ends)
    message = send(network, 0, 1, 16)
    network.agenda.play()
    assert message.arrival_s == 2.0 + 0.5, "8 of 10, not half"
    assert ends == [16 / 2 + 4 * 0.5], "the ring isn't held up"


def test_a_ring_over_two_levels_goes_at_the_least_limit_or_port_of_either() -> None:
    def ring_s(inside: Level, across: Level) -> float:
        network, ends = Network(Cluster("nested", "unit", None, (inside, across))), list[float]()
        reduce(network, range(4), 16, 0.0, ends)
        network.agenda.play()
        return ends[0]

    free, narrow = Level("server", 2, 10.0, 0.0), Level("cluster", 2, 2.0, 0.0)
    assert ring_s(free, narrow) == 6 * 4 / 2.0
    assert ring_s(Level("server", 2, 10.0, 0.0, ring_bytes_per_s=1.0), narrow) == 6 * 4 / 1.0
    assert ring_s(free, Level("cluster", 2, 2.0, 0.0, flow_bytes_per_s=0.5)) == 6 * 4 / 0.5
    assert ring_s(free, Level("cluster", 2, 2.0, 0.0, p2p_bytes_per_s=0.5)) == 6 * 4 / 2.0


@pytest.mark.parametrize(
    ("levels", "devices", "expected"),
    [
        ([(4, 10.0, {})], range(4), ORDERED),
        ([(7, 10.0, {"flow_bytes_per_s": 3.0})], range(7), ORDERED),
        ([(4, 10.0, {}), (4, 5.0, {})], range(16), RING),
        ([(4, 10.0, {}), (4, 5.0, {})], range(4), ORDERED),
        ([(4, 10.0, {}), (4, 5.0, {})], (0, 5, 10, 15), ORDERED),
        ([(1, 10.0, {}), (4, 5.0, {"ring_bytes_per_s": 2.0})], range(4), ORDERED),
        ([(2, 1.0, {}), (2, 50.0, {})], range(4), ORDERED),
        ([(2, 4.0, {}), (2, 2.0, {"flow_bytes_per_s": 0.3})], range(4), ORDERED),
        ([(8, 9.0, {}), (2, 4.0, {}), (2, 3.0, {"ring_bytes_per_s": 2.0})], (0, 1, 8, 9, 10, 24, 25), RING),
        ([(4, 10.0, {}), (2, 5.0, {})], (3,), ORDERED),
    ],
)  # fmt: skip
def test_shards_are_summed_in_the_faster_way(
    levels: list[tuple[int, float, dict[str, Any]]], devices: Sequence[int], expected: str
) -> None:
    """The one that ends first when each scatters one buffer, without latencies; ordered if both do."""
    cluster = Cluster(
        "c", "unit", None, tuple(Level(f"l{i}", n, rate, 0.0, **own) for i, (n, rate, own) in enumerate(levels))
    )
    ends: dict[str, list[float]] = {RING: [], ALL_TO_ALL: []}
    for way, end in ends.items():
        network = Network(cluster, devices)
        network.sum_up(network.group(way, REDUCE_SCATTER, range(len(devices))), "s", 8400, 0.0, end.append)
        network.agenda.play()
    assert faster_sums(cluster, devices) == expected
    assert (ends[RING][0] < ends[ALL_TO_ALL][0] * (1 - 1e-9)) == (expected == RING)
