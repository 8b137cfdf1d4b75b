"""Tensors on their way by NCCL, and how long they take.

Torch records an event before and after an operation on NCCL's stream of a group, if the group times its operations
(`World.new_group`). A send begins when its stream has come to it and ends when its tensor is received or in NCCL's
buffers. So the sending GPU's clock alone times a message, without one more stream for each channel: streams beyond
CUDA's hardware queues would wait for each other.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from pipebench.distributed.instruction_times import HostWatch
from pipebench.distributed.launch_join import peers
from pipebench.model.memory_format import in_order


class DirectSends:
    """What a channel sends by NCCL to `peer` in the group of the two workers; `watch` times it, None times nothing."""

    def __init__(self, group: Any, peer: int, watch: HostWatch | None) -> None:
        self._group, self._peer, self._watch = group, peer, watch
        self._leaving: deque[tuple[list[Any], list[torch.Tensor]]] = deque()  # the device still reads the tensors
        self._starts_s, self._lasted_s = array("d"), array("d")

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send tensors, in order, when all computing until here is done."""
        self._drop_sent()
        kept = [in_order(tensor.detach()) for tensor in tensors]
        if self._watch is not None:
            start = self._watch.mark()
            self._watch.then(lambda: self._starts_s.append(start.s))
        with peers():
            works = [dist.isend(tensor, self._peer, group=self._group) for tensor in kept]
        self._leaving.append((works, kept))

    def flush(self) -> None:
        """Let later computing wait until everything has left."""
        with peers():
            for works, _ in self._leaving:
                for work in works:
                    work.wait()
        if self._watch is None:
            self._leaving.clear()

    def times_s(self) -> list[float]:
        """Return of every message since the last call when it could leave, and how long it took from then.

        Everything is sent, and all moments are known.
        """
        self._drop_sent()
        found, end_s = list[float](), 0.0
        for start_s, lasted_s in zip(self._starts_s, self._lasted_s, strict=True):
            end_s = max(start_s, end_s) + lasted_s  # one after the other
            found.extend((start_s, end_s - start_s))
        self._starts_s, self._lasted_s = array("d"), array("d")
        return found

    def _drop_sent(self) -> None:
        with peers():
            while self._leaving and all(work.is_completed() for work in self._leaving[0][0]):
                works, _ = self._leaving.popleft()
                if self._watch is not None:
                    self._lasted_s.append(sum(work._get_duration() for work in works) / 1e3)
