"""Sums among the replicas of a stage, and of gradient norms over all workers: who has joined, and who waits."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from pipebench.schedule.instructions import Instruction
from pipebench.schedule.pipeline import Pipeline
from pipebench.schedule.syncs import ALL_GATHER, ALL_REDUCE, SYNCS
from pipebench.simulate.costs import Costs, SimulatedBucket
from pipebench.simulate.network import Network
from pipebench.simulate.timeline import CONTROL

# Numbers of groups; those of a stage's replicas and of ties are as in `Pipeline.members`
EVERY_STAGE = -1  # all workers
_GATHERS = -2  # for the gathers of stage s, _GATHERS - s

Wait = tuple[float, Instruction, float]  # start of the wait, the instruction, when what it waits for was sent
Wake = Callable[[float, int, Wait], None]  # lets a worker continue at a time


@dataclass(frozen=True)
class _PendingReduction:
    """What a group of workers sums in every round."""

    buckets: Sequence[SimulatedBucket]
    workers: Sequence[int]
    algorithm: str  # a name in `sums.ALGORITHMS`
    kind: str  # of bytes
    host_s: float = 0.0  # seconds on each member's processor
    overlaps: bool = True  # whether buckets are sent while the backward still runs


@dataclass
class _Round:
    """The sums of one round of a group."""

    group: _PendingReduction
    key: tuple[int, int]  # the group's number, and the round's
    ready_s: list[float]  # per bucket, when the last worker has its part
    waits_left: int  # workers that have not waited for the sums yet
    joined: int = 0  # workers
    buckets_left: int = 0  # not summed yet
    end_s: float | None = None  # of all sums; None: not yet
    all_joined_s: float = 0.0


class Reductions:
    """Starts each bucket's sum when the last worker has its part."""

    def __init__(self, pipeline: Pipeline, costs: Costs, network: Network, wake: Wake) -> None:
        self._network = network
        self._wake = wake
        self._rounds: dict[tuple[int, int], _Round] = {}
        self._waiting: dict[tuple[int, int], list[tuple[int, float, Instruction]]] = {}
        # Every stage and every tie has process groups of its own, but a sharded model's groups of layers share one
        self._together = pipeline.is_sharded and pipeline.num_positions == 1
        sync = SYNCS[pipeline.sync]
        squares = SimulatedBucket(8 * max(1, costs.num_parameters), 1.0)  # a float64 per parameter
        self._groups = {EVERY_STAGE: _PendingReduction((squares,), range(pipeline.num_workers), ALL_REDUCE, CONTROL)}
        for stage, each in enumerate(costs.stages):
            num_bytes, workers = sum(bucket.num_bytes for bucket in each.buckets), pipeline.places[stage]
            host_s = (costs.host.exchange if pipeline.is_sharded else costs.host.all_reduce)(num_bytes, len(workers))
            kind, overlaps = pipeline.sum_kind, sync.overlaps
            self._groups[stage] = _PendingReduction(each.buckets, workers, pipeline.algorithm, kind, host_s, overlaps)
            if pipeline.is_sharded:
                whole = (SimulatedBucket(num_bytes, 1.0),) if num_bytes else ()
                self._groups[_GATHERS - stage] = _PendingReduction(
                    whole, workers, pipeline.algorithm, ALL_GATHER, host_s
                )
        self._gathers: Counter[tuple[int, int]] = Counter()  # number joined, by worker and stage
        for tie, group in enumerate(pipeline.tied_groups):
            buckets, members = costs.ties[tie : tie + 1], pipeline.members(group)  # pictures have no buckets
            host_s = costs.host.all_reduce(sum(bucket.num_bytes for bucket in buckets), len(members))
            self._groups[group] = _PendingReduction(
                buckets, members, pipeline.algorithm, sync.algorithm, host_s, overlaps=False
            )

    def join(
        self, stage: int, round_index: int, now_s: float, duration_s: float = 0.0, *, in_part: bool = False
    ) -> None:
        """Let a worker join a round.

        Args:
            stage: number of the group: a stage or a tie, see also `EVERY_STAGE` and `_GATHERS`.
            round_index: the round.
            now_s: when the worker joins: the start of its last backward of the round, if `duration_s` is given.
            duration_s: of that backward, during which buckets become ready; 0 if all are ready.
            in_part: whether it is the weight part of a split backward.
        """
        group = self._groups[stage]
        key = stage, round_index
        each = self._rounds.get(key)
        if each is None:
            size = len(group.workers)
            each = self._rounds[key] = _Round(group, key, [0.0] * len(group.buckets), size)
        each.joined += 1
        each.all_joined_s = max(each.all_joined_s, now_s + duration_s)
        for index, bucket in enumerate(group.buckets):
            ready = (bucket.ready_in_part if in_part else bucket.ready) if group.overlaps else 1.0
            each.ready_s[index] = max(each.ready_s[index], now_s + ready * duration_s)
        if each.joined < len(group.workers):
            return
        each.buckets_left = len(group.buckets)
        push = self._network.agenda.push
        for bucket, ready_s in zip(group.buckets, each.ready_s, strict=True):
            push(ready_s, partial(self._start, each, bucket))
        if not group.buckets:
            push(each.all_joined_s, partial(self._ended, each))

    def gather(self, worker: int, stage: int, now_s: float) -> None:
        """Join the next gather of a stage's weights."""
        self.join(_GATHERS - stage, self._gathers[worker, stage], now_s)
        self._gathers[worker, stage] += 1

    def last_gather(self, worker: int, stage: int) -> tuple[int, int]:
        """Return the round of the last gather of a stage's weights that a worker has joined."""
        return _GATHERS - stage, self._gathers[worker, stage] - 1

    def wait(
        self, worker: int, key: tuple[int, int], instruction: Instruction, now_s: float
    ) -> tuple[float, float] | None:
        """Wait for a round's sums.

        Returns:
            When the sums are available, and when all workers had joined; None if the worker will be woken.
        """
        each = self._rounds[key]
        each.waits_left -= 1
        if each.waits_left == 0:
            del self._rounds[key]
        if each.end_s is None:
            self._waiting.setdefault(key, []).append((worker, now_s, instruction))
            return None
        return max(now_s, each.end_s) + each.group.host_s, each.all_joined_s

    def waiting(self) -> Iterator[tuple[int, float, Instruction]]:
        """Yield waiting workers, the time since which they wait, and their instructions."""
        for _, waiters in sorted(self._waiting.items()):
            yield from waiters

    def _start(self, each: _Round, bucket: SimulatedBucket, now_s: float) -> None:
        group, (stage, round_index), done = each.group, each.key, partial(self._summed, each)
        members = self._network.group(group.algorithm, group.kind, group.workers, 0 if self._together else stage)
        label = f"{'G' if group.kind == ALL_GATHER else 'R'}{round_index}"
        self._network.sum_up(members, label, bucket.num_bytes, now_s, done)

    def _summed(self, each: _Round, now_s: float) -> None:
        each.buckets_left -= 1
        if each.buckets_left == 0:
            self._ended(each, now_s)

    def _ended(self, each: _Round, now_s: float) -> None:
        each.end_s = now_s
        for worker, since_s, instruction in self._waiting.pop(each.key, ()):
            self._wake(now_s + each.group.host_s, worker, (since_s, instruction, each.all_joined_s))
