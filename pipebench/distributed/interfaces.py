"""What connections need of a host: an interface that the other hosts reach, and enough open files.

Gloo binds to the address of the host's own name. On many hosts that is an address of the loopback interface, such as
Debian's and Ubuntu's 127.0.1.1, so other hosts would connect to themselves. On such a host, unless the user has named
an interface, Gloo gets the one by which the host reaches the others.
"""

import fcntl
import os
import resource
import socket
import struct
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import Any

from pipebench.errors import UserError

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # what Gloo and NCCL read
_ADDRESS_OF_INTERFACE = 0x8915  # Linux's SIOCGIFADDR
_ANY_PORT = 9  # nothing is sent
_OPEN_MAX = 10240  # macOS's, which refuses more, though the most that it names is infinite


def prepare_sockets(environ: MutableMapping[str, str], everyone: Sequence[Mapping[str, Any]] | None) -> None:
    """Prepare this process for connections between workers.

    Args:
        environ: environment variables, which may be set.
        everyone: None if all workers are on this host, else as for `choose_interface`.

    Raises:
        UserError: Gloo knows no interface that other hosts reach; says what to set.
    """
    _allow_files()
    if everyone is None:
        _stay_on_loopback(environ)
    else:
        choose_interface(environ, everyone)


def _allow_files() -> None:
    """Raise this process's limit of open files: a group needs one per rank, and a mapped slot one."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limit in (most, max(now, _OPEN_MAX)):
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
            return


def _stay_on_loopback(environ: MutableMapping[str, str]) -> None:
    """Have Gloo and NCCL use the loopback interface, where all workers are on this host."""
    names = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    for variable in INTERFACES:
        if loopback is not None:
            environ.setdefault(variable, loopback)


def address_towards(host: str) -> str:
    """Return this host's IPv4 address on the way to another, by name or number; "" if there is none but loopback's."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect((host, _ANY_PORT))
        own = str(asking.getsockname()[0])
        return "" if own.startswith("127.") else own
    return ""


def choose_interface(environ: MutableMapping[str, str], everyone: Sequence[Mapping[str, Any]]) -> None:
    """Have Gloo use an interface that other hosts reach, if this host's name leads to the loopback interface.

    Args:
        environ: environment variables; Gloo's is set.
        everyone: every rank's `host` and `address`, which is `address_towards` the store, "" if it has none.

    Raises:
        UserError: there is no such interface, or its name can't be found; says what to set.
    """
    gloo, _ = INTERFACES
    is_one_host = len({facts["host"] for facts in everyone}) == 1  # tests start several "hosts" on one
    if gloo in environ or is_one_host or not _names_itself():
        return
    others = [str(facts["address"]) for facts in everyone if facts["address"]]
    own = next((own for own in map(address_towards, others) if own), "")
    name = own and interface_of(own)
    if not name:
        raise UserError(
            f"environment: {gloo}: it isn't set, and this host's name, {socket.gethostname()}, leads to the loopback "
            "interface, by which other hosts don't reach it; set it to the name of the one that they do, as eth0"
        )
    environ[gloo] = name


def interface_of(address: str) -> str:
    """Return the name of the interface with an IPv4 address of this host, "" if none is known to have it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # has no IPv4 address
                found = fcntl.ioctl(asking, _ADDRESS_OF_INTERFACE, struct.pack("256s", os.fsencode(name)[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return ""


def _names_itself() -> bool:
    """Return whether this host's own name leads to the loopback interface."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return True
    address = str(found[0][4][0])
    return address.startswith("127.") or address == "::1"
