"""How a job is simulated: one epoch of it, or all of it where something changes on the way."""

from pipebench.simulate.timeline import Timeline
from pipebench.train.job import Job
from pipebench.train.memory_forecast import MemoryForecast
from pipebench.train.result import RunResult
from pipebench.train.simulated import simulate_epoch
from pipebench.train.simulated_moves import simulate_moving
from pipebench.train.simulated_search import simulate_search


def simulate(job: Job, watch: MemoryForecast | None = None) -> tuple[RunResult, Timeline]:
    """Return what a job comes to by its durations alone, and the recorded part of its timeline.

    Args:
        job: what is simulated.
        watch: watches, and foretells the peaks of memory.
    """
    if job.search is not None:
        return simulate_search(job, watch)
    return (simulate_moving if job.setup.repartitions else simulate_epoch)(job, watch)
