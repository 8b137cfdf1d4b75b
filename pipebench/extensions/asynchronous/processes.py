"""The server for workers in separate processes: in the first worker's process, a link to it in the others."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pipebench.distributed.collectives import ProcessCollectives, TimeSpan
from pipebench.distributed.instruction_times import Moment
from pipebench.distributed.launch_join import peers
from pipebench.distributed.world import FOR_EVER_S
from pipebench.engine.protocols import Sent
from pipebench.extensions.asynchronous.server import Gradients, ParameterServer, Pulled, Server, connect
from pipebench.extensions.asynchronous.serving import ServerLink, Serving
from pipebench.schedule.syncs import ASYNCHRONOUS, SYNCS
from pipebench.simulate.simulation import RunPart
from pipebench.simulate.timeline import BUFFERS, Transfer


class ProcessServer(Server):
    """The server, in the process of the first worker; all processes create it at the same time."""

    def __init__(self, collectives: ProcessCollectives) -> None:
        self._collectives, setup = collectives, collectives.setup
        self._own, self._host = collectives.worker.index, collectives.ranks[0]
        self._kind = SYNCS[setup.pipeline.sync].way
        self._order = setup.pipeline.extensions.get(ASYNCHRONOUS, {})
        self._weights = connect(collectives.worker, self)
        self._everybody: Any = None  # their group, once made
        links = [link for worker in range(1, setup.pipeline.num_workers) for link in self._links(worker)]
        self._serving: Serving | None = None
        if self._own == 0:
            self.here = ParameterServer(setup, self._weights)
            self._serving = Serving(self.here, links, collectives.worker.measure_memory)
        else:
            (self._link,) = links

    def begin(self, part: RunPart) -> None:
        """Start a segment of training."""
        if self._serving is not None:
            self._serving.begin(part.first, self._order.get(part.first), part.limit)

    def push(self, replica: int, minibatch: int, version: int, gradients: Gradients) -> None:
        """Apply a gradient, or send it to the server."""
        if self._serving is not None:
            self._serving.push(minibatch, version, gradients)
            return
        start = self._collectives.timer.mark()
        self._link.push(minibatch, version, gradients)
        self._count(self._kind, f"push {minibatch}", start, to_server=True)

    def pull(self, replica: int, at_least: int) -> Pulled:
        """Return the weights after the replica's last push or, if `at_least` is given, after so many pushes."""
        if self._serving is not None:
            return self._serving.pull(at_least)
        start = self._collectives.timer.mark()
        pulled = self._link.pull(at_least)
        self._count(self._kind, "pull", start, to_server=False)
        self._collectives.waited(start)
        return pulled

    def drained(self) -> Iterator[Sent]:
        """Broadcast the averages that the server's optimizer keeps, if any, for evaluations."""
        for group in self._collectives.stage_groups.values():
            self._hand_out_averages(group)
        yield from ()

    def close(self) -> None:
        """Report the end of this replica's pushes, or wait for those of all replicas."""
        if self._serving is not None:
            self._serving.close()
        else:
            self._link.done()

    def _hand_out_averages(self, group: dist.ProcessGroup) -> None:
        own = None if self.here is None else self.here.averages
        device = self._collectives.setup.device if self._collectives.world.direct else torch.device("cpu")
        there = torch.tensor([own is not None], device=device)
        travels = [average.detach().to(device, copy=True) for average in own or self._weights.newest.parameters]
        start = self._collectives.timer.mark()
        with peers():
            dist.broadcast(there, self._host, group=group)
            for average in travels if there else ():
                dist.broadcast(average, self._host, group=group)
        if there and self.here is None:
            self._weights.take_averages(travels)
            self._count(BUFFERS, "averages", start, to_server=False)

    def _links(self, worker: int) -> Iterator[ServerLink]:
        """Create the link between the server and another worker; all processes take part, the two receive it."""
        ends = {each: self._collectives.ranks[each] for each in (0, worker)}
        group = self._group(sorted(ends.values()))
        if self._own in ends:
            yield ServerLink(group, ends[worker - self._own], self._weights.newest.parameters)

    def _group(self, ranks: Sequence[int]) -> Any:
        """Return the group of the server and another worker, or of all ranks for everybody's links by NCCL.

        Torch has those who aren't in a group split the communicator, which waits for those in it.
        """
        collectives, world = self._collectives, self._collectives.world
        if self._everybody is None:
            # Between two pushes may be an evaluation, however long
            group = world.new_group("gloo", None if world.direct else ranks, limit_s=FOR_EVER_S)
            collectives.groups.append(group)
            self._everybody = group if world.direct else None
            return group
        return self._everybody

    def _count(self, kind: str, label: str, start: Moment, *, to_server: bool) -> None:
        """Count a gradient or weights between this worker and the server, for both ends."""
        collectives, num_bytes = self._collectives, sum(p.nbytes for p in self._weights.newest.parameters)
        level = collectives.setup.level_between(self._own, 0).name
        collectives.num_bytes[kind, level] += num_bytes
        ends = ((self._own,), (0,)) if to_server else ((0,), (self._own,))
        span = TimeSpan(start, collectives.timer.mark())
        collectives.record(Transfer(kind, label, *ends, level, num_bytes, 0.0, 0.0), span)
