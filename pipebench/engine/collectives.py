"""The collectives of workers that share a process.

Sums are added in the same order as by processes on the same devices, so both engines end with the same weights.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch

from pipebench.engine.clipping import norm_of
from pipebench.engine.protocols import EngineExtension
from pipebench.engine.ring import SUMS, all_reduce
from pipebench.engine.setup import Setup
from pipebench.engine.weights import Weights
from pipebench.engine.worker import Worker
from pipebench.simulate.simulation import RunPart
from pipebench.simulate.sums import ALGORITHMS
from pipebench.simulate.timeline import BUFFERS, CONTROL


class InProcessCollectives:
    """Collectives of the replicas of a stage, or of all stages; `num_bytes` counts bytes sent, by kind and level.

    A group is a stage or, numbered after the stages, a tie: the copies of weights that several stages share.
    """

    def __init__(self, setup: Setup, workers: Sequence[Worker], num_bytes: Counter[tuple[str, str]]) -> None:
        self.setup = setup
        self.workers = workers  # all
        self._num_bytes = num_bytes
        # By group and round: gradients by replica; their sums, and how many replicas have yet to read them
        self._given: dict[tuple[int, int], dict[int, Sequence[torch.Tensor | None]]] = {}
        self._sums: dict[tuple[int, int], tuple[list[torch.Tensor | None], int]] = {}
        self._norms: dict[int, torch.Tensor] = {}  # by round, the latest only
        self._gathering: Counter[int] = Counter()  # replicas that have joined the gather under way, by stage
        hooks = setup.pipeline.hooks("in_process")
        # Of the enabled extensions
        self.extensions: dict[str, EngineExtension] = {name: make(self) for name, make in hooks.items()}

    def begin(self, part: RunPart) -> None:
        """Start a segment of training, in which rounds are numbered from 0."""
        for of_round in (self._given, self._sums, self._norms):
            of_round.clear()
        for extension in self.extensions.values():
            extension.begin(part)

    def on_gradient(self, stage: int) -> None:
        """Return None: gradients are contributed after the backward, since here nothing overlaps with it."""

    def contribute(self, stage: int, replica: int, round_index: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Store a replica's gradients of a round, unless the sum is there: a replica without a unit may come late."""
        if (stage, round_index) not in self._sums:
            self._given.setdefault((stage, round_index), {})[replica] = gradients

    def wait(self, stage: int, replica: int, round_index: int) -> list[torch.Tensor | None]:
        """Return the sum of all replicas' gradients; the virtual clock guarantees that they are there."""
        key = (stage, round_index)
        if key not in self._sums:
            self._sums[key] = self._reduced(stage, self._given.pop(key)), len(self.setup.pipeline.members(stage))
        total, asking = self._sums.pop(key)
        if asking > 1:
            self._sums[key] = total, asking - 1
        sharding = None if stage >= self.setup.pipeline.num_stages else self._weights(stage, replica).sharding
        if sharding is None:
            return list(total)
        own = ((total[piece.place], piece) for piece in sharding.own)
        return [None if gradient is None else piece.of(gradient) for gradient, piece in own]

    def gather(self, stage: int, kind: str) -> None:
        """Join a gather; the last replica to join gives each what the others have stepped on.

        No replica makes another update before it has waited for the gather, so all of them still have these weights.
        """
        size = self.setup.pipeline.replicas[stage]
        self._gathering[stage] += 1
        if self._gathering[stage] < size:
            return
        self._gathering[stage] = 0
        weights = [self._weights(stage, replica) for replica in range(size)]
        for given in weights:
            assert given.sharding is not None
            for receiver in weights:
                if receiver is not given or not given.sharding.keeps_all:
                    receiver.gathered(given.sharding.own, given.own_pieces())
        self._count_half(stage, kind, weights[0].version_bytes)

    def wait_gathered(self, stage: int) -> None:
        """Do nothing: the virtual clock guarantees that the weights are there."""

    def _weights(self, stage: int, replica: int) -> Weights:
        worker = self.setup.pipeline.places[stage][replica]
        return self.workers[worker].replicas[stage].weights

    def _count_half(self, stage: int, kind: str, num_bytes: int) -> None:
        """Count the bytes of a reduce-scatter or an all-gather."""
        ring = self.of_stage(stage)
        for sender, receiver, sent in ALGORITHMS[self.setup.pipeline.algorithm].traffic(
            num_bytes, self.setup.servers(ring)
        ):
            self.count(kind, ring[sender], ring[receiver], sent)

    def tied(self, group: int, round_index: int) -> list[torch.Tensor | None]:
        """Return the sum of a tie's gradients, made at the first call, when all copies have theirs."""
        if (group, round_index) not in self._sums:
            self._given[group, round_index] = {
                index: self.workers[worker].tied[group].gradients()
                for index, worker in enumerate(self.setup.pipeline.members(group))
            }
        return self.wait(group, 0, round_index)

    def norm(self, round_index: int) -> torch.Tensor:
        """Return the norm of all stages' gradients, made at the first call, when replicas have summed theirs."""
        if round_index not in self._norms:
            ring = self.setup.ring(range(self.setup.pipeline.num_workers))
            squares = [self.workers[worker].squared_norms() for worker in ring]
            self._norms = {round_index: norm_of(self.all_reduce(CONTROL, ring, squares))}
        return self._norms[round_index]

    def count(self, kind: str, sender: int, receiver: int, num_bytes: int) -> None:
        """Count bytes that a worker sends to another."""
        self._num_bytes[kind, self.setup.level_between(sender, receiver).name] += num_bytes

    def of_stage(self, stage: int) -> list[int]:
        """Return the workers of a group in ring order."""
        return self.setup.ring(self.setup.pipeline.members(stage))

    def all_reduce(self, kind: str, ring: Sequence[int], buffers: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of a ring's buffers, and count its bytes."""
        return all_reduce(buffers, self.setup.servers(ring), self._counter(kind, ring))

    def sum_buffers(self, ring: Sequence[int], buffers: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of a ring's running statistics, and count its bytes."""
        return SUMS[self.setup.pipeline.buffer_algorithm](
            buffers, self.setup.servers(ring), self._counter(BUFFERS, ring)
        )

    def _counter(self, kind: str, ring: Sequence[int]) -> Callable[[int, int, int], None]:
        """Return a function that counts the bytes one member of a ring sends another."""

        def count(sender: int, receiver: int, num_bytes: int) -> None:
            self.count(kind, ring[sender], ring[receiver], num_bytes)

        return count

    def _reduced(self, stage: int, given: Mapping[int, Sequence[torch.Tensor | None]]) -> list[torch.Tensor | None]:
        """Sum a round's gradients bucket by bucket; a member without a gradient contributes zeros."""
        ring, pipeline = self.of_stage(stage), self.setup.pipeline
        like, buckets = self.workers[ring[0]].summed(stage)
        nothing: list[torch.Tensor | None] = [None] * len(like)
        order = pipeline.members(stage)
        members = [given.get(order.index(worker), nothing) for worker in ring]
        result = nothing[:]
        for indices in buckets:
            flats = [
                torch.cat([(torch.zeros_like(like[i]) if m[i] is None else m[i]).reshape(-1) for i in indices])  # type: ignore[union-attr]
                for m in members
            ]
            if pipeline.is_sharded:
                self._count_half(stage, pipeline.sum_kind, flats[0].nbytes)
            total = SUMS[pipeline.algorithm](flats, self.setup.servers(ring), self._counter(pipeline.sum_kind, ring))
            pieces = torch.split(total, [like[i].numel() for i in indices])
            for i, piece in zip(indices, pieces, strict=True):
                result[i] = None if all(m[i] is None for m in members) else piece.view(like[i].shape)
        return result
