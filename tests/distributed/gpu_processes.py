"""What processes do with emulated GPUs, called by name: values go through the host's memory by Gloo, or as by NCCL.

Gloo stands in for NCCL, too: the emulated GPU's memory is the host's. As NCCL's, an operation runs on a stream of its
group, behind what the current stream has been given, and a wait makes the current stream wait. What is used without
such a wait is an error (`tests.races`), even if it is there by chance.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from pipebench.distributed import channel, collectives, reducer, shard_exchange, slices, transport
from pipebench.distributed.world import World
from pipebench.model.device import torch_settings
from pipebench.recipe.schema import EngineRecipe
from tests.distributed.first_use import GlooForNccl
from tests.made_up_gpu import GPU, Gpu, made_up_gpu

T = TypeVar("T")
_USERS = (channel, collectives, reducer, shard_exchange, slices, transport)  # modules that exchange a GPU's tensors


def through_host(world: World, run: Callable[..., T], *given: Any) -> T:
    """Call a function with a world whose processes share an emulated GPU: tensors go through the host's memory."""
    return _on_gpu(replace(world, device=GPU), run, given)


def directly(world: World, run: Callable[..., T], *given: Any) -> T:
    """Call a function with a world whose processes have emulated GPUs, which exchange tensors as by NCCL."""
    there = {each.name: getattr(world, each.name) for each in fields(world)}
    return _on_gpu(GlooForNccl(**{**there, "device": GPU, "direct": True}), run, given)


def _on_gpu(world: World, run: Callable[..., T], given: Sequence[Any]) -> T:
    with ExitStack() as stack:
        stack.enter_context(torch_settings(EngineRecipe(threads=1)))
        stand_in = _Distributed(stack.enter_context(made_up_gpu()))
        for module in _USERS:
            stack.enter_context(patch.object(module, "dist", stand_in))
        return run(world, *given)


class _Work:
    """An operation on a stream of its group."""

    def __init__(self, gpu: Gpu, stream: str, work: Any, tensors: Sequence[torch.Tensor]) -> None:
        self._gpu, self._work, self._tensors = gpu, work, tensors  # the tensors are referenced until the wait
        self._done = gpu.races.clock(stream)
        self._is_over = False

    def wait(self) -> None:
        """Let the current stream wait."""
        if not self._is_over:  # a second wait for a message of Gloo's never ends; NCCL's are waited for on two streams
            self._work.wait()
        self._gpu.races.order(self._gpu.stream.name, self._done)
        self._is_over, self._tensors = True, ()

    def is_completed(self) -> bool:
        """Return whether it has been waited for, from which Gloo knows."""
        if self._is_over:
            self._gpu.races.order(self._gpu.races.HOST, self._done)
        return self._is_over

    def _get_duration(self) -> float:
        return 0.0


class _Distributed:
    """Stands before `torch.distributed`."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.isend = self._one("isend", reads=True, writes=False)
        self.irecv = self._one("irecv", reads=False, writes=True)
        self.send = self._one("isend", reads=True, writes=False, waits=True)
        self.recv = self._one("irecv", reads=False, writes=True, waits=True)

    def _one(self, name: str, *, reads: bool, writes: bool, waits: bool = False) -> Callable[..., Any]:
        def call(tensor: torch.Tensor, peer: int, group: Any = None, tag: int = 0) -> Any:
            start = lambda: getattr(dist, name)(tensor, peer, group=group, tag=tag)  # noqa: E731
            return self._started(name, group, start, [tensor] if reads else [], [tensor] if writes else [], waits=waits)

        return call

    def all_reduce(self, data: torch.Tensor, *, group: Any, async_op: bool = False) -> Any:
        start = lambda: dist.all_reduce(data, group=group, async_op=True)  # noqa: E731
        return self._started("all_reduce", group, start, [data], [data], waits=not async_op)

    def all_gather(self, found: list[torch.Tensor], own: torch.Tensor, *, group: Any, async_op: bool = False) -> Any:
        start = lambda: dist.all_gather(found, own, group=group, async_op=True)  # noqa: E731
        return self._started("all_gather", group, start, [own], found, waits=not async_op)

    def all_to_all_single(
        self, output: torch.Tensor, given: torch.Tensor, takes: Any, gives: Any, *, group: Any, async_op: bool
    ) -> Any:
        start = lambda: dist.all_to_all_single(output, given, takes, gives, group=group, async_op=True)  # noqa: E731
        return self._started("all_to_all", group, start, [given], [output], waits=not async_op)

    def reduce_scatter(self, output: torch.Tensor, given: list[torch.Tensor], *, group: Any, async_op: bool) -> Any:
        start = lambda: dist.reduce_scatter(output, given, group=group, async_op=True)  # noqa: E731
        return self._started("reduce_scatter", group, start, given, [output], waits=not async_op)

    def P2POp(self, kind: Any, tensor: torch.Tensor, *, group: Any, group_peer: int) -> Any:  # noqa: N802
        return kind == self.isend, tensor, group, group_peer

    def batch_isend_irecv(self, operations: Sequence[Any]) -> list[Any]:
        sent = [tensor for is_sent, tensor, *_ in operations if is_sent]
        taken = [tensor for is_sent, tensor, *_ in operations if not is_sent]
        made = [
            dist.P2POp(dist.isend if is_sent else dist.irecv, tensor, group=group, group_peer=peer)
            for is_sent, tensor, group, peer in operations
        ]
        return [self._started("batch", operations[0][2], lambda: _All(dist.batch_isend_irecv(made)), sent, taken)]

    def _started(
        self, name: str, group: Any, start: Callable[[], Any], reads: Any, writes: Any, *, waits: bool = False
    ) -> Any:
        gpu, tensors = self._gpu, [*reads, *writes]
        by_nccl = any(map(gpu.on_gpu.has, tensors))
        assert by_nccl is all(map(gpu.on_gpu.has, tensors)), f"{name} of tensors on two devices"
        stream = f"NCCL's of {id(group)}" if by_nccl else gpu.races.HOST
        gpu.races.order(stream, gpu.races.clock(gpu.stream.name) if by_nccl else {})
        known = [[each for each in used if by_nccl or gpu.pinned.has(each)] for used in (reads, writes)]
        gpu.races.use(stream, name, *known)
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            work = start()
        if not by_nccl:
            return work.wait() if waits else work
        made = _Work(gpu, stream, work, tensors)
        return made.wait() if waits else made

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)


class _All:
    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()
