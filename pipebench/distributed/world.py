"""One worker's view of the others: who they are, how to reach them, and facts that all share.

Methods are collective unless stated otherwise: all workers call them, in the same order. A collective call raises
`PeerLostError` if a worker is gone, or doesn't call within `operation_limit_s`.
"""

import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store  # type: ignore[attr-defined] # torch lists them nowhere

from pipebench.distributed import nccl
from pipebench.distributed.interfaces import address_towards, prepare_sockets
from pipebench.distributed.launch_join import HostSlot, connect, meet, peers, read_place
from pipebench.distributed.launch_mistake import found_none
from pipebench.distributed.members import check_members, shared_secret
from pipebench.errors import UserError

# Worlds that this process has joined; the last one is current. torch, too, has one default group per process.
_joined: list["World"] = []
_POLL_S = 0.02  # between two looks into the store
FOR_EVER_S = 90 * 24 * 3600.0  # limit of what may wait as long as the run lasts; Gloo's overflow beyond
_ASKING_S = 2.0  # for which a rank 0 that serves the store lets the others ask


@dataclass
class World:
    """The workers of a run that has been joined."""

    place: HostSlot  # rank, size and host of this worker, from its launcher
    device: torch.device  # of this worker
    direct: bool  # whether tensors on devices travel by NCCL, rather than by Gloo through the CPU's memory
    store: Store  # of small keys, shared by all workers of this attempt and pipebench's own launcher
    operation_limit_s: float  # limit of a message or collective, seconds; a peer that takes longer counts as lost
    connection: Store  # that `store` uses; on rank 0 it is the server if no launcher serves. Referenced to stay alive
    remark: str = ""  # for the user, on how workers reach each other; "" for none
    shares_memory: bool = True  # whether workers of one host may share memory, rather than use sockets
    secret: bytes | None = None  # that all workers know, if the store is private; None: members can't be checked
    # Processes that each worker's layers are divided among, neighbours by rank. If there are several, ranks and sizes
    # count workers, and this process exchanges values with the one of the same `slice_index` of every other worker.
    slices: int = 1
    _num_groups: int = 0
    _gathered: Iterator[int] = field(default_factory=count)
    _closed: bool = False

    @property
    def rank(self) -> int:
        """This worker's rank, over all hosts."""
        return self.place.rank // self.slices

    @property
    def size(self) -> int:
        """Number of workers, over all hosts."""
        return self.place.size // self.slices

    @property
    def backend(self) -> str:
        """The backend of groups that exchange tensors."""
        return "nccl" if self.direct else "gloo"

    @property
    def host_copy(self) -> bool:
        """Whether tensors on a GPU travel through the host's memory."""
        return self.device.type == "cuda" and not self.direct

    @property
    def slice_index(self) -> int:
        """Which of its worker's processes this is."""
        return self.place.rank % self.slices

    def process(self, rank: int) -> int:
        """Return the rank among all processes of a worker's process with this one's `slice_index`."""
        return rank * self.slices + self.slice_index

    def exchange(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank; values are JSON data: lists, dicts with text keys, numbers, text."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        with peers():
            sizes = [torch.zeros(1, dtype=torch.long) for _ in range(self.place.size)]
            dist.all_gather(sizes, torch.tensor([len(data)]))
            longest = int(max(sizes))
            rows = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.place.size)]
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(data)] = data
            dist.all_gather(rows, padded)
        counterparts = slice(self.slice_index, None, self.slices)
        pairs = zip(rows[counterparts], sizes[counterparts], strict=True)
        return [json.loads(row[: int(size)].numpy().tobytes()) for row, size in pairs]

    def gather(self, own: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """Return all ranks' tensors on rank 0, in its host's memory; nothing on the others."""
        described = [
            [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in own.items()
        ]
        own_on_host = {name: tensor.detach().cpu() for name, tensor in own.items()} if self.rank == 0 else {}
        found: list[dict[str, torch.Tensor]] = [own_on_host]
        for rank, rows in enumerate(self.exchange(described)):
            if rank == 0 or self.rank not in (0, rank):
                continue
            with peers():
                if self.rank == rank:
                    for tensor in own.values():
                        dist.send(tensor.detach().cpu().contiguous(), self.process(0))
                else:
                    received = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in rows}
                    for tensor in received.values():
                        dist.recv(tensor, self.process(rank))
                    found.append(received)
        return found if self.rank == 0 else []

    def gathering(self) -> Callable[[Any], list[Any]]:
        """Return a function that gathers a value of every process on the first process, and returns [] on the others.

        It may be called in any thread, equally often by all processes. Only the first one waits. Values are JSON data.
        """
        store = self.store.clone()  # a connection of its own, whose waits hold up no other use of the store
        store.set_timeout(timedelta(days=365))

        def gather(value: Any) -> list[Any]:
            number = next(self._gathered)
            keys, own = [f"gathered/{number}/{rank}" for rank in range(self.place.size)], self.place.rank
            with peers():
                store.set(keys[own], json.dumps(value))
                # Polled, because `store.wait` hung once although all keys were set.
                while own == 0 and not store.check(keys):
                    time.sleep(_POLL_S)
                found = store.multi_get(keys) if own == 0 else []
                for key in keys if found else ():
                    store.set(key, "")  # the private store can't delete
            return [json.loads(each) for each in found]

        return gather

    def hand_over(self, parcels: Mapping[int, bytes]) -> dict[int, bytes]:
        """Send bytes to ranks, through the hosts' memory; return the bytes sent to this rank, by sender.

        Args:
            parcels: bytes by the rank that receives them.
        """
        sizes = self.exchange([len(parcels.get(rank, b"")) for rank in range(self.size)])
        given: dict[int, bytes] = {}
        for sender, row in enumerate(sizes):  # in the same order on all ranks, so that no cycle of waits arises
            for receiver, size in enumerate(row):
                if size == 0 or self.rank not in (sender, receiver):
                    continue
                with peers():
                    if self.rank == sender:
                        parcel = torch.frombuffer(bytearray(parcels[receiver]), dtype=torch.uint8)
                        dist.send(parcel, self.process(receiver))
                    else:
                        arriving = torch.empty(size, dtype=torch.uint8)
                        dist.recv(arriving, self.process(sender))
                        given[sender] = arriving.numpy().tobytes()
        return given

    def barrier(self) -> None:
        """Wait for all workers."""
        self.exchange(None)

    def new_group(
        self, backend: str, ranks: Sequence[int] | None = None, *, num_pairs: int = 0, limit_s: float | None = None
    ) -> Any:
        """Return a new process group; ranks outside it call this method, too, and get torch's placeholder.

        A run's operations use such groups. The default group is for `exchange`, `gather`, `hand_over` and set-up only
        (`check_members`, warm-up), whose operations therefore never mix with the run's.

        Args:
            backend: "gloo" or "nccl".
            ranks: members; None for all.
            num_pairs: for a group of a sender and a receiver, the largest number of such groups of any worker; else 0.
            limit_s: limit of an operation, seconds; None for `operation_limit_s`.
        """
        limit = timedelta(seconds=limit_s or self.operation_limit_s)
        options = nccl.pair_options(limit, num_pairs) if num_pairs and backend == "nccl" else None
        members = range(self.size) if ranks is None else ranks
        # Making a group is collective over all processes, so each makes those of every slice.
        by_slice = [[rank * self.slices + index for rank in members] for index in range(self.slices)]
        return [self._group(backend, processes, limit, options) for processes in by_slice][self.slice_index]

    def _group(self, backend: str, processes: Sequence[int], limit: timedelta, options: Any) -> Any:
        with peers():
            group: Any = dist.new_group(list(processes), timeout=limit, backend=backend, pg_options=options)
            self._num_groups += 1
            if group is dist.GroupMember.NON_GROUP_MEMBER:
                return group
            if options is not None:
                group._enable_collectives_timing()  # see `DirectSends`
            if backend == "gloo" and self.secret is not None:
                check_members(self.secret, f"group {self._num_groups}", group)
            return group

    def mark_started(self) -> None:
        """Report to the launcher that training has begun here, so that failures are worth a restart; not collective."""
        with peers():
            self.store.set(f"started/{self.place.rank}", "1")

    def first(self, event: str, patience_s: float = 0.0) -> bool:
        """Return whether this is the first worker to ask about an event, such as a report that is to be printed once.

        Not collective. If the store's server is gone, every worker counts as the first. So a rank 0 that serves the
        store waits for up to `_ASKING_S` until the others have asked.

        Args:
            event: its name.
            patience_s: seconds for which this worker lets others ask before it does.
        """
        key, patient_until_s = f"first/{event}", time.monotonic() + patience_s
        try:
            while time.monotonic() < patient_until_s and not self.store.check([key]):
                time.sleep(_POLL_S)
            is_first = int(self.store.add(key, 1)) == 1
            until_s = time.monotonic() + _ASKING_S
            while self.rank == 0 and not self.place.agent_store and time.monotonic() < until_s:
                if int(self.store.add(key, 0)) >= self.size:
                    break
                time.sleep(_POLL_S)
        except RuntimeError:
            return True
        return is_first

    def close(self) -> None:
        """Leave the groups, once. All workers call it, except after a failure."""
        if not self._closed:
            self._closed = True
            dist.destroy_process_group()


def join(
    device: str,
    *,
    limit_s: float,
    operation_limit_s: float = 1800.0,
    place: HostSlot | None = None,
    shares_memory: bool = True,
    met: Callable[["World"], None] = lambda world: None,
) -> World:
    """Join the other workers of this job.

    Args:
        device: `cpu`, `cuda`, or `auto`, which is `cuda` if torch sees a device.
        limit_s: seconds that workers have to join.
        operation_limit_s: see `World`.
        place: this worker's place, by default from the environment.
        shares_memory: see `World`.
        met: called with the world when all workers are there, before groups are made.

    Raises:
        UserError: a requested CUDA device is missing, a port is in use, or workers don't join; says how many did.
        PeerLostError: rank 0 gave up, and reports why itself.
    """
    place = place or read_place(os.environ)
    chosen, facts = _device(device, place)
    connection = connect(place, limit_s)
    found_none(connection, place)
    token, everyone = meet(connection, place, facts, limit_s)
    direct = chosen.type == "cuda" and nccl.takes(everyone)
    remark = "" if direct or chosen.type == "cpu" else nccl.sharing_remark(everyone)
    store = PrefixStore(token, connection)
    world = World(place, chosen, direct, store, operation_limit_s, connection, remark, shares_memory)
    _joined.append(world)
    check_devices(device, everyone)
    prepare_sockets(os.environ, None if place.one_host else everyone)
    met(world)
    with peers():
        _init_default_group(world)
    return world


def _init_default_group(world: World) -> None:
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if world.direct else "gloo",
        store=_group_store(world),
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=world.operation_limit_s),
        device_id=world.device if world.direct else None,
    )
    if world.place.connection is not None:
        world.secret = shared_secret(world.store, world.rank)
        check_members(world.secret, "all")


def _group_store(world: World) -> Store:
    """Return the store by which torch makes groups.

    NCCL's threads use the store as long as they live, which may be longer than Python's objects live. So NCCL doesn't
    get pipebench's own store, but torch's file store, on a file in memory that only this user's processes can open. It
    lasts until rank 0 ends.
    """
    if not world.direct or world.place.connection is None:
        return PrefixStore("groups", world.store)
    if world.rank == 0:
        world.store.set("group-file", f"/proc/{os.getpid()}/fd/{os.memfd_create('pipebench-groups')}")
    return FileStore(world.store.get("group-file").decode(), -1)


def current() -> World | None:
    """Return the world that this process joined last, or None."""
    return _joined[-1] if _joined else None


def check_world_size(size: int, needed: int, plan: str, slices: int = 1) -> None:
    """Check that the number of processes is the plan's.

    Args:
        size: number of processes.
        needed: number that the plan needs.
        plan: its notation, such as `2-1-1`.
        slices: processes per worker.

    Raises:
        UserError: the numbers differ.
    """
    if size != needed:
        of = "" if slices == 1 else f" of {slices} slices"
        raise UserError(
            f"plan {plan}{of} needs {needed} worker{'s' if needed > 1 else ''}, got {size}: start torchrun so that "
            f"--nnodes times --nproc-per-node is {needed}, or choose cluster.servers and parallelism.plan for {size}"
        )


def shared_folder_check(world: World, folder: Path) -> None:
    """Check that all workers see the same folder, by a file that rank 0 writes into it, and that all can write there.

    Raises:
        UserError: names the ranks and hosts that don't see the file or can't write, and why.
    """
    token = folder / f".shared-{uuid.uuid4().hex}"
    name, problem = world.exchange([token.name, _writing_problem(token) if world.rank == 0 else ""])[0]
    if problem:
        raise UserError(f"{folder}: can't be written: {problem}")
    # Listing the folder refreshes a network file system's cache of missing files.
    sees = folder.is_dir() and name in os.listdir(folder)
    own = folder / f"{name}-{world.rank}"
    problem = _writing_problem(own) if sees else ""
    if sees and not problem:
        own.unlink()
    answers = world.exchange({"sees": sees, "problem": problem, "host": socket.gethostname()})
    if world.rank == 0:
        token.unlink()
    blind = [(rank, answer["host"]) for rank, answer in enumerate(answers) if not answer["sees"]]
    if blind:
        raise UserError(
            f"{folder}: {len(blind)} of {world.size} workers don't see what rank 0 writes there ({_who(blind)}); "
            "start on every host in one working directory that all hosts share"
        )
    barred = [(rank, f"{each['host']}: {each['problem']}") for rank, each in enumerate(answers) if each["problem"]]
    if barred:
        raise UserError(
            f"{folder}: {len(barred)} of {world.size} workers can't write there ({_who(barred)}); all write their "
            "parts of checkpoints"
        )


def _writing_problem(path: Path) -> str:
    """Write a file, in a folder that may be new; return why it can't be written, "" if it can."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.name)
    except OSError as error:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        return error.strerror or str(error)
    return ""


def _device(device: str, place: HostSlot) -> tuple[torch.device, dict[str, Any]]:
    """Set NCCL's variables; return this worker's device, and facts about it for the others."""
    if device != "cpu":
        nccl.set_environment(os.environ, place.rank)
    address = "" if place.one_host else address_towards(place.address)
    facts: dict[str, Any] = {"host": socket.gethostname(), "address": address, "gpu": None}
    if device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu"), facts
    chosen = torch.device("cuda", place.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(chosen)
    gpu = str(torch.cuda.get_device_properties(chosen).uuid)
    return chosen, {**facts, "gpu": gpu, "shares": nccl.shares(os.environ)}


def check_devices(device: str, everyone: Sequence[dict[str, Any]]) -> None:
    """Check that all workers have a CUDA device if one is requested.

    Args:
        device: as for `join`.
        everyone: every rank's facts: `host`, and `gpu`, which is None if torch sees none.

    Raises:
        UserError: on every worker, after all have joined; so it is reported once.
    """
    without = [(rank, facts["host"]) for rank, facts in enumerate(everyone) if facts["gpu"] is None]
    if device == "cpu" or not without or (device == "auto" and len(without) == len(everyone)):
        return
    raise UserError(
        f"engine.device: got {device}, and {len(without)} of {len(everyone)} workers see no CUDA device "
        f"({_who(without)}); allowed are cpu, or cuda where every worker has one"
    )


def _who(workers: Sequence[tuple[int, str]]) -> str:
    named = ", ".join(f"rank {rank} on {host}" for rank, host in workers[:4])
    return named + (", ..." if len(workers) > 4 else "")
