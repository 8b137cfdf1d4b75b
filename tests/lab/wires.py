"""The commands that make a lab's hosts and wires, as data.

Two hosts are joined by a cable; more by a switch, which is a bridge in a namespace of its own. Interfaces exist inside
the lab's namespaces only, so their names can't collide with others.

A wire's bandwidth is that of its frames. `tc tbf` counts a full frame as 1514 bytes for 1448 of payload (20 bytes of
IP, 20 of TCP, 12 of TCP's timestamps, 14 of Ethernet), so payload gets 95.6%.
"""

from collections.abc import Sequence

from tests.lab.names import SWITCH, host_name

INTERFACE = "eth0"
NETWORK = "10.77.0"
PAYLOAD_BYTES, FRAME_BYTES = 1448, 1514
EFFICIENCY = PAYLOAD_BYTES / FRAME_BYTES
_FIRST = 101  # last number of host 0's address; of three digits, since torchrun orders hosts by addresses as text
# The token bucket passes this much at once after a pause: half a millisecond of the link, and at least three frames.
_BURST_S, _FEWEST_FRAMES = 5e-4, 3
_MOST_SEGMENTED_BYTES = 65536  # largest piece that the kernel hands a link
# More than all connections of a run may have in flight (6 MB each by Linux's default), so that nothing is dropped.
_QUEUE_BYTES = 256 << 20

Command = tuple[str, ...]


def address(index: int) -> str:
    return f"{NETWORK}.{_FIRST + index}"


def building(lab: str, num_hosts: int) -> list[Command]:
    """Return the commands that make a lab of two or more hosts, whose wires have no limit."""
    hosts = [f"{lab}-{host_name(index)}" for index in range(num_hosts)]
    commands: list[Command] = [("ip", "netns", "add", host) for host in hosts]
    if num_hosts == 2:
        commands.append(_cable(hosts[0], INTERFACE, hosts[1], INTERFACE))
    else:
        switch = f"{lab}-{SWITCH}"
        commands += [
            ("ip", "netns", "add", switch),
            ("ip", "-n", switch, "link", "add", "bridge", "type", "bridge"),
            ("ip", "-n", switch, "link", "set", "bridge", "up"),
        ]
        for index, host in enumerate(hosts):
            port = _port(index)
            commands.append(_cable(host, INTERFACE, switch, port))
            commands.append(("ip", "-n", switch, "link", "set", port, "master", "bridge", "up"))
    for index, host in enumerate(hosts):
        commands += [
            ("ip", "-n", host, "address", "add", f"{address(index)}/24", "dev", INTERFACE),
            ("ip", "-n", host, "link", "set", "lo", "up"),
            ("ip", "-n", host, "link", "set", INTERFACE, "up"),
        ]
    return commands


def limiting(lab: str, num_hosts: int, index: int, bandwidth_bytes_per_s: float) -> list[Command]:
    """Return the commands that set or change the bandwidth of a host's wire, in each direction."""
    burst_bytes = round(max(_BURST_S * bandwidth_bytes_per_s, _FEWEST_FRAMES * FRAME_BYTES))
    # `tc tbf` would split pieces whose frames exceed the bucket, which takes CPU time: the kernel shall make none.
    piece_bytes = min(_MOST_SEGMENTED_BYTES, round(burst_bytes * EFFICIENCY) - FRAME_BYTES // 2)
    commands: list[Command] = []
    for namespace, interface in ends(lab, num_hosts, index):
        size = ("gso_max_size", str(piece_bytes))
        commands.append(("ip", "-n", namespace, "link", "set", "dev", interface, *size))
        rate = ("rate", f"{round(8 * bandwidth_bytes_per_s)}bit")
        shape = ("tbf", *rate, "burst", str(burst_bytes), "limit", str(_QUEUE_BYTES))
        commands.append(("tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", *shape))
    return commands


def unlimiting(lab: str, num_hosts: int, index: int) -> list[Command]:
    """Return the commands that remove the limit of a host's wire."""
    return [
        ("tc", "-n", namespace, "qdisc", "delete", "dev", interface, "root")
        for namespace, interface in ends(lab, num_hosts, index)
    ]


def switching(lab: str, index: int, state: str) -> list[Command]:
    """Return the command that disconnects a host's wire (`state` is `down`) or connects it again (`up`)."""
    return [("ip", "-n", f"{lab}-{host_name(index)}", "link", "set", INTERFACE, state)]


def ends(lab: str, num_hosts: int, index: int) -> Sequence[tuple[str, str]]:
    """Return namespace and interface of both ends of a host's wire, the host's own first."""
    host = f"{lab}-{host_name(index)}"
    if num_hosts > 2:
        return (host, INTERFACE), (f"{lab}-{SWITCH}", _port(index))
    return (host, INTERFACE), (f"{lab}-{host_name(1 - index)}", INTERFACE)


def _cable(first: str, interface: str, second: str, other: str) -> Command:
    ours = ("ip", "link", "add", "name", interface, "netns", first)
    return (*ours, "type", "veth", "peer", "name", other, "netns", second)


def _port(index: int) -> str:
    return f"port{index}"
