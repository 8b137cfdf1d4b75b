"""What a worker in a process of its own does with the servers of its stages: its own, or those of other processes."""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from pipebench.distributed.collectives import ProcessCollectives
from pipebench.distributed.launch_join import peers
from pipebench.engine.protocols import Sent
from pipebench.extensions.asynchronous.server import ParameterServer, Pulled, Servers, connect
from pipebench.extensions.asynchronous.serving import ServerLink, Serving
from pipebench.schedule.syncs import ASYNCHRONOUS, SYNCS
from pipebench.simulate.timeline import BUFFERS, Transfer


class ProcessServers(Servers):
    """The servers of this process, and lines to those of others. All processes make one, at the same time.

    Args:
        collectives: of this process's worker.
    """

    def __init__(self, collectives: ProcessCollectives) -> None:
        self._collectives, self._setup, self._worker = collectives, collectives.setup, collectives.worker
        self._kind = SYNCS[self._setup.pipeline.sync].kind
        self._order = self._setup.pipeline.extensions.get(ASYNCHRONOUS, {})
        self._lines: dict[int, ServerLink] = {}  # to the server, by stage; the servers here likewise
        self._serving: dict[int, Serving] = {}
        for stage in range(self._setup.pipeline.num_stages):
            self._make_server(stage)
        self.here = {stage: serving.server for stage, serving in self._serving.items()}
        connect(self._worker, self)

    def begin(self, first: int, limit: Callable[[], float]) -> None:
        """Start a segment of training."""
        for serving in self._serving.values():
            serving.begin(first, self._order.get(first), limit)

    def push(
        self, stage: int, replica: int, minibatch: int, version: int, gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Send the stage's server a gradient."""
        if replica == 0:
            self._serving[stage].push(minibatch, version, gradients)
            return
        start_s = self._collectives.clock()
        self._lines[stage].push(minibatch, version, gradients)
        self._count_weights(stage, self._kind, f"push {minibatch}", start_s, to_server=True)

    def pull(self, stage: int, replica: int, at_least: int) -> Pulled:
        """Return what the replica's last push has made; or, where it is told, what so many have."""
        start_s = self._collectives.clock()
        if replica == 0:
            return self._serving[stage].pull(at_least)
        pulled = self._lines[stage].pull(at_least)
        self._count_weights(stage, self._kind, "pull", start_s, to_server=False)
        self._collectives.stall_s += self._collectives.clock() - start_s
        return pulled

    def drained(self) -> Iterator[Sent]:
        """Let replicas evaluate with the averages that a server's optimizer keeps, if it keeps any."""
        for stage in self._collectives.stage_groups:
            self._hand_out_averages(stage)
        yield from ()

    def close(self) -> None:
        """Say that nothing else comes, and wait until all replicas have said so."""
        for line in self._lines.values():
            line.done()
        for serving in self._serving.values():
            serving.close()

    def _hand_out_averages(self, stage: int) -> None:
        collectives, world = self._collectives, self._collectives.world
        weights, serving = self._worker.replicas[stage].weights, self._serving.get(stage)
        own = None if serving is None else serving.server.averages
        device = self._setup.device if world.direct else torch.device("cpu")
        group, host = collectives.stage_groups[stage], collectives.ranks[self._setup.pipeline.workers_of(stage)[0]]
        there = torch.tensor([own is not None], device=device)
        travels = [average.detach().to(device, copy=True) for average in own or weights.newest.parameters]
        start_s = collectives.clock()
        with peers():
            dist.broadcast(there, host, group=group)
            for average in travels if there else ():
                dist.broadcast(average, host, group=group)
        if there and serving is None:
            weights.take_averages(travels)
            self._count_weights(stage, BUFFERS, "averages", start_s, to_server=False)

    def _make_server(self, stage: int) -> None:
        """Make the lines between a stage's server and its replicas; workers of other stages help to make them."""
        host, *others = self._setup.pipeline.workers_of(stage)
        own, lines, ranks = self._worker.index, {}, self._collectives.ranks
        for worker in others:
            ends = {host: ranks[host], worker: ranks[worker]}
            group = self._collectives.world.new_group("gloo", sorted(ends.values()))
            self._collectives.groups.append(group)
            if own in ends:
                peer = ends[host if own == worker else worker]
                like = self._worker.replicas[stage].weights.newest.parameters
                lines[worker] = ServerLink(group, peer, like)
        if own == host:
            server = ParameterServer(self._setup, stage, self._worker.replicas[stage])
            self._serving[stage] = Serving(server, list(lines.values()))
        elif own in lines:
            self._lines[stage] = lines[own]

    def _count_weights(self, stage: int, kind: str, label: str, start_s: float, *, to_server: bool) -> None:
        """Count a gradient, or weights, of the whole stage between this worker and the server: here for both ends."""
        collectives, own = self._collectives, self._worker.index
        host = self._setup.pipeline.workers_of(stage)[0]
        num_bytes = sum(p.nbytes for p in self._worker.replicas[stage].weights.newest.parameters)
        level = self._setup.level_between(own, host).name
        collectives.num_bytes[kind, level] += num_bytes
        ends = ((own,), (host,)) if to_server else ((host,), (own,))
        collectives.meter.transfer(Transfer(kind, label, *ends, level, num_bytes, start_s, collectives.clock()))
