"""What a worker does together with others: all-reduces among its stage's replicas, and a norm that all stages share."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from pipebench.distributed.launch_join import leave, peers
from pipebench.distributed.meter import MeasuredMeter
from pipebench.distributed.reducer import Reducer
from pipebench.distributed.world import World
from pipebench.engine.ring import of_one_type, ring_all_reduce
from pipebench.engine.setup import Setup, ranks_of
from pipebench.engine.worker import Worker
from pipebench.simulate.network import ring_bytes
from pipebench.simulate.timeline import ALL_REDUCE, BUFFERS, CONTROL, Transfer


class Together:
    """The process groups of one worker, and what it does in them. All workers make one, at the same time.

    Args:
        setup: what is run.
        world: the processes.
        worker: this process's.
        clock: the run's clock, seconds.
        meter: told of every all-reduce.
        num_bytes: what this worker has sent, by kind and level; added to.
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
        self._ring = [worker.index]
        self._group: Any = None
        self._reducer: Reducer | None = None
        self._norm_group = world.new_group("gloo") if setup.pipeline.shares_norm else None
        self._groups: list[Any] = [] if self._norm_group is None else [self._norm_group]
        for stage, replicas in enumerate(setup.pipeline.replicas):
            if replicas > 1:
                self._make_group(stage, replicas)
        self._connect()

    def backward(self, unit: int) -> None:
        """Run the backward that completes a round's gradients; they are reduced while it runs."""
        if self._reducer is None:
            self._worker.backward(unit)
        else:
            self._worker.backward(unit, self._reducer.add)
            self._reducer.finish(self._worker.replica.gradients)

    def wait(self, round_index: int, *, has_begun: bool) -> None:
        """Wait for a round's gradients.

        Args:
            round_index: the round.
            has_begun: False if no backward of it ran here: then this worker brings zeros, now.

        Raises:
            PeerLostError: another replica is gone.
        """
        assert self._reducer is not None
        if not has_begun:
            self._reducer.finish(self._worker.replica.gradients)

        def arrived(num_bytes: int, set_out_s: float) -> None:
            self._count(ALL_REDUCE, f"R{round_index}", num_bytes, set_out_s)

        self._worker.replica.gradients = self._reducer.wait(arrived)

    def norm(self) -> torch.Tensor:
        """Return the norm of all stages' gradients: squares are gathered and added as the virtual engine adds them.

        Raises:
            PeerLostError: a worker is gone.
        """
        setup = self._setup
        own = self._worker.squared_norm() if self._worker.replica_index == 0 else torch.zeros(1)
        found = [torch.zeros(1) for _ in range(self._world.size)]
        with peers():
            dist.all_gather(found, own.cpu(), group=self._norm_group)
        ring = setup.ring(range(setup.pipeline.num_workers))

        def count(sender: int, receiver: int, num_bytes: int) -> None:
            if ring[sender] == self._worker.index:
                self._num_bytes[CONTROL, setup.level_between(ring[sender], ring[receiver]).name] += num_bytes

        squares = [found[self._ranks[worker]] for worker in ring]
        return ring_all_reduce(squares, count).sqrt().to(setup.device)

    def average_buffers(self) -> None:
        """Average running statistics over the stage's replicas, as part of the drain (DESIGN: BatchNorm).

        Raises:
            PeerLostError: another replica is gone.
        """
        buffers = self._worker.buffers()
        if len(self._ring) == 1 or not buffers:
            return
        start_s = self._clock()
        for indices in of_one_type(range(len(buffers)), buffers):
            own = [buffers[index] for index in indices]
            flat = torch.cat([buffer.reshape(-1) for buffer in own])
            means = torch.split(self._sum(flat) / len(self._ring), [buffer.numel() for buffer in own])
            for buffer, mean in zip(own, means, strict=True):
                buffer.copy_(mean.view(buffer.shape))
            self._count(BUFFERS, "buffers", flat.nbytes, start_s)

    def close(self) -> None:
        """Give up the groups."""
        leave(self._groups)

    def _connect(self) -> None:
        """Use the stage's group in every way once, before anybody has anything else to wait for."""
        if self._reducer is not None:
            self._reducer.connect()
            buffers = self._worker.buffers()
            for indices in of_one_type(range(len(buffers)), buffers):
                self._sum(torch.cat([torch.zeros_like(buffers[index]).reshape(-1) for index in indices]))

    def _sum(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the sum of what every replica of the stage gives, on the device."""
        travels = flat if self._world.direct else flat.cpu()
        with peers():
            dist.all_reduce(travels, group=self._group)
        return travels.to(flat.device)

    def _make_group(self, stage: int, replicas: int) -> None:
        """Make the group of a stage's replicas; workers of other stages help to make it."""
        setup, world = self._setup, self._world
        first = setup.pipeline.worker(stage, 0)
        ring = setup.ring(range(first, first + replicas))
        ranks = [self._ranks[worker] for worker in ring]
        group = world.new_group("nccl" if world.direct else "gloo", ranks)
        self._groups.append(group)
        if stage != self._worker.stage_index:
            return
        self._ring, self._group = ring, group
        weights = self._worker.replica.weights
        like = weights.newest.parameters
        buckets = [
            indices
            for bucket in setup.costs.stages[stage].buckets
            for indices in of_one_type([weights.names.index(name) for name in bucket.parameters], like)
        ]
        host_copy = setup.device.type == "cuda" and not world.direct
        self._reducer = Reducer(buckets, like, group, host_copy=host_copy, clock=self._clock)

    def _count(self, kind: str, label: str, num_bytes: int, start_s: float) -> None:
        """Count what this worker sends in a ring all-reduce, and note the whole for the timeline."""
        ring = self._ring
        sent = ring_bytes(num_bytes, len(ring))
        levels = [self._setup.level_between(*path) for path in zip(ring, ring[1:] + ring[:1], strict=True)]
        position = ring.index(self._worker.index)
        self._num_bytes[kind, levels[position].name] += sent[position]
        slowest = min(levels, key=lambda level: level.goodput_bytes_per_s).name
        members = tuple(sorted(ring))
        self._meter.transfer(Transfer(kind, label, members, members, slowest, sum(sent), start_s, self._clock()))
