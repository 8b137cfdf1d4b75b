"""Our side of comparisons: the distributed engine on a setup, in a worker process."""

from collections import Counter

import torch

from pipebench.distributed.engine import DistributedEngine
from pipebench.distributed.world import current
from pipebench.engine.setup import Setup
from pipebench.schedule.operations import Op
from tests.unwatched import unwatched


class Ours:
    """The engine of this process, which trains on successive minibatches; all processes make one of the same setup."""

    def __init__(self, setup: Setup) -> None:
        world = current()
        assert world is not None
        self._engine = DistributedEngine(setup, world, unwatched(setup))
        self._engine.start_clock()
        self._done = 0

    def train(self, num_minibatches: int) -> None:
        """Train on the next minibatches, and drain."""
        self._done += self._engine.train(self._done, num_minibatches)

    def close(self) -> None:
        """Close the connections, whose threads would disturb the next measurement."""
        self._engine.close()

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the newest parameters of this process's stages by the model's names; all processes call it."""
        found: dict[str, torch.Tensor] = {}
        self._engine.gather_or_free(Op.GATHER, Op.WAIT_GATHER)
        for replica in self._engine.worker.replicas.values():
            newest = (parameter.clone() for parameter in replica.weights.newest.parameters)
            found |= zip(replica.weights.names, newest, strict=True)
        self._engine.gather_or_free(Op.FREE)
        return found

    def sent_bytes(self) -> dict[str, int]:
        """Return the payload this process has sent so far, by kind."""
        found: Counter[str] = Counter()
        for (kind, _), num_bytes in self._engine.num_bytes.items():
            found[kind] += num_bytes
        return dict(found)
