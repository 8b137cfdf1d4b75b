"""Ports: who waits for whom."""

from pipebench.cluster import Cluster, Level
from pipebench.simulate.network import Network


def test_a_transfer_that_waits_for_its_receiver_leaves_its_own_port_to_shorter_ones() -> None:
    network = Network(Cluster("flat", "unit", None, (Level("server", 4, 1.0, 0.0),)))
    assert network.send("activation", "a", 1, 2, 10, 0.0) == 10.0
    assert network.send("activation", "b", 0, 2, 5, 0.0) == 15.0  # worker 2 receives until 10
    assert network.send("activation", "c", 0, 3, 6, 0.0) == 6.0  # worker 0 has nothing to do until then
    assert network.send("activation", "d", 0, 3, 6, 0.0) == 21.0  # would not be done before b starts


def test_an_all_reduce_waits_for_all_its_ports_and_stops_nobody_until_it_starts() -> None:
    network = Network(Cluster("flat", "unit", None, (Level("server", 3, 1.0, 0.0),)))
    assert network.send("activation", "a", 0, 1, 8, 0.0) == 8.0
    assert network.all_reduce("all-reduce", "r", range(3), 12, 0.0) == 24.0  # 2 * 2 steps of 4 bytes
    assert network.send("activation", "b", 1, 2, 8, 0.0) == 8.0
    assert network.send("activation", "c", 2, 0, 9, 0.0) == 33.0
