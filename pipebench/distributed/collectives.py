"""A worker's collective operations: all-reduces among its stage's replicas, and a norm over all stages."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pipebench.distributed.instruction_times import HostTimer, Moment
from pipebench.distributed.launch_join import leave, peers
from pipebench.distributed.meter import MeasuredMeter
from pipebench.distributed.reducer import Reducer, ServerSum, Summing, shared_bytes, sum_now
from pipebench.distributed.shard_exchange import Exchange, ShardReducer, WeightGather
from pipebench.distributed.shared_sum import SharedFile, share
from pipebench.distributed.world import World
from pipebench.engine.accumulation import OnGradient
from pipebench.engine.clipping import norm_of
from pipebench.engine.protocols import EngineExtension
from pipebench.engine.ring import all_reduce, of_one_type
from pipebench.engine.setup import Setup, ranks_of
from pipebench.engine.worker import Worker
from pipebench.schedule.syncs import ALL_GATHER, ALL_REDUCE, ORDERED, REDUCE_SCATTER, RING, SYNCS
from pipebench.simulate.simulation import RunPart
from pipebench.simulate.sums import traffic
from pipebench.simulate.timeline import BUFFERS, CONTROL, Transfer


class TimeSpan(NamedTuple):
    """The times of an operation."""

    start: Moment
    end: Moment
    waited: Moment | None = None  # the moment from which computations have waited for it; None if they haven't


class ProcessCollectives:
    """The process groups of one worker, and its operations in them. All workers make one, at the same time.

    Methods raise `PeerLostError` if another worker is gone. Groups of workers are those of a stage's replicas, by the
    stage's index, and those of a tie's copies, by the number of stages plus the tie's index.

    Args:
        setup: what to run.
        world: the workers.
        worker: this process's.
        timer: times every all-reduce and every wait.
        meter: records them.
        num_bytes: gets the bytes that this worker sends, by kind and level.
    """

    def __init__(
        self,
        setup: Setup,
        world: World,
        worker: Worker,
        timer: HostTimer,
        meter: MeasuredMeter,
        num_bytes: Counter[tuple[str, str]],
    ) -> None:
        self.setup, self.world, self.worker = setup, world, worker
        self.timer, self.meter, self.num_bytes = timer, meter, num_bytes
        self.ranks = ranks_of(setup)  # by worker
        # The next three have the groups of which this worker is a member.
        self._rings: dict[int, list[int]] = {}  # members, by worker
        self.stage_groups: dict[int, Any] = {}
        self._reducers: dict[int, Reducer | ShardReducer] = {}
        self._gathers: dict[int, WeightGather] = {}  # of sharded stages
        # How sharded stages exchange, by purpose and ranks: a process group, or a file for members that share memory
        self._groups_of: dict[tuple[str, ...], tuple[Any, SharedFile | None]] = {}
        self._shared: list[SharedFile] = []  # to close
        self._norm_group = world.new_group("gloo") if setup.pipeline.shares_norm else None
        self.groups: list[Any] = [] if self._norm_group is None else [self._norm_group]  # to leave
        for group in (*range(setup.pipeline.num_stages), *setup.pipeline.tied_groups):
            if len(setup.pipeline.members(group)) > 1:
                self._make_group(group)
        hooks = setup.pipeline.hooks("processes")
        self.extensions: dict[str, EngineExtension] = {name: make(self) for name, make in hooks.items()}
        self._connect()

    def begin(self, part: RunPart) -> None:
        """Start a segment of training; see `EngineExtension.begin`."""
        for extension in self.extensions.values():
            extension.begin(part)

    def on_gradient(self, stage: int) -> OnGradient | None:
        """Return the function that takes each gradient of a round's last backward, if sums overlap with it."""
        return self._reducers[stage].add if SYNCS[self.setup.pipeline.sync].overlaps else None

    def contribute(self, stage: int, replica: int, round_index: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add a round's gradients that the backward did not produce; for an idle replica, zeros for all."""
        self._reducers[stage].finish(gradients)

    def wait(self, stage: int, replica: int, round_index: int) -> list[torch.Tensor | None]:
        """Wait for a round's gradients."""
        start, pipeline = self.timer.mark(), self.setup.pipeline

        def arrived(num_bytes: int, started: Moment, ended: Moment) -> None:
            span = TimeSpan(started, ended, start)
            self._count(stage, pipeline.algorithm, pipeline.sum_kind, f"R{round_index}", num_bytes, span)

        gradients = self._reducers[stage].wait(arrived)
        self.waited(start)
        return gradients

    def waited(self, start: Moment) -> None:
        """Record the time from `start` until now as a wait for bytes in transfer."""
        end = self.timer.mark()
        self.timer.then(lambda: self.meter.stalled(end.s - start.s))

    def gather(self, stage: int, kind: str) -> None:
        """Start to gather a sharded stage's weights."""
        self._gathers[stage].kind = kind
        self._gathers[stage].start()

    def wait_gathered(self, stage: int) -> None:
        """Wait for a sharded stage's weights."""
        start, gather = self.timer.mark(), self._gathers[stage]
        span = TimeSpan(gather.set_out, gather.wait(), start)
        num_bytes = self.worker.replicas[stage].weights.version_bytes
        self._count(stage, self.setup.pipeline.algorithm, gather.kind, "weights", num_bytes, span)
        self.waited(start)

    def tied(self, group: int, round_index: int) -> list[torch.Tensor | None]:
        """Return the sum of a tie's gradients; waits for those of the other workers that have copies."""
        own = self.worker.tied[group].gradients()
        if group not in self._reducers:  # no other worker has a copy
            return own
        self._reducers[group].finish(own)
        return self.wait(group, 0, round_index)

    def norm(self, round_index: int) -> torch.Tensor:
        """Return the norm of all stages' gradients, from the gathered squares of every process's parameters."""
        setup = self.setup
        own = self.worker.squared_norms().cpu()
        start = self.timer.mark()
        found = [torch.empty_like(own) for _ in range(self.world.size)]
        with peers():
            dist.all_gather(found, own, group=self._norm_group)
        ring = setup.ring(range(setup.pipeline.num_workers))

        def count(sender: int, receiver: int, num_bytes: int) -> None:
            if ring[sender] == self.worker.index:
                self.num_bytes[CONTROL, setup.level_between(ring[sender], ring[receiver]).name] += num_bytes

        squares = [found[self.ranks[worker]] for worker in ring]
        norm = norm_of(all_reduce(squares, setup.servers(ring), count).to(setup.device))
        self.waited(start)
        return norm

    def drained(self) -> None:
        """Average running statistics over every stage's replicas; let extensions exchange their own state."""
        for stage, ring in self._rings.items():
            start, buffers = self.timer.mark(), self.worker.buffers(stage)
            for indices in of_one_type(range(len(buffers)), buffers):
                own = [buffers[index] for index in indices]
                flat = torch.cat([buffer.reshape(-1) for buffer in own])
                means = torch.split(self._sum(stage, flat) / len(ring), [buffer.numel() for buffer in own])
                for buffer, mean in zip(own, means, strict=True):
                    buffer.copy_(mean.view(buffer.shape))
                span = TimeSpan(start, self.timer.mark())
                self._count(stage, self.setup.pipeline.buffer_algorithm, BUFFERS, "buffers", flat.nbytes, span)
        for extension in self.extensions.values():
            deque(extension.drained(), maxlen=0)  # runs the generator

    def close(self) -> None:
        """Leave the groups."""
        for extension in self.extensions.values():
            extension.close()
        for shared in self._shared:
            shared.close()
        leave(self.groups)

    def _connect(self) -> None:
        """Use every group once for each purpose, before any worker waits for anything else: see `Reducer.connect`."""
        for reducer in self._reducers.values():
            reducer.connect()
        for gather in self._gathers.values():
            gather.connect()
        for stage in self.stage_groups:
            buffers = self.worker.buffers(stage)
            for indices in of_one_type(range(len(buffers)), buffers):
                self._sum(stage, torch.cat([torch.zeros_like(buffers[index]).reshape(-1) for index in indices]))

    def _sum(self, stage: int, flat: torch.Tensor) -> torch.Tensor:
        """Return the sum of a flat tensor over a stage's replicas, on its device."""
        travels = flat if self.world.direct else flat.cpu()
        group = self.stage_groups[stage]
        with peers():
            if self.setup.pipeline.sums == ORDERED:
                sum_now(ServerSum(travels, group))
            else:
                dist.all_reduce(travels, group=group)
        return travels.to(flat.device)

    def _make_group(self, stage: int) -> None:
        """Make the group of a stage's replicas, or of a tie's copies; all workers take part in making it."""
        setup, world = self.setup, self.world
        ring = setup.ring(setup.pipeline.members(stage))
        ranks = [self.ranks[worker] for worker in ring]
        group = world.new_group(world.backend, ranks)
        self.groups.append(group)
        is_member = self.worker.index in ring
        if is_member:
            self._rings[stage], self.stage_groups[stage] = ring, group
        sync = SYNCS[setup.pipeline.sync]
        if not sync.waits:
            return
        if setup.pipeline.shards_stage(stage):
            self._make_exchange(stage, ring, ranks)
            return
        like, buckets = self.worker.summed(stage) if is_member else ([], [])
        shared = share(world, ranks, shared_bytes(buckets, like)) if setup.pipeline.algorithm == ALL_REDUCE else None
        if shared is not None:
            self._shared.append(shared)
        if is_member:
            summing = Summing(group, world.host_copy, setup.pipeline.algorithm, shared)
            self._reducers[stage] = Reducer(buckets, like, summing, self.timer)

    def _make_exchange(self, stage: int, ring: Sequence[int], ranks: Sequence[int]) -> None:
        """Make the objects that scatter a sharded stage's gradients and gather its weights; all workers take part.

        Stages on the same workers share process groups, one for sums and one for weights, since all members start the
        same operations in the same order. They don't if a stage's replicas are on the workers in the reverse order
        (`dualpipe`), so that stage has groups of its own.
        """
        world, pipeline = self.world, self.setup.pipeline
        in_place = pipeline.num_stages == pipeline.chunks  # every worker has a replica of every stage
        order = [pipeline.replica_of(worker, stage) for worker in ring]
        made = []
        for purpose in (REDUCE_SCATTER, ALL_GATHER):
            key = (purpose, *map(str, ranks), *map(str, order), "" if in_place else str(stage))
            if key not in self._groups_of:
                self._groups_of[key] = self._make_file_or_group(ranks)
            made.append(self._groups_of[key])
        if stage not in self.worker.replicas:
            return
        weights = self.worker.replicas[stage].weights
        native = world.direct and pipeline.sums == RING
        own = ring.index(self.worker.index)
        scatter, gather = (
            Exchange(group, order, own, native=native, host_copy=world.host_copy, shared=shared)
            for group, shared in made
        )
        assert weights.sharding is not None
        self._reducers[stage] = ShardReducer(weights.sharding, weights.newest.parameters, scatter, self.timer)
        self._gathers[stage] = WeightGather(weights, gather, self.timer)

    def _make_file_or_group(self, ranks: Sequence[int]) -> tuple[Any, SharedFile | None]:
        """Return a file in memory by which some workers exchange or, if they can't, a group; all workers call it."""
        shared = share(self.world, ranks, 0)
        if shared is not None:
            self._shared.append(shared)
        if any(self.world.exchange(shared is not None)):
            return None, shared
        group = self.world.new_group(self.world.backend, ranks)
        self.groups.append(group)
        return group, None

    def _count(self, stage: int, sync: str, kind: str, label: str, num_bytes: int, span: TimeSpan) -> None:
        """Count the bytes that this worker sends for an operation of a stage's replicas, and record the operation."""
        ring, total, levels = self._rings[stage], 0, set()
        for sender, receiver, sent in traffic(sync, num_bytes, len(ring)):
            level = self.setup.level_between(ring[sender], ring[receiver])
            levels.add(level)
            total += sent
            if ring[sender] == self.worker.index:
                self.num_bytes[kind, level.name] += sent
        slowest = min(levels, key=lambda level: level.sum_bytes_per_s).name
        members = tuple(sorted(ring))
        self.record(Transfer(kind, label, members, members, slowest, total, 0.0, 0.0), span)

    def record(self, transfer: Transfer, span: TimeSpan) -> None:
        """Record a transfer as soon as its times are known."""

        def record_timed() -> None:
            timed = replace(transfer, start_s=span.start.s, end_s=span.end.s)
            self.meter.transfer(timed, None if span.waited is None else span.waited.s)

        self.timer.then(record_timed)
