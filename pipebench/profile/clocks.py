"""Clocks that time a piece of work by the host's clock or a GPU's events, and are read later.

Reading a GPU's event waits for it. So a pass times many pieces of work first and reads their times at its end.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

Reading = Callable[[], float]  # seconds
# Does some work; returns its result and a callable that returns its seconds, to call after all work has been issued.
Clock = Callable[[Callable[[], Any]], tuple[Any, Reading]]


def device_clock(device: torch.device, now: Callable[[], float] = time.perf_counter) -> Clock:
    """Return a device's clock: a GPU's events, or for a CPU `now`, which returns the host's time in seconds."""
    if device.type == "cuda":
        return _cuda_clock

    def clock(work: Callable[[], Any]) -> tuple[Any, Reading]:
        start_s = now()
        value = work()
        seconds = now() - start_s
        return value, lambda: seconds

    return clock


def _cuda_clock(work: Callable[[], Any]) -> tuple[Any, Reading]:
    """Time by events on the stream, so that the host needn't synchronise between layers."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    value = work()
    end.record()

    def read() -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    return value, read
