"""The servers of workers that share a process: the clock has seen to it that a gradient is there, and its turn."""

from collections.abc import Callable, Iterator, Sequence

import torch

from pipebench.engine.collectives import InProcessCollectives
from pipebench.engine.protocols import Sent
from pipebench.extensions.asynchronous.server import ParameterServer, Pulled, Servers, connect
from pipebench.schedule.syncs import SYNCS
from pipebench.simulate.timeline import BUFFERS


class InProcessServers(Servers):
    """The servers of all stages.

    Args:
        collectives: of their workers.
    """

    def __init__(self, collectives: InProcessCollectives) -> None:
        self._collectives, self._workers = collectives, collectives.workers
        self._setup = setup = collectives.setup
        hosts = [self._workers[worker] for worker in setup.pipeline.first_workers]
        self.here = {stage: ParameterServer(setup, stage, host.replicas[stage]) for stage, host in enumerate(hosts)}
        self._pulled: dict[tuple[int, int], Pulled] = {}  # by stage and replica
        for worker in self._workers:
            connect(worker, self)

    def begin(self, first: int, limit: Callable[[], float]) -> None:
        """Start a segment of training."""
        self._pulled.clear()
        for server in self.here.values():
            server.begin(first)

    def push(
        self, stage: int, replica: int, minibatch: int, version: int, gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Let a stage's server apply a gradient."""
        self._pulled[stage, replica] = self.here[stage].apply(replica, minibatch, version, gradients)
        self._count_weights(stage, replica, to_server=True)

    def pull(self, stage: int, replica: int, at_least: int) -> Pulled:
        """Return what the replica's last push has made, or what all have."""
        self._count_weights(stage, replica, to_server=False)
        own = self._pulled.pop((stage, replica), None)
        return own if at_least < 0 and own is not None else self.here[stage].newest(replica)

    def drained(self) -> Iterator[Sent]:
        """Let replicas evaluate with the averages that a server's optimizer keeps; yield what sets out."""
        for stage, server in self.here.items():
            host, *others = self._setup.pipeline.workers_of(stage)
            averages = server.averages
            for worker in others if averages is not None else ():
                assert averages is not None
                self._workers[worker].replicas[stage].weights.take_averages(averages)
                yield BUFFERS, host, worker, sum(average.nbytes for average in averages), "averages"

    def _count_weights(self, stage: int, replica: int, *, to_server: bool) -> None:
        """Count a gradient, or weights, of a whole stage on their way between a replica and the server."""
        if replica > 0:
            ends = [self._setup.pipeline.workers_of(stage)[each] for each in (replica, 0)]
            sender, receiver = ends if to_server else reversed(ends)
            num_bytes = sum(p.nbytes for p in self._workers[sender].replicas[stage].weights.newest.parameters)
            self._collectives.count(SYNCS[self._setup.pipeline.sync].kind, sender, receiver, num_bytes)
