"""What a worker does together with others: all-reduces among its stage's replicas, and a norm that all stages share."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pipebench.distributed.launch_join import leave, peers
from pipebench.distributed.meter import MeasuredMeter
from pipebench.distributed.reducer import Reducer, shared_bytes
from pipebench.distributed.serving import ServerLink, Serving
from pipebench.distributed.shared_sum import Sharing, share
from pipebench.distributed.world import World
from pipebench.engine.accumulation import OnGradient
from pipebench.engine.clipping import norm_of
from pipebench.engine.ring import all_reduce, of_one_type
from pipebench.engine.server import ParameterServer, Pulled
from pipebench.engine.setup import Setup, ranks_of
from pipebench.engine.worker import Worker
from pipebench.schedule.syncs import ALL_REDUCE, SYNCS
from pipebench.simulate.sums import traffic
from pipebench.simulate.timeline import BUFFERS, CONTROL, Transfer


class ProcessCollectives:
    """The process groups of one worker, and what it does in them. All workers make one, at the same time.

    Args:
        setup: what is run.
        world: the processes.
        worker: this process's.
        clock: the run's clock, seconds.
        meter: told of every all-reduce.
        num_bytes: what this worker has sent, by kind and level; added to.

    Attributes:
        stall_s: seconds waited; who reads it sets it back.
    """

    def __init__(
        self,
        setup: Setup,
        world: World,
        worker: Worker,
        clock: Callable[[], float],
        meter: MeasuredMeter,
        num_bytes: Counter[tuple[str, str]],
    ) -> None:
        self._setup = setup
        self._world = world
        self._worker = worker
        self._clock = clock
        self._meter = meter
        self._num_bytes = num_bytes
        self._ranks = ranks_of(setup)
        self._kind = SYNCS[setup.pipeline.sync].kind
        self.stall_s = 0.0
        self._rings: dict[int, list[int]] = {}  # by stage, of those that have replicas; likewise the next two
        self._stage_groups: dict[int, Any] = {}
        self._reducers: dict[int, Reducer] = {}
        self._sharing: list[Sharing] = []
        self._norm_group = world.new_group("gloo") if setup.pipeline.shares_norm else None
        self._groups: list[Any] = [] if self._norm_group is None else [self._norm_group]
        self._lines: dict[int, ServerLink] = {}  # to the server, by stage; the servers here likewise
        self.serving: dict[int, Serving] = {}
        for stage, replicas in enumerate(setup.pipeline.replicas):
            if replicas > 1:
                self._make_group(stage)
            if not SYNCS[setup.pipeline.sync].waits:
                self._make_server(stage)
        self._connect()

    def begin(self, first: int, limit: Callable[[], float]) -> None:
        """Start a segment of training.

        Args:
            first: the minibatch of the run that it begins with.
            limit: tells how many minibatches of it will run, as far as is known.
        """
        for serving in self.serving.values():
            serving.begin(first, self._setup.push_order.get(first), limit)

    def push(
        self, stage: int, replica: int, minibatch: int, version: int, gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Send the stage's server a gradient.

        Raises:
            PeerLostError: the server is gone.
        """
        if replica == 0:
            self.serving[stage].push(minibatch, version, gradients)
            return
        start_s = self._clock()
        self._lines[stage].push(minibatch, version, gradients)
        self._count_weights(stage, self._kind, f"push {minibatch}", start_s, to_server=True)

    def pull(self, stage: int, replica: int, at_least: int) -> Pulled:
        """Return what the replica's last push has made; or, where it is told, what so many have.

        Raises:
            PeerLostError: the server, or one of its replicas, is gone.
        """
        start_s = self._clock()
        if replica == 0:
            return self.serving[stage].pull(at_least)
        pulled = self._lines[stage].pull(at_least)
        self._count_weights(stage, self._kind, "pull", start_s, to_server=False)
        self.stall_s += self._clock() - start_s
        return pulled

    def on_gradient(self, stage: int) -> OnGradient | None:
        """Return what takes every gradient of a round's last backward, if they are reduced while it runs."""
        return self._reducers[stage].add if SYNCS[self._setup.pipeline.sync].overlaps else None

    def contribute(self, stage: int, replica: int, round_index: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Give the gradients of a round that the backward has not reached; of an idle replica, all, as zeros."""
        self._reducers[stage].finish(gradients)

    def wait(self, stage: int, round_index: int) -> list[torch.Tensor | None]:
        """Wait for a round's gradients.

        Raises:
            PeerLostError: another replica is gone.
        """
        start_s, sync = self._clock(), SYNCS[self._setup.pipeline.sync]

        def arrived(num_bytes: int, set_out_s: float) -> None:
            self._count(stage, sync.way, sync.kind, f"R{round_index}", num_bytes, set_out_s)

        gradients = self._reducers[stage].wait(arrived)
        self.stall_s += self._clock() - start_s
        return gradients

    def norm(self, round_index: int) -> torch.Tensor:
        """Return the norm of all stages' gradients: what the parameters' are is gathered, one process has each.

        Raises:
            PeerLostError: a worker is gone.
        """
        setup, start_s = self._setup, self._clock()
        own = self._worker.squared_norms().cpu()
        found = [torch.empty_like(own) for _ in range(self._world.size)]
        with peers():
            dist.all_gather(found, own, group=self._norm_group)
        ring = setup.ring(range(setup.pipeline.num_workers))

        def count(sender: int, receiver: int, num_bytes: int) -> None:
            if ring[sender] == self._worker.index:
                self._num_bytes[CONTROL, setup.level_between(ring[sender], ring[receiver]).name] += num_bytes

        squares = [found[self._ranks[worker]] for worker in ring]
        norm = norm_of(all_reduce(squares, setup.servers(ring), count).to(setup.device))
        self.stall_s += self._clock() - start_s
        return norm

    def average_buffers(self) -> None:
        """Average running statistics over every stage's replicas, as part of the drain.

        Raises:
            PeerLostError: another replica is gone.
        """
        for stage, ring in self._rings.items():
            start_s, buffers = self._clock(), self._worker.buffers(stage)
            for indices in of_one_type(range(len(buffers)), buffers):
                own = [buffers[index] for index in indices]
                flat = torch.cat([buffer.reshape(-1) for buffer in own])
                means = torch.split(self._sum(stage, flat) / len(ring), [buffer.numel() for buffer in own])
                for buffer, mean in zip(own, means, strict=True):
                    buffer.copy_(mean.view(buffer.shape))
                self._count(stage, ALL_REDUCE, BUFFERS, "buffers", flat.nbytes, start_s)
        if not SYNCS[self._setup.pipeline.sync].waits:
            for stage in self._rings:
                self._hand_out_averages(stage)

    def _hand_out_averages(self, stage: int) -> None:
        """Let replicas evaluate with the averages that the server's optimizer keeps, if it keeps any."""
        weights, serving = self._worker.replicas[stage].weights, self.serving.get(stage)
        own = None if serving is None else serving.server.averages
        device = self._setup.device if self._world.direct else torch.device("cpu")
        group, host = self._stage_groups[stage], self._ranks[self._setup.pipeline.workers_of(stage)[0]]
        there = torch.tensor([own is not None], device=device)
        travels = [average.detach().to(device, copy=True) for average in own or weights.newest.parameters]
        start_s = self._clock()
        with peers():
            dist.broadcast(there, host, group=group)
            for average in travels if there else ():
                dist.broadcast(average, host, group=group)
        if there and serving is None:
            weights.take_averages(travels)
            self._count_weights(stage, BUFFERS, "averages", start_s, to_server=False)

    def close(self) -> None:
        """Give up the groups."""
        for line in self._lines.values():
            line.done()
        for serving in self.serving.values():
            serving.close()
        for sharing in self._sharing:
            sharing.close()
        leave(self._groups)

    def _connect(self) -> None:
        """Use every stage's group in every way once, before anybody has anything else to wait for."""
        for reducer in self._reducers.values():
            reducer.connect()
        for stage in self._stage_groups:
            buffers = self._worker.buffers(stage)
            for indices in of_one_type(range(len(buffers)), buffers):
                self._sum(stage, torch.cat([torch.zeros_like(buffers[index]).reshape(-1) for index in indices]))

    def _sum(self, stage: int, flat: torch.Tensor) -> torch.Tensor:
        """Return the sum of what every replica of a stage gives, on the device."""
        travels = flat if self._world.direct else flat.cpu()
        with peers():
            dist.all_reduce(travels, group=self._stage_groups[stage])
        return travels.to(flat.device)

    def _make_group(self, stage: int) -> None:
        """Make the group of a stage's replicas; workers of other stages help to make it."""
        setup, world = self._setup, self._world
        ring = setup.ring(setup.pipeline.workers_of(stage))
        ranks = [self._ranks[worker] for worker in ring]
        group = world.new_group("nccl" if world.direct else "gloo", ranks)
        self._groups.append(group)
        is_member = stage in self._worker.replicas
        if is_member:
            self._rings[stage], self._stage_groups[stage] = ring, group
        sync = SYNCS[setup.pipeline.sync]
        if not sync.waits:
            return
        like, buckets = self._buckets_of(stage) if is_member else ([], [])
        sharing = share(world, ranks, shared_bytes(buckets, like)) if sync.way == ALL_REDUCE else None
        if sharing is not None:
            self._sharing.append(sharing)
        if is_member:
            host_copy = setup.device.type == "cuda" and not world.direct
            self._reducers[stage] = Reducer(
                buckets, like, group, sync=sync.way, host_copy=host_copy, clock=self._clock, sharing=sharing
            )

    def _buckets_of(self, stage: int) -> tuple[list[torch.Tensor], list[list[int]]]:
        """Return a stage's parameters, and the positions of those of every bucket: of one type each."""
        weights = self._worker.replicas[stage].weights
        like = weights.newest.parameters
        return like, [
            list(indices)
            for bucket in self._setup.costs.stages[stage].buckets
            for indices in of_one_type([weights.names.index(name) for name in bucket.parameters], like)
        ]

    def _make_server(self, stage: int) -> None:
        """Make the lines between a stage's server and its replicas; workers of other stages help to make them."""
        host, *others = self._setup.pipeline.workers_of(stage)
        own, lines = self._worker.index, {}
        for worker in others:
            ends = {host: self._ranks[host], worker: self._ranks[worker]}
            group = self._world.new_group("gloo", sorted(ends.values()))
            self._groups.append(group)
            if own in ends:
                peer = ends[host if own == worker else worker]
                like = self._worker.replicas[stage].weights.newest.parameters
                lines[worker] = ServerLink(group, peer, like)
        if own == host:
            server = ParameterServer(self._setup, stage, self._worker.replicas[stage])
            self.serving[stage] = Serving(server, list(lines.values()))
        elif own in lines:
            self._lines[stage] = lines[own]

    def _count_weights(self, stage: int, kind: str, label: str, start_s: float, *, to_server: bool) -> None:
        """Count a gradient, or weights, of the whole stage between this worker and the server: here for both ends."""
        host, own = self._setup.pipeline.workers_of(stage)[0], self._worker.index
        num_bytes = sum(p.nbytes for p in self._worker.replicas[stage].weights.newest.parameters)
        level = self._setup.level_between(own, host).name
        self._num_bytes[kind, level] += num_bytes
        ends = ((own,), (host,)) if to_server else ((host,), (own,))
        self._meter.transfer(Transfer(kind, label, *ends, level, num_bytes, start_s, self._clock()))

    def _count(self, stage: int, sync: str, kind: str, label: str, num_bytes: int, start_s: float) -> None:
        """Count what this worker sends of a sum over a stage's replicas, and note the whole for the timeline."""
        ring, total, levels = self._rings[stage], 0, set()
        for sender, receiver, sent in traffic(sync, num_bytes, len(ring)):
            level = self._setup.level_between(ring[sender], ring[receiver])
            levels.add(level)
            total += sent
            if ring[sender] == self._worker.index:
                self._num_bytes[kind, level.name] += sent
        slowest = min(levels, key=lambda level: level.sum_bytes_per_s).name
        members = tuple(sorted(ring))
        self._meter.transfer(Transfer(kind, label, members, members, slowest, total, start_s, self._clock()))
