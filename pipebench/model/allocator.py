"""torch's allocator on a GPU: what it holds, the most that it has held, and what work takes beside live tensors.

A tensor's bytes are known without it. Workspaces of kernels, what it rounds up and what it reserves are not.
"""

import gc
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from pipebench.model.heap import return_freed_blocks

_LARGE_BYTES = 1 << 26  # parameters of a model whose copies are worth looking for on the host


class Allocator:
    """The allocator of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = (0, 0)  # the most allocated and reserved until the last `forget`

    @property
    def held_bytes(self) -> int:
        """Bytes of all that is allocated now."""
        return torch.cuda.memory_allocated(self._device)

    @property
    def peak_bytes(self) -> int:
        """The most since the last `forget`."""
        return torch.cuda.max_memory_allocated(self._device)

    @property
    def most_bytes(self) -> dict[str, int]:
        """The most allocated and reserved since `begin`, as columns of a worker's row."""
        allocated, reserved = self._most()
        return {"allocated_peak_bytes": allocated, "reserved_peak_bytes": reserved}

    @property
    def total_bytes(self) -> int:
        """The memory of the GPU."""
        return int(torch.cuda.get_device_properties(self._device).total_memory)

    def begin(self) -> None:
        """Let peaks begin now, with training: what measuring and warm-up allocated is no part of them.

        What torch has reserved by then it keeps.
        """
        self._before = (0, 0)
        torch.cuda.reset_peak_memory_stats(self._device)

    def forget(self) -> None:
        """Let the peak begin at what is allocated now."""
        self._before = self._most()
        torch.cuda.reset_peak_memory_stats(self._device)

    def beside(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], float]]:
        """Do some work; return its result and, as a clock would its seconds, the bytes it took beside live tensors.

        These are the peak within less the larger of what is allocated before and after.
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
    """Return a device's allocator, always the same; None of a CPU, whose memory the system counts."""
    return Allocator(device) if device.type == "cuda" else None


def release_copies(device: torch.device, model: nn.Module) -> None:
    """Return the memory of a model's copies that are no longer needed to the GPU and to the system.

    On the host only a large model's: it takes a tenth of a second, see `free_cycles`.
    """
    is_large = sum(parameter.nbytes for parameter in model.parameters()) >= _LARGE_BYTES
    if is_large or device.type == "cuda":
        gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if is_large:
        return_freed_blocks()


def free_cycles(device: torch.device) -> None:
    """Free on a GPU what only cycles of references hold, such as a module of torch.fx and its graph.

    Python's collector may not come to them for most of a training, because it looks through old objects seldom. It
    takes a tenth of a second, so this is for what comes before training; stages that are cut anew have no cycles.
    """
    if device.type == "cuda":
        gc.collect()
