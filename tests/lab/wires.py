"""The commands that make a lab's hosts and wires, as data: what root would type, in order.

Two hosts share a cable; more hang on a switch, a bridge in a namespace of its own. Names of interfaces exist inside
namespaces only, so they can't collide with anybody's.

A wire's bandwidth is that of its frames. `tc tbf` counts a frame with its Ethernet header, 1514 bytes for 1448 of
payload where packets are full (40 bytes of IP and TCP, 12 of TCP's timestamps, 14 of Ethernet): payload gets 95.6%.
"""

from collections.abc import Sequence

from tests.lab.names import SWITCH, host_name

INTERFACE = "eth0"
NETWORK = "10.77.0"
PAYLOAD_BYTES, FRAME_BYTES = 1448, 1514
EFFICIENCY = PAYLOAD_BYTES / FRAME_BYTES
_FIRST = 101  # three digits each: addresses sort as hosts do, and torchrun numbers its nodes by them
# A bucket of tokens lets so much pass at once after a pause: half a millisecond of the link, but three full frames.
_BURST_S, _FEWEST_FRAMES = 5e-4, 3
_MOST_SEGMENTED_BYTES = 65536  # what the kernel hands a link in one piece
# More than all of a run's connections may have on their way (6 MB each by Linux's default): nothing is ever dropped.
_QUEUE_BYTES = 256 << 20

Command = tuple[str, ...]


def address(index: int) -> str:
    return f"{NETWORK}.{_FIRST + index}"


def building(lab: str, num_hosts: int) -> list[Command]:
    """Return the commands that make a lab of two or more hosts, whose wires are as fast as the kernel copies."""
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
    """Return the commands that give a host's wire a bandwidth, both ways; `replace` serves the first time too."""
    burst_bytes = round(max(_BURST_S * bandwidth_bytes_per_s, _FEWEST_FRAMES * FRAME_BYTES))
    # A piece that is more than the bucket once it is frames would be cut up there: let the kernel make none.
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
    """Return the commands that take a limited wire's limit away."""
    return [
        ("tc", "-n", namespace, "qdisc", "delete", "dev", interface, "root")
        for namespace, interface in ends(lab, num_hosts, index)
    ]


def switching(lab: str, index: int, state: str) -> list[Command]:
    """Return the command that pulls a host's plug (`down`), so that nothing passes either way, or puts it back."""
    return [("ip", "-n", f"{lab}-{host_name(index)}", "link", "set", INTERFACE, state)]


def ends(lab: str, num_hosts: int, index: int) -> Sequence[tuple[str, str]]:
    """Return namespace and interface of the two ends of a host's wire: what the host sends, what it is sent."""
    host = f"{lab}-{host_name(index)}"
    if num_hosts > 2:
        return (host, INTERFACE), (f"{lab}-{SWITCH}", _port(index))
    return (host, INTERFACE), (f"{lab}-{host_name(1 - index)}", INTERFACE)


def _cable(first: str, interface: str, second: str, other: str) -> Command:
    ours = ("ip", "link", "add", "name", interface, "netns", first)
    return (*ours, "type", "veth", "peer", "name", other, "netns", second)


def _port(index: int) -> str:
    return f"port{index}"
