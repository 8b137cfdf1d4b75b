"""The collectives of workers that share a process.

Sums are added in the order in which processes on the same devices add them: both engines end with the same weights.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch

from pipebench.engine.clipping import norm_of
from pipebench.engine.ring import all_reduce, of_one_type, server_sum
from pipebench.engine.server import ParameterServer, Pulled
from pipebench.engine.setup import Setup
from pipebench.engine.worker import Worker
from pipebench.schedule.syncs import ALL_REDUCE, SYNCS
from pipebench.simulate.timeline import CONTROL


class InProcessCollectives:
    """What the replicas of a stage, or all stages, do together.

    Args:
        setup: what is run.
        workers: all of them.
        num_bytes: what has been sent, by kind and level; added to.

    Attributes:
        servers: of every stage, where replicas don't wait for each other.
    """

    def __init__(self, setup: Setup, workers: Sequence[Worker], num_bytes: Counter[tuple[str, str]]) -> None:
        self._setup = setup
        self._workers = workers
        self._num_bytes = num_bytes
        self._given: dict[tuple[int, int], dict[int, Sequence[torch.Tensor | None]]] = {}  # by replica
        self._sums: dict[tuple[int, int], tuple[list[torch.Tensor | None], int]] = {}  # and how many still ask for it
        self._norms: dict[int, torch.Tensor] = {}
        hosts = [] if SYNCS[setup.pipeline.sync].waits else [workers[w] for w in setup.pipeline.first_workers]
        self.servers = [ParameterServer(setup, stage, host.replicas[stage]) for stage, host in enumerate(hosts)]
        self._pulled: dict[tuple[int, int], Pulled] = {}  # by stage and replica

    def begin(self, first: int) -> None:
        """Start a segment of training that begins with this minibatch of the run; rounds are numbered anew."""
        for of_round in (self._given, self._sums, self._norms, self._pulled):
            of_round.clear()
        for server in self.servers:
            server.begin(first)

    def on_gradient(self, stage: int) -> None:
        """Gradients are given all at once: in this process nothing travels while a backward runs."""

    def contribute(self, stage: int, replica: int, round_index: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Keep a replica's gradients of a round; one that had no unit in it may come when the sum is made."""
        if (stage, round_index) not in self._sums:
            self._given.setdefault((stage, round_index), {})[replica] = gradients

    def wait(self, stage: int, round_index: int) -> list[torch.Tensor | None]:
        """Return the sum of the gradients that all replicas gave; the clock has seen to it that they have."""
        key = (stage, round_index)
        if key not in self._sums:
            self._sums[key] = self._reduced(stage, self._given.pop(key)), self._setup.pipeline.replicas[stage]
        total, asking = self._sums.pop(key)
        if asking > 1:
            self._sums[key] = total, asking - 1
        return list(total)

    def norm(self, round_index: int) -> torch.Tensor:
        """Return the norm of all stages' gradients; every stage's replicas hold the same gradients by now."""
        if round_index not in self._norms:
            ring = self._setup.ring(range(self._setup.pipeline.num_workers))
            squares = [self._workers[worker].squared_norms() for worker in ring]
            self._norms = {round_index: norm_of(self.all_reduce(CONTROL, ring, squares))}
        return self._norms[round_index]

    def push(
        self, stage: int, replica: int, minibatch: int, version: int, gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Let a stage's server apply a gradient: the clock has seen to it that it is there, and its turn."""
        self._pulled[stage, replica] = self.servers[stage].apply(replica, minibatch, version, gradients)
        self._count_weights(stage, replica, to_server=True)

    def pull(self, stage: int, replica: int, at_least: int) -> Pulled:
        """Return what the replica's last push has made, or what all have."""
        self._count_weights(stage, replica, to_server=False)
        own = self._pulled.pop((stage, replica), None)
        return own if at_least < 0 and own is not None else self.servers[stage].newest(replica)

    def _count_weights(self, stage: int, replica: int, *, to_server: bool) -> None:
        """Count a gradient, or weights, of a whole stage on their way between a replica and the server."""
        if replica > 0:
            ends = [self._setup.pipeline.workers_of(stage)[each] for each in (replica, 0)]
            sender, receiver = ends if to_server else reversed(ends)
            num_bytes = sum(p.nbytes for p in self._workers[sender].replicas[stage].weights.newest.parameters)
            kind = SYNCS[self._setup.pipeline.sync].kind
            self.count(kind, sender, receiver, num_bytes)

    def count(self, kind: str, sender: int, receiver: int, num_bytes: int) -> None:
        """Count bytes that a worker sends to another."""
        self._num_bytes[kind, self._setup.level_between(sender, receiver).name] += num_bytes

    def of_stage(self, stage: int) -> list[int]:
        """Return a stage's workers in the order of their ring."""
        return self._setup.ring(self._setup.pipeline.workers_of(stage))

    def all_reduce(self, kind: str, ring: Sequence[int], buffers: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of what the workers of a ring have, and count its bytes."""
        return all_reduce(buffers, self._setup.servers(ring), self._counter(kind, ring))

    def _counter(self, kind: str, ring: Sequence[int]) -> Callable[[int, int, int], None]:
        """Return what counts the bytes that one member of a ring sends to another."""

        def count(sender: int, receiver: int, num_bytes: int) -> None:
            self.count(kind, ring[sender], ring[receiver], num_bytes)

        return count

    def _reduced(self, stage: int, given: Mapping[int, Sequence[torch.Tensor | None]]) -> list[torch.Tensor | None]:
        """Sum a round's gradients bucket by bucket; a member without a gradient brings zeros."""
        ring, sync = self.of_stage(stage), SYNCS[self._setup.pipeline.sync]
        weights = self._workers[ring[0]].replicas[stage].weights
        names, like = weights.names, weights.newest.parameters
        nothing: list[torch.Tensor | None] = [None] * len(names)
        members = [given.get(self._workers[worker].replica_index, nothing) for worker in ring]
        result: list[torch.Tensor | None] = [None] * len(names)
        buckets = self._setup.costs.stages[stage].buckets
        named = ([names.index(name) for name in bucket.parameters] for bucket in buckets)
        for indices in (part for bucket in named for part in of_one_type(bucket, like)):
            flats = [
                torch.cat([(like[i].detach() * 0 if m[i] is None else m[i]).reshape(-1) for i in indices])  # type: ignore[union-attr]
                for m in members
            ]
            if sync.way == ALL_REDUCE:
                total = self.all_reduce(sync.kind, ring, flats)
            else:
                total = server_sum(flats, self._counter(sync.kind, ring))
            pieces = torch.split(total, [like[i].numel() for i in indices])
            for i, piece in zip(indices, pieces, strict=True):
                result[i] = None if all(m[i] is None for m in members) else piece.view(like[i].shape)
        return result
