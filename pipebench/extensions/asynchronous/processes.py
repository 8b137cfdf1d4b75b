"""The server of workers in separate processes: in the first worker's process the server, in others a link to it."""

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
    """The server in the first worker's process, or a link to it; all processes create theirs at the same time."""

    def __init__(self, collectives: ProcessCollectives) -> None:
        self._collectives, setup = collectives, collectives.setup
        self._own = collectives.worker.index
        self._server_rank = collectives.ranks[0]
        self._kind = SYNCS[setup.pipeline.sync].algorithm
        self._order = setup.pipeline.extensions.get(ASYNCHRONOUS, {})
        self._weights = connect(collectives.worker, self)
        self._all_ranks: Any = None  # the group of all links by NCCL, once made
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
        """Apply a gradient, or send it to the server's process."""
        if self._serving is not None:
            self._serving.push(minibatch, version, gradients)
            return
        start = self._collectives.timer.mark()
        self._link.push(minibatch, version, gradients)
        self._count(self._kind, f"push {minibatch}", start, to_server=True)

    def pull(self, replica: int, at_least: int) -> Pulled:
        """Return the weights after the replica's last push or, if `at_least` >= 0, after so many pushes."""
        if self._serving is not None:
            return self._serving.pull(at_least)
        start = self._collectives.timer.mark()
        pulled = self._link.pull(at_least)
        self._count(self._kind, "pull", start, to_server=False)
        self._collectives.waited(start)
        return pulled

    def drained(self) -> Iterator[Sent]:
        """Broadcast the averages of parameters that the server's optimizer keeps for evaluations, if any."""
        for group in self._collectives.stage_groups.values():
            self._broadcast_averages(group)
        yield from ()

    def close(self) -> None:
        """Report that this replica has finished, or wait until all other replicas have."""
        if self._serving is not None:
            self._serving.close()
        else:
            self._link.done()

    def _broadcast_averages(self, group: dist.ProcessGroup) -> None:
        own = None if self.here is None else self.here.averages
        device = self._collectives.setup.device if self._collectives.world.direct else torch.device("cpu")
        there = torch.tensor([own is not None], device=device)
        averages = [each.detach().to(device, copy=True) for each in own or self._weights.newest.parameters]
        start = self._collectives.timer.mark()
        with peers():
            dist.broadcast(there, self._server_rank, group=group)
            for average in averages if there else ():
                dist.broadcast(average, self._server_rank, group=group)
        if there and self.here is None:
            self._weights.take_averages(averages)
            self._count(BUFFERS, "averages", start, to_server=False)

    def _links(self, worker: int) -> Iterator[ServerLink]:
        """Make the link between the server and another worker; all processes take part, the two yield it."""
        ends = {each: self._collectives.ranks[each] for each in (0, worker)}
        group = self._group(sorted(ends.values()))
        if self._own in ends:
            yield ServerLink(group, ends[worker - self._own], self._weights.newest.parameters)

    def _group(self, ranks: Sequence[int]) -> Any:
        """Return a group for the link of two ranks; with NCCL all links share one group of all ranks.

        With NCCL, ranks outside a new group have to split the communicator for it, and wait for the ranks inside.
        """
        collectives, world = self._collectives, self._collectives.world
        if self._all_ranks is None:
            # No time limit: an evaluation of any length may come between two pushes.
            group = world.new_group("gloo", None if world.direct else ranks, limit_s=FOR_EVER_S)
            collectives.groups.append(group)
            self._all_ranks = group if world.direct else None
            return group
        return self._all_ranks

    def _count(self, kind: str, label: str, start: Moment, *, to_server: bool) -> None:
        """Count and record a message with a gradient or weights between this worker and the server."""
        collectives, num_bytes = self._collectives, sum(p.nbytes for p in self._weights.newest.parameters)
        level = collectives.setup.level_between(self._own, 0).name
        collectives.num_bytes[kind, level] += num_bytes
        ends = ((self._own,), (0,)) if to_server else ((0,), (self._own,))
        span = TimeSpan(start, collectives.timer.mark())
        collectives.record(Transfer(kind, label, *ends, level, num_bytes, 0.0, 0.0), span)
