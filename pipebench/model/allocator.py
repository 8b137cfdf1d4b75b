"""torch's allocator on a GPU: the bytes that it holds, their peak, and what work allocates beside live tensors.

The bytes of tensors are known without it. It also knows the workspaces of kernels, and what it rounds up and reserves.
"""

import gc
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from pipebench.model.heap import return_freed_blocks

_LARGE_BYTES = 1 << 26  # parameters of a model whose copies are worth a collection of garbage on the host


class Allocator:
    """The allocator of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = (0, 0)  # the most allocated and reserved from `begin` to the last `forget`

    @property
    def held_bytes(self) -> int:
        """Bytes that are allocated now."""
        return torch.cuda.memory_allocated(self._device)

    @property
    def peak_bytes(self) -> int:
        """The most bytes allocated since the last `begin` or `forget`."""
        return torch.cuda.max_memory_allocated(self._device)

    @property
    def most_bytes(self) -> dict[str, int]:
        """The most bytes allocated and reserved since `begin`, as columns of a worker's row."""
        allocated, reserved = self._most()
        return {"allocated_peak_bytes": allocated, "reserved_peak_bytes": reserved}

    @property
    def total_bytes(self) -> int:
        """Bytes of the GPU's memory."""
        return int(torch.cuda.get_device_properties(self._device).total_memory)

    def begin(self) -> None:
        """Reset all peaks when training begins, so that measuring and warm-up don't count; reserved memory stays so."""
        self._before = (0, 0)
        torch.cuda.reset_peak_memory_stats(self._device)

    def forget(self) -> None:
        """Reset `peak_bytes` to what is allocated now; `most_bytes` keeps the peaks before."""
        self._before = self._most()
        torch.cuda.reset_peak_memory_stats(self._device)

    def beside(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], float]]:
        """Do some work; return its result and the bytes that it took beside live tensors, in the form of a clock.

        These are the peak during the work minus the larger of the bytes allocated before and after it.
        """
        before = self.held_bytes
        self.forget()
        value = work()
        beside = max(0, self.peak_bytes - max(before, self.held_bytes))
        return value, lambda: float(beside)

    def _most(self) -> tuple[int, int]:
        allocated, reserved = self._before
        return max(allocated, self.peak_bytes), max(reserved, torch.cuda.max_memory_reserved(self._device))


@cache
def allocator_of(device: torch.device) -> Allocator | None:
    """Return a GPU's allocator, the same object at every call; None for a CPU, whose memory the system counts."""
    return Allocator(device) if device.type == "cuda" else None


def release_copies(device: torch.device, model: nn.Module) -> None:
    """Return the memory of a model's unreferenced copies to the GPU and to the system.

    On the host this is done for large models only, since a collection takes a tenth of a second, see `free_cycles`.
    """
    is_large = sum(parameter.nbytes for parameter in model.parameters()) >= _LARGE_BYTES
    if is_large or device.type == "cuda":
        gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if is_large:
        return_freed_blocks()


def free_cycles(device: torch.device) -> None:
    """Free what only cycles of references keep on a GPU, such as a torch.fx module and its graph.

    Python's collector examines old objects so seldom that they might stay for most of a training. A collection takes a
    tenth of a second, so call this before training only. Stages that are cut anew during training have no cycles.
    """
    if device.type == "cuda":
        gc.collect()
