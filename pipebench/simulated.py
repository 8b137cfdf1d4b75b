"""The simulated engine's answer: an epoch's time, bytes and bubble from durations alone; no accuracy, no TTA."""

from pipebench.meter import Meter, fractions
from pipebench.prepare import Prepared
from pipebench.result import COMPLETED, RunResult
from pipebench.steady import simulate_segment
from pipebench.timeline import Timeline
from pipebench.training import byte_metrics, describe, describe_stages


def simulate_epoch(prepared: Prepared) -> tuple[RunResult, Timeline]:
    """Simulate one epoch, fill and drain included; totals are those of one epoch."""
    setup = prepared.setup
    meter = Meter(setup.pipeline)
    totals = simulate_segment(setup, setup.sampler.minibatches_per_epoch, meter)
    samples = setup.sampler.num_samples
    metrics: dict[str, float] = {
        "total_time_s": totals.end_s,
        "epoch_time_s": totals.end_s,
        "throughput_samples_per_s": samples / totals.end_s,
        "samples_per_update": setup.pipeline.round_size(0) * setup.sampler.minibatch_size,
        **byte_metrics(totals.num_bytes, samples),
        **fractions(totals.busy_s, totals.stall_s, setup.pipeline.num_workers, totals.end_s),
    }
    result = RunResult(
        **describe(prepared),
        outcome=COMPLETED,
        sentence="simulated one epoch; nothing was trained, so there is no accuracy",
        metrics=metrics,
        stages=tuple(describe_stages(prepared)),
    )
    return result, meter.timeline()
