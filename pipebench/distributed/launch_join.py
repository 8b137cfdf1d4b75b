"""How workers find each other: their place in the job, the shared store, and a handshake that proves all are alive.

Under torchrun the store outlives the workers. After a restart it still has the keys that dead workers have set. So
every worker sets a newly drawn word, which only a living rank 0 answers.
"""

import contextlib
import errno
import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined] # torch lists them nowhere

from pipebench.distributed.private_store import PrivateStore
from pipebench.errors import PipebenchError, UserError

ATTEMPT, RUN = "PIPEBENCH_ATTEMPT", "PIPEBENCH_RUN"
STORE = "PIPEBENCH_STORE"  # file descriptor of a connection to the launcher's store
_POLL_S, _RETRY_S = 0.02, 0.2  # between two looks into the store, and two attempts to connect to it
# The others wait this much longer than rank 0, so that its message arrives.
_SLACK_S = 5.0


class PeerLostError(PipebenchError):
    """Another worker is gone or doesn't answer; the cause is elsewhere."""


class HostLostError(PipebenchError):
    """A worker of another host is gone and can't report itself; the cause, as far as known here."""


# What messages of Gloo, NCCL and torch's stores say, in lower case, when a peer or the store is gone.
_LOST = (
    *("connection closed", "connection reset", "connection refused", "connection was likely closed", "broken pipe"),
    *("timed out", "timeout", "no route to host", "network is unreachable"),
    *("remote process exited", "communicator was aborted", "ncclremoteerror"),
    "nccl operation failed",  # torch 2.15 says no more at a wait, once a group's communicator has failed
)


def lost(error: BaseException) -> bool:
    """Return whether an error only means that another worker or the store is gone, by its class and torch's message."""
    if isinstance(error, PeerLostError | dist.DistNetworkError | dist.DistStoreError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    is_torchs = isinstance(error, dist.DistBackendError) or any(word in text for word in ("gloo", "nccl", "c10d"))
    return is_torchs and any(words in text for words in _LOST)


@contextlib.contextmanager
def peers() -> Iterator[None]:
    """Turn torch's errors about a lost worker into `PeerLostError`."""
    try:
        yield
    except PeerLostError:
        raise
    except Exception as error:
        if lost(error):
            # Gloo's message begins with a place in its source and ends with advice.
            sentence = re.sub(r"^\[\S+:\d+\] |\. This is typically .*", "", str(error).splitlines()[0])
            raise PeerLostError(f"lost a peer: {sentence}") from error
        raise


def leave(groups: Iterable[Any]) -> None:
    """Destroy process groups: each Gloo group has a thread that wakes a hundred times a second."""
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


@dataclass(frozen=True)
class HostSlot:
    """A worker's place in the job, from its launcher's environment variables."""

    rank: int  # 0 to size - 1, over all hosts
    size: int  # number of workers over all hosts
    local_rank: int  # 0 to local_size - 1, on this host
    local_size: int  # number of workers on this host
    address: str  # host that serves the store; "" for the store of `pipebench run`, which has no address
    port: int  # of the store; 0 for the store of `pipebench run`
    agent_store: bool  # whether a launcher serves the store, rather than rank 0
    attempt: int | None  # number of restarts; None if another program than `pipebench run` is the launcher
    connection: int | None = None  # file descriptor of a connection to the store, if `pipebench run` serves it

    @property
    def store_text(self) -> str:
        """The store's address, to end a sentence."""
        return f"{self.address}:{self.port}" if self.connection is None else "the launcher's store"

    @property
    def one_host(self) -> bool:
        """Whether all workers are on this host."""
        return self.local_size == self.size


def read_place(environ: Mapping[str, str]) -> HostSlot:
    """Read a worker's place from its environment; raises a UserError that names a variable that is missing or wrong."""

    def number(name: str, low: int, high: int, default: int | None = None) -> int:
        text = environ.get(name, "" if default is None else str(default))
        if text.isdecimal() and low <= int(text) <= high:
            return int(text)
        given = f"got {text!r}" if name in environ else "it isn't set"
        allowed = f"a whole number from {low} to {high}"
        raise UserError(f"environment: {name}: {given}, allowed is {allowed}; torchrun sets it for every worker")

    most = 2**16 - 1
    size = number("WORLD_SIZE", 1, most)
    rank = number("RANK", 0, size - 1)
    attempt = number(ATTEMPT, 0, most) if ATTEMPT in environ else None
    connection = number(STORE, 0, most) if STORE in environ else None
    address = environ.get("MASTER_ADDR", "") if connection is None else ""
    if connection is None and not address:
        raise UserError("environment: MASTER_ADDR: it isn't set; torchrun sets it for every worker")
    return HostSlot(
        rank=rank,
        size=size,
        # By default each worker is alone on its host, as `srun python` starts one per node.
        local_rank=number("LOCAL_RANK", 0, most, 0),
        local_size=number("LOCAL_WORLD_SIZE", 1, size, 1),
        address=address,
        port=number("MASTER_PORT", 1, most) if connection is None else 0,
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=attempt,
        connection=connection,
    )


def serve(address: str, port: int = 0, limit_s: float = 60.0, *, one_host: bool = True) -> TCPStore:
    """Serve a store for one host on one address only (torch's server always listens everywhere).

    Args:
        address: name or number of an interface of this host, such as 127.0.0.1.
        port: 0 takes a free one, see the store's `port`.
        limit_s: timeout of the store's waiting calls, seconds.
        one_host: whether all workers are on this host. If not, the server listens on all interfaces: many hosts map
            their own name to the loopback interface, which others can't reach.

    Raises:
        UserError: the address isn't this host's, or the port is in use.
    """
    try:
        family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        if one_host:
            listener = socket.create_server(where[:2], family=family, backlog=2048)
        elif socket.has_dualstack_ipv6():
            listener = socket.create_server(("", port), family=socket.AF_INET6, backlog=2048, dualstack_ipv6=True)
        else:
            listener = socket.create_server(("", port), backlog=2048)
        # Connect once here, because torch's own client below prints pages about a failed attempt.
        socket.create_connection((address, listener.getsockname()[1]), timeout=limit_s).close()
    except OSError as error:
        reason = error.strerror or str(error)  # a timeout has the latter alone
        if isinstance(error.errno, int) and error.errno > 0:  # of the system, not of a name server
            reason = os.strerror(error.errno)
        hint = "; give another MASTER_PORT, or end what uses it" if error.errno == errno.EADDRINUSE else ""
        raise UserError(f"can't serve the workers' store on {address}:{port}: {reason}{hint}") from None
    return TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        timeout=timedelta(seconds=limit_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def connect(place: HostSlot, limit_s: float) -> Store:
    """Return a connection to the job's store; serve the store if no launcher does and this is rank 0.

    The store of `pipebench run` is reached by an inherited connection (see `private_store.py`), torch's by an address.

    Raises:
        UserError: nothing answers at the address within `limit_s` seconds, another program does, or the port is in use.
    """
    if place.connection is not None:
        os.set_inheritable(place.connection, False)
        store = PrivateStore(Connection(place.connection))
        store.set_timeout(timedelta(seconds=limit_s))
        return store
    if place.rank == 0 and not place.agent_store:
        return serve(place.address, place.port, limit_s, one_host=place.one_host)
    until_s = time.monotonic() + limit_s
    # torch's client prints pages about every failed attempt, so try a plain connection first.
    while True:
        try:
            socket.create_connection((place.address, place.port), timeout=max(0.1, until_s - time.monotonic())).close()
            break
        except OSError as error:
            if time.monotonic() > until_s:
                raise UserError(
                    f"rank {place.rank} of {place.size}: nothing answers at {place.address}:{place.port} after "
                    f"{limit_s:g} s ({error.strerror or error}); is rank 0 running, and can this host reach it?"
                ) from None
            time.sleep(_RETRY_S)
    return _client(place, limit_s)


def _client(place: HostSlot, limit_s: float) -> TCPStore:
    """Return a connection to what answers at the store's address; raises a UserError if that isn't a store.

    torch's client waits without a limit for the first bytes of a store. So it runs in a thread, which is left behind if
    they don't come.
    """
    made, failed = list[TCPStore](), list[str]()

    def greet() -> None:
        try:
            made.append(TCPStore(
                place.address, place.port, is_master=False, timeout=timedelta(seconds=limit_s), wait_for_workers=False
            ))  # fmt: skip
        except RuntimeError as error:
            failed.append(f" ({str(error).splitlines()[0]})")

    greeting = threading.Thread(target=greet, name="pipebench-greeting", daemon=True)
    greeting.start()
    greeting.join(limit_s)
    if not made:
        raise UserError(
            f"rank {place.rank} of {place.size}: what answers at {place.address}:{place.port} isn't the workers' "
            f"store{''.join(failed)}: rank 0 may have ended, or another program may have the port; give another "
            "MASTER_PORT, or end what uses it"
        )
    return made[0]


def meet(store: Store, place: HostSlot, facts: Any, limit_s: float) -> tuple[str, list[Any]]:
    """Wait until all workers of this attempt have joined, and exchange facts.

    Args:
        store: the job's; it may have keys of earlier attempts.
        place: this worker's.
        facts: what the other workers are to know of this one, as JSON data.
        limit_s: seconds for which rank 0 waits for the last worker.

    Returns:
        The prefix of this attempt's keys in the store, and every worker's facts, by rank.

    Raises:
        UserError: on rank 0: workers are missing, with their ranks, or have another WORLD_SIZE.
        PeerLostError: on the others: rank 0 gave up, or never joined.
    """
    room = PrefixStore("pipebench/join", store)
    with peers():
        return _gather(room, place, facts, limit_s) if place.rank == 0 else _attend(room, place, facts, limit_s)


def prefix(attempt: int) -> str:
    """Return the prefix of keys in an attempt of pipebench's own launcher."""
    return f"attempt-{attempt}"


def _gather(room: Store, place: HostSlot, facts: Any, limit_s: float) -> tuple[str, list[Any]]:
    """Do rank 0's part of `meet`.

    A worker sets `hello/RANK` to its word. Rank 0 answers in `welcome/WORD` with the attempt's token, a new prefix. The
    worker sets `TOKEN/here/RANK` to its WORLD_SIZE and facts. When all have, rank 0 sets `TOKEN/go` to all facts.
    """
    token = uuid.uuid4().hex if place.attempt is None else prefix(place.attempt)
    joined: dict[int, Any] = {0: facts}  # facts by rank
    answered: dict[int, bytes] = {}  # latest word by rank
    until_s = time.monotonic() + limit_s
    while len(joined) < place.size:
        for rank in sorted({*range(place.size)} - {*joined}):
            if room.check([f"{token}/here/{rank}"]):
                size, joined[rank] = json.loads(room.get(f"{token}/here/{rank}"))
                if size != place.size:
                    got = f"got {place.size} for rank 0 and {size} for rank {rank}"
                    raise _refusal(room, token, f"environment: WORLD_SIZE: {got}, needed is the same for all ranks")
            elif room.check([f"hello/{rank}"]) and (word := room.get(f"hello/{rank}")) != answered.get(rank):
                answered[rank] = word
                room.set(f"welcome/{word.decode()}", token)
        if len(joined) < place.size and time.monotonic() > until_s:
            raise _refusal(room, token, _incomplete(place, sorted({*range(place.size)} - {*joined}), limit_s))
        time.sleep(_POLL_S)
    everyone = [joined[rank] for rank in range(place.size)]
    room.set(f"{token}/go", json.dumps(everyone))
    return token, everyone


def _refusal(room: Store, token: str, sentence: str) -> UserError:
    """Let the workers that have joined know why rank 0 gives up; return the error."""
    room.set(f"{token}/failed", sentence)
    return UserError(sentence)


def _incomplete(place: HostSlot, missing: Sequence[int], limit_s: float) -> str:
    ranks = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    return (
        f"{place.size - len(missing)} of {place.size} workers joined at {place.store_text} within "
        f"{limit_s:g} s (engine.join_limit_s); missing: rank{'s' if len(missing) > 1 else ''} {ranks}"
    )


def _attend(room: Store, place: HostSlot, facts: Any, limit_s: float) -> tuple[str, list[Any]]:
    """Do another rank's part of `meet`; see `_gather`."""
    word = uuid.uuid4().hex
    room.set(f"hello/{place.rank}", word)
    token = _first_of(room, [f"welcome/{word}"], limit_s + _SLACK_S, place).decode()
    room.set(f"{token}/here/{place.rank}", json.dumps([place.size, facts]))
    everyone = _first_of(room, [f"{token}/go", f"{token}/failed"], limit_s + _SLACK_S, place)
    if room.check([f"{token}/failed"]):
        raise PeerLostError(everyone.decode())
    return token, json.loads(everyone)


def _first_of(room: Store, keys: Sequence[str], limit_s: float, place: HostSlot) -> bytes:
    """Wait for one of several keys, and return its value; `Store.wait` would print pages on a timeout."""
    until_s = time.monotonic() + limit_s
    while time.monotonic() < until_s:
        for key in keys:
            if room.check([key]):
                return bytes(room.get(key))
        time.sleep(_POLL_S)
    raise PeerLostError(f"rank {place.rank}: rank 0 doesn't answer at {place.store_text}")
