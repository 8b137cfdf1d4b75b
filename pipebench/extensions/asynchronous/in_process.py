"""The server of workers that share a process: the clock has seen to it that a gradient is there, and its turn."""

from collections.abc import Callable, Iterator

from pipebench.engine.collectives import InProcessCollectives
from pipebench.engine.protocols import Sent
from pipebench.extensions.asynchronous.server import Gradients, ParameterServer, Pulled, Server, connect
from pipebench.schedule.syncs import SYNCS
from pipebench.simulate.timeline import BUFFERS


class InProcessServer(Server):
    """The server, in the process of all workers.

    Args:
        collectives: of its workers, which are numbered like replicas.
    """

    here: ParameterServer

    def __init__(self, collectives: InProcessCollectives) -> None:
        self._collectives = collectives
        self._kind = SYNCS[collectives.setup.pipeline.sync].kind
        self._weights = [connect(worker, self) for worker in collectives.workers]
        self._num_bytes = sum(parameter.nbytes for parameter in self._weights[0].newest.parameters)
        self.here = ParameterServer(collectives.setup, self._weights[0])
        self._pulled: dict[int, Pulled] = {}  # by replica

    def begin(self, first: int, limit: Callable[[], float]) -> None:
        """Start a segment of training."""
        self._pulled.clear()
        self.here.begin(first)

    def push(self, replica: int, minibatch: int, version: int, gradients: Gradients) -> None:
        """Apply a gradient."""
        self._pulled[replica] = self.here.apply(replica, minibatch, version, gradients)
        if replica > 0:
            self._collectives.count(self._kind, replica, 0, self._num_bytes)

    def pull(self, replica: int, at_least: int) -> Pulled:
        """Return what the replica's last push has made, or what all have."""
        if replica > 0:
            self._collectives.count(self._kind, 0, replica, self._num_bytes)
        own = self._pulled.pop(replica, None)
        return own if at_least < 0 and own is not None else self.here.newest(replica)

    def drained(self) -> Iterator[Sent]:
        """Let replicas evaluate with the averages that the optimizer keeps, if it does; yield what sets out."""
        averages = self.here.averages
        for worker, weights in enumerate(self._weights[1:] if averages is not None else (), 1):
            assert averages is not None
            weights.take_averages(averages)
            yield BUFFERS, 0, worker, sum(average.nbytes for average in averages), "averages"
