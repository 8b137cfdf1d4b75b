"""The processes among which a worker's layers are divided (tensor parallelism): their sums and gathers.

They are neighbours by rank. All of them execute their worker's program, so they call the sums of layers, norms and
optimizers in the same order. Each has connections of its own to its counterpart of every other worker.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from pipebench.distributed.launch_join import leave, peers
from pipebench.distributed.reducer import ServerSum, sum_now
from pipebench.distributed.shared_memory import bytes_of, write
from pipebench.distributed.shared_sum import FULL, PLACE_BYTES, SharedFile, read, share
from pipebench.distributed.world import World
from pipebench.engine.setup import Setup
from pipebench.model.slice_modules import Slices, side_by_side
from pipebench.simulate.timeline import TENSOR


class ProcessSlices:
    """One of k processes of a worker; a `SliceGroup` once it is connected.

    Processes that compute on the CPUs of one host read each other's tensors in shared memory; others use a process
    group. Tensors without data, on the meta device, are returned unchanged.

    Args:
        size: k.
        rank: this process's index among the k.
    """

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = size, rank
        self._counts = False
        self._group: Any = None
        self._shared: SharedFile | None = None
        self._host_copy = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "ProcessSlices":
        """Return this object: copies of layers have the same neighbours."""
        return self

    def connect(self, world: World, level: str, num_bytes: Counter[tuple[str, str]]) -> None:
        """Connect with the worker's other processes; all processes call it.

        Methods raise `PeerLostError` if another process is gone.

        Args:
            world: all processes.
            level: the cluster level of the links between a worker's processes.
            num_bytes: gets the bytes that this process sends, by kind and level.
        """
        neighbours = [range(first, first + self.size) for first in range(0, world.size, self.size)]
        found = [share(world, ranks, 0) for ranks in neighbours]
        self._shared = next((each for each in found if each is not None), None)
        if self._shared is None:
            self._group = [world.new_group(world.backend, ranks) for ranks in neighbours][world.rank // self.size]
        self._host_copy = world.host_copy
        self._num_bytes, self._key = num_bytes, (TENSOR, level)
        word = torch.zeros(self.size, device=world.device)
        self.sum(word)  # the first use makes connections
        self.gather(word, self.size**2)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the bytes sent inside the context, which is training: the simulation counts these."""
        self._counts = True
        try:
            yield
        finally:
            self._counts = False

    def sum(self, tensor: torch.Tensor, *, counts: bool = True) -> torch.Tensor:
        """Return the sum over all processes, added in their order; see `SliceGroup`."""
        if tensor.is_meta:
            return tensor
        given = self._travelling(tensor)
        if counts and self._counts:
            own = len(given.view(-1).tensor_split(self.size)[self.rank])
            self._num_bytes[self._key] += given.itemsize * (given.numel() - own + (self.size - 1) * own)
        return (self._added(given) if self._shared is None and self.size > 2 else self._read(given)).to(tensor.device)

    def gather(self, piece: torch.Tensor, num_features: int) -> torch.Tensor:
        """Return all processes' pieces side by side; bytes are counted without what pads them to one width."""
        if self._counts and not piece.is_meta:
            self._num_bytes[self._key] += (self.size - 1) * piece.nbytes
        width = math.ceil(num_features / self.size)
        given = torch.nn.functional.pad(piece, (0, width - piece.shape[-1])) if piece.shape[-1] < width else piece
        if piece.is_meta:
            return side_by_side([given] * self.size, num_features)
        return side_by_side((each.to(piece.device) for each in self._all(self._travelling(given))), num_features)

    def close(self) -> None:
        """Disconnect."""
        if self._shared is not None:
            self._shared.close()
        else:
            leave([self._group])

    def _travelling(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor in the form in which it is sent."""
        own = tensor.detach().contiguous()
        return own.cpu() if self._host_copy else own

    def _all(self, given: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the tensors of all processes, in their order."""
        shared = self._shared
        if shared is None:
            found = [torch.empty_like(given) for _ in range(self.size)]
            with peers():
                dist.all_gather(found, given, group=self._group)
            yield from found
            return
        # Two places in turn: a process writes into one when all have read it, since they have written the other one.
        start = shared.num_full % 2 * PLACE_BYTES
        write(shared.file, bytes_of(given), start)
        number = shared.full()
        for position in range(self.size):
            other = given
            if position != self.rank:
                shared.hear(position, FULL, number)
                other = torch.empty_like(given)
                read(shared.files[position], bytes_of(other), start)
            yield other

    def _read(self, given: torch.Tensor) -> torch.Tensor:
        """Return the sum of all tensors, which every process reads."""
        first, *others = self._all(given)
        total = first.clone() if first is given else first
        for other in others:
            total += other
        return total

    def _added(self, given: torch.Tensor) -> torch.Tensor:
        """Return the sum of all tensors. Each process adds up a part, so that it sends less than by `_read`."""
        flat = given.view(-1).clone()
        with peers():
            sum_now(ServerSum(flat, self._group))
        return flat.view(given.shape)


def connected_slices(
    setup: Setup, world: World, num_bytes: Counter[tuple[str, str]]
) -> tuple[ProcessSlices | None, World]:
    """Connect this process with its worker's other ones, if layers are divided.

    Returns:
        The connection, None if layers aren't divided; and the world whose ranks count workers.
    """
    if setup.graph.slices is None:
        return None, world
    group = setup.graph.slices.group
    assert isinstance(group, ProcessSlices)
    group.connect(world, setup.cluster.levels[0].name, num_bytes)
    return group, replace(world, slices=group.size)


def combined(facts: Sequence[dict[str, Any]], world: World) -> dict[str, Any]:
    """Return a worker's facts, from the facts of all processes: bytes sent by all of its own, and the highest peaks."""
    own = facts[world.rank * world.slices :][: world.slices]
    sent: Counter[tuple[str, str]] = Counter()
    for each in own:
        sent.update({(kind, level): count for kind, level, count in each["num_bytes"]})
    most = {name: [*map(max, *(each[name] for each in own))] for name in ("peak_bytes", "host_peak_bytes")}
    return {**own[world.slice_index], **most, "num_bytes": [[*key, count] for key, count in sent.items()]}


def joined(stages: Sequence[Mapping[str, torch.Tensor]], slices: Slices | None) -> list[dict[str, torch.Tensor]]:
    """Return every worker's whole tensors, by name, concatenated from those of its processes."""
    if slices is None:
        return [dict(tensors) for tensors in stages]
    size, cuts = slices.group.size, slices.cuts

    def whole(name: str, parts: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor:
        own = [part[name].detach() for part in parts]
        return torch.cat(own, cuts[name].dimension) if name in cuts else own[0]

    workers = [stages[first : first + size] for first in range(0, len(stages), size)]
    return [{name: whole(name, parts) for name in parts[0]} for parts in workers]
