"""Engines for a job in this process: the simulated and the virtual engine."""

from collections.abc import Sequence

from pipebench.engine.admission import StopRequest
from pipebench.engine.engine import OnLoss, OnUnit
from pipebench.engine.virtual import VirtualEngine
from pipebench.simulate.meter import Meter
from pipebench.simulate.network import Network
from pipebench.simulate.timeline import Timeline
from pipebench.train.interfaces import MakeEngine
from pipebench.train.job import Job
from pipebench.train.memory_forecast import MemoryForecast
from pipebench.train.result import RunResult
from pipebench.train.simulated import simulate_epoch


def simulate(job: Job, forecast: MemoryForecast | None = None) -> tuple[RunResult, Timeline]:
    """Simulate a job; return its result, with the peak memory of `forecast`, and the recorded timeline.

    Simulated is an epoch or, if an extension changes the run on its way, all of it.
    """
    for extended in job.setup.pipeline.hooks("simulate").values():  # of several extensions, the first
        found: tuple[RunResult, Timeline] = extended(job, forecast)
        return found
    return simulate_epoch(job, forecast)


def on_virtual_clock(job: Job, stop: StopRequest | None = None) -> MakeEngine:
    """Return the factory of a job's virtual engine; `stop` may end it early."""

    def make(on_loss: OnLoss, on_unit: OnUnit) -> VirtualEngine:
        meter = Meter(job.setup.pipeline)
        setup = job.setup
        network = Network(setup.cluster, setup.devices, meter.transfer, copies=setup.copies)
        peaks = _predicted_peaks(job) if setup.costs.slices > 1 else None
        return VirtualEngine(
            setup, network, on_loss=on_loss, on_unit=on_unit, meter=meter, stop=stop, predicted_peaks=peaks
        )

    return make


def _predicted_peaks(job: Job) -> tuple[Sequence[int], Sequence[int]]:
    """Return the predicted peak bytes of one device of every worker, and those on its host."""
    memory = MemoryForecast(job).memory
    return [peak.num_bytes for peak in memory.peaks], memory.host_peaks
