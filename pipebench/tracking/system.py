"""System metrics of this host, by MLflow's own monitors: CPU, memory, disk, network and the GPU, if any.

MLflow would start a thread that writes to the store. Here the sender reads MLflow's monitors instead, so that a SQLite
file has one writer.
"""

import logging
import time
from importlib import import_module
from typing import Any

from pipebench.tracking.record import LogEntry

SYSTEM = "system/"  # MLflow shows metrics of this prefix apart
SAMPLE_EVERY_S = 10.0  # MLflow's own default
_MONITORS = ("cpu_monitor.CPUMonitor", "disk_monitor.DiskMonitor", "network_monitor.NetworkMonitor")
_GPU_MONITORS = ("gpu_monitor.GPUMonitor", "rocm_monitor.ROCMMonitor")
_FOLDER = "mlflow.system_metrics.metrics"

_log = logging.getLogger(__name__)


class SystemMetrics:
    """Samples this host every ten seconds. For the background thread only; never raises."""

    def __init__(self, first_step: int) -> None:
        """Start the available monitors; the first sample has step `first_step`."""
        self._step = first_step
        self._monitors = [monitor for path in _MONITORS if (monitor := _start(path)) is not None]
        self._monitors += [monitor for path in _GPU_MONITORS if (monitor := _start(path)) is not None][:1]
        self._due_s = time.monotonic() + SAMPLE_EVERY_S

    def due_entry(self) -> LogEntry | None:
        """Return a sample if one is due, else None."""
        if time.monotonic() < self._due_s:
            return None
        self._due_s = time.monotonic() + SAMPLE_EVERY_S
        values: dict[str, float] = {}
        for monitor in self._monitors:
            values |= _read(monitor)
        step = self._step
        self._step += 1
        return LogEntry(metrics={f"{SYSTEM}{name}": float(value) for name, value in values.items()}, step=step)


def _start(path: str) -> Any:
    """Return one of MLflow's monitors, started; None if this host has no such device or counters."""
    module, name = path.split(".")
    try:
        monitor = getattr(import_module(f"{_FOLDER}.{module}"), name)()  # MLflow's monitors are not typed
        monitor.collect_metrics()  # the CPU's share counts from the previous call, so the first has no meaning
        monitor.clear_metrics()
    except Exception as error:  # no such device, a missing library, a container that hides the counters
        _log.debug("no system metrics from %s: %s", path, error)
        return None
    return monitor


def _read(monitor: Any) -> dict[str, float]:
    try:
        monitor.collect_metrics()
        values = dict(monitor.aggregate_metrics())
        monitor.clear_metrics()
    except Exception as error:
        _log.debug("no system metrics this time: %s", error)
        return {}
    return values
