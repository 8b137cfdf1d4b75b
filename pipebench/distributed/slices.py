"""The processes that a worker's layers are divided among: sums in their order, and what they gather.

They are neighbours by rank. All of them execute their worker's list, so they meet in one order in what layers, norms
and optimizers sum; every one has its own connections to the same one of other workers' processes.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from pipebench.distributed.launch_join import leave, peers
from pipebench.distributed.reducer import ServerSum
from pipebench.distributed.shared_memory import bytes_of, write
from pipebench.distributed.shared_sum import FULL, PLACE_BYTES, SharedFile, read, share
from pipebench.distributed.world import World
from pipebench.engine.setup import Setup
from pipebench.model.slice_modules import Slices
from pipebench.simulate.timeline import TENSOR


class ProcessSlices:
    """One of k processes of a worker; a `SliceGroup` once it is connected.

    Processes of one host that compute on its CPUs read each other's tensors in shared memory; others use a group of
    processes. Tensors without data, on the meta device, are returned as they are: these are shapes only.
    """

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = size, rank
        self._counts = False
        self._group: Any = None
        self._shared: SharedFile | None = None
        self._host_copy = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "ProcessSlices":
        """Return the same: copies of layers have the same neighbours."""
        return self

    def connect(self, world: World, level: str, num_bytes: Counter[tuple[str, str]]) -> None:
        """Connect with the others, through links of a level; bytes sent by this process are added to `num_bytes`.

        All processes call it, `world` has all. Methods raise `PeerLostError` if another is gone.
        """
        neighbours = [range(first, first + self.size) for first in range(0, world.size, self.size)]
        found = [share(world, ranks, 0) for ranks in neighbours]
        self._shared = next((each for each in found if each is not None), None)
        if self._shared is None:
            backend = "nccl" if world.direct else "gloo"
            self._group = [world.new_group(backend, ranks) for ranks in neighbours][world.rank // self.size]
        self._host_copy = world.device.type == "cuda" and not world.direct
        self._num_bytes, self._key = num_bytes, (TENSOR, level)
        word = torch.zeros(self.size, device=world.device)
        self.sum(word)  # the first use makes connections
        self.gather(word)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count bytes inside: those of training, as the simulation does."""
        self._counts = True
        try:
            yield
        finally:
            self._counts = False

    def sum(self, tensor: torch.Tensor, *, counts: bool = True) -> torch.Tensor:
        """Return the sum over all processes, in their order; see `SliceGroup`."""
        if tensor.is_meta:
            return tensor
        given = self._travelling(tensor)
        if counts and self._counts:
            own = len(given.view(-1).tensor_split(self.size)[self.rank])
            self._num_bytes[self._key] += given.itemsize * (given.numel() - own + (self.size - 1) * own)
        return (self._added(given) if self._shared is None and self.size > 2 else self._read(given)).to(tensor.device)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return all processes' tensors, in their order."""
        if tensor.is_meta:
            return [tensor] * self.size
        given = self._travelling(tensor)
        if self._counts:
            self._num_bytes[self._key] += (self.size - 1) * given.nbytes
        return [each.to(tensor.device) for each in self._all(given)]

    def close(self) -> None:
        """Leave the others."""
        if self._shared is not None:
            self._shared.close()
        else:
            leave([self._group])

    def _travelling(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor as the others can get it."""
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
        # Two places in turn: all have read one when they are at the other.
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
        """Return the sum of all tensors, of which every process adds up a part: each sends less than all of its own."""
        flat = given.view(-1).clone()
        total = ServerSum(flat, self._group)
        with peers():
            total.start()
            total.go_on()
            total.wait()
        return flat.view(given.shape)


def connected_slices(
    setup: Setup, world: World, num_bytes: Counter[tuple[str, str]]
) -> tuple[ProcessSlices | None, World]:
    """Connect this process with its worker's others, if layers are divided; return its part and the world it sees."""
    if setup.graph.slices is None:
        return None, world
    group = setup.graph.slices.group
    assert isinstance(group, ProcessSlices)
    group.connect(world, setup.cluster.levels[0].name, num_bytes)
    return group, replace(world, slices=group.size)


def combined(facts: Sequence[dict[str, Any]], world: World) -> dict[str, Any]:
    """Return what a worker counted, from all processes' counters: bytes of all of its own, and the most one held."""
    own = facts[world.rank * world.slices :][: world.slices]
    sent: Counter[tuple[str, str]] = Counter()
    for each in own:
        sent.update({(kind, level): count for kind, level, count in each["num_bytes"]})
    most = {name: [*map(max, *(each[name] for each in own))] for name in ("peak_bytes", "host_peak_bytes")}
    return {**own[world.slice_index], **most, "num_bytes": [[*key, count] for key, count in sent.items()]}


def joined(stages: Sequence[Mapping[str, torch.Tensor]], slices: Slices | None) -> list[dict[str, torch.Tensor]]:
    """Return every worker's tensors, by name, put together of its processes'."""
    if slices is None:
        return [dict(tensors) for tensors in stages]
    size, cuts = slices.group.size, slices.cuts

    def whole(name: str, parts: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor:
        own = [part[name].detach() for part in parts]
        return torch.cat(own, cuts[name].dimension) if name in cuts else own[0]

    workers = [stages[first : first + size] for first in range(0, len(stages), size)]
    return [{name: whole(name, parts) for name in parts[0]} for parts in workers]
