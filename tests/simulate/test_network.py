"""Links: what is on its way at once shares its ports, in order on each connection."""

from functools import partial

import pytest

from pipebench.cluster import Cluster, Level
from pipebench.schedule.syncs import ALL_REDUCE, PARAMETER_SERVER
from pipebench.simulate.network import Message, Network
from pipebench.simulate.timeline import Transfer


def flat(num_workers: int, latency_s: float = 0.0) -> Network:
    """Ports of 1 byte/s."""
    return Network(Cluster("flat", "unit", None, (Level("server", num_workers, 1.0, latency_s),)))


def send(network: Network, sender: int, receiver: int, num_bytes: int, now_s: float = 0.0) -> Message:
    return network.send(network.connection("activation", sender, receiver), num_bytes, now_s)


def reduce(network: Network, workers: range, num_bytes: int, now_s: float, ends: list[float]) -> None:
    network.sum_up(ALL_REDUCE, "all-reduce", "r", workers, num_bytes, now_s, ends.append)


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
    network.agenda.push(1.0, lambda now_s: network.sharing.tell(send(network, 0, 1, 2, now_s), ends.append, now_s))
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
    assert ends == [6 * (4 / 2 + 0.5)]
    assert network.num_bytes == {("all-reduce", "server"): 48, ("all-reduce", "cluster"): 48}


def test_servers_share_their_ports_connection_by_connection() -> None:
    """Of a port that carries three pushes, an activation gets a fourth; a ring's one connection would leave it half."""
    network, ends = flat(4), list[float]()
    network.sum_up(PARAMETER_SERVER, PARAMETER_SERVER, "r", range(4), 40, 0.0, ends.append)
    message = send(network, 0, 1, 2)
    network.agenda.play()
    assert message.arrival_s == 8.0
    # Pushes of 10 bytes: 2 until 8 s at a fourth, the others' ports too, since all go at one pace; 8 more at a third.
    assert ends == [8.0 + 3 * 8 + 3 * 10]


def test_who_observes_is_told_when_transfers_really_began_and_ended() -> None:
    told: list[Transfer] = []
    network = Network(Cluster("flat", "unit", None, (Level("server", 3, 1.0, 0.5),)), observe=told.append)
    first, second = send(network, 0, 1, 4), send(network, 0, 1, 2)
    later = partial(network.sum_up, ALL_REDUCE, "all-reduce", "R0", range(1, 3), 6, done=lambda _: None)
    network.agenda.push(20.0, lambda now_s: later(now_s=now_s))
    network.agenda.play()
    network.arrived(first)
    network.arrived(second)
    assert told == [
        Transfer("all-reduce", "R0", (1, 2), (1, 2), "server", 12, 20.0, 27.0),
        Transfer("activation", "", (0,), (1,), "server", 4, 0.0, 4.5),
        Transfer("activation", "", (0,), (1,), "server", 2, 4.0, 6.5),
    ]
