"""The commands as data: nothing is run."""

from tests.lab.wires import EFFICIENCY, address, building, ends, limiting, unlimiting


def test_two_hosts_are_joined_by_a_cable() -> None:
    assert [" ".join(command) for command in building("lab", 2)] == [
        "ip netns add lab-host0",
        "ip netns add lab-host1",
        "ip link add name eth0 netns lab-host0 type veth peer name eth0 netns lab-host1",
        "ip -n lab-host0 address add 10.77.0.101/24 dev eth0",
        "ip -n lab-host0 link set lo up",
        "ip -n lab-host0 link set eth0 up",
        "ip -n lab-host1 address add 10.77.0.102/24 dev eth0",
        "ip -n lab-host1 link set lo up",
        "ip -n lab-host1 link set eth0 up",
    ]


def test_nothing_is_made_outside_the_namespaces() -> None:
    """Names of interfaces could otherwise collide with somebody's."""
    for num_hosts in (2, 3, 5):
        for command in building("lab", num_hosts):
            inside = command[:2] == ("ip", "-n") or command[1] == "netns" or command.count("netns") == 2
            assert inside, command


def test_a_wire_is_limited_at_both_ends() -> None:
    assert ends("lab", 2, 1) == (("lab-host1", "eth0"), ("lab-host0", "eth0"))
    assert ends("lab", 3, 1) == (("lab-host1", "eth0"), ("lab-switch", "port1"))
    commands = [" ".join(command) for command in limiting("lab", 3, 1, 1.25e8)]
    assert commands[1].startswith(
        "tc -n lab-host1 qdisc replace dev eth0 root tbf rate 1000000000bit burst 62500 limit "
    )
    assert commands[3].startswith("tc -n lab-switch qdisc replace dev port1 root tbf rate 1000000000bit burst 62500 ")
    assert [command[2] for command in unlimiting("lab", 3, 1)] == ["lab-host1", "lab-switch"]


def test_a_piece_fits_into_the_bucket_as_frames() -> None:
    """A larger one would be cut up by the kernel, frame by frame, which takes of the processors that compute."""
    for bits in (1e6, 2e7, 1e8, 1e9, 2.5e9, 1e10, 1e11):
        size, shape = limiting("lab", 2, 0, bits / 8)[:2]
        piece_bytes, burst_bytes = int(size[-1]), int(shape[shape.index("burst") + 1])
        frames = -(-piece_bytes // 1448)
        assert piece_bytes + 66 * frames <= burst_bytes
        assert 1448 < piece_bytes <= 65536


def test_addresses_sort_as_hosts_do() -> None:
    """Torchrun numbers its nodes by them, as text."""
    addresses = [address(index) for index in range(64)]
    assert addresses == sorted(addresses)
    assert len(set(addresses)) == 64
    assert address(63) == "10.77.0.164"


def test_the_payload_s_share_of_a_wire() -> None:
    assert round(EFFICIENCY, 4) == 0.9564
