"""The reason why a chosen plan differs from the published one, from runs of both."""

from pipebench.formats import num_bytes, percent, seconds
from pipebench.report.metrics import metrics_of
from pipebench.schedule.notation import STRAIGHT
from pipebench.show.verdict import planned_s
from pipebench.simulate.meter import MEMORY
from pipebench.train.result import RunResult

_SUMS = ("comm_bytes_per_sample_all_reduce", "comm_bytes_per_sample_parameter_server")
_NOTHING = 0.005  # relative difference below which epoch times are equal


def reason_for_plan(chosen: RunResult, published: RunResult | str) -> str:
    """Return in a few sentences why a plan was chosen; `published` is the other's result, or why it has none."""
    if isinstance(published, str):
        return f"the published plan doesn't run here: {published}"
    if MEMORY in published.notes and MEMORY not in chosen.notes:
        return f"the published {published.plan} doesn't fit: {published.notes[MEMORY]}"
    longer = published.metrics["epoch_time_s"] / chosen.metrics["epoch_time_s"] - 1
    if abs(longer) < _NOTHING:
        verdict = f"the published {published.plan} takes as long here"
    else:
        verdict = (
            f"the published {published.plan} takes {percent(abs(longer))} {'more' if longer > 0 else 'less'} time here"
        )
    return f"{verdict}. {_spent(published)}; {_spent(chosen)}"


def same_plan(one: str, other: str) -> bool:
    """Return whether two texts denote the same plan, such as `Straight` and `1-1-1`.

    >>> same_plan("1-1-1", "Straight"), same_plan("15-1", "16")
    (True, False)
    """
    return _written_one_way(one) == _written_one_way(other)


def _written_one_way(plan: str) -> str:
    replicas = plan.lower().replace(" ", "").split("-")
    return STRAIGHT if len(replicas) > 1 and {*replicas} == {"1"} else "-".join(replicas)


def _spent(result: RunResult) -> str:
    """Return how a run spends its time: its slowest stage, waiting for bytes, bytes sent."""
    metrics = metrics_of(result)
    size = int(result.recipe["train.minibatch_size"])
    minibatch_s = size / metrics["throughput_samples_per_s"]
    shares = [computing_s / minibatch_s for computing_s in planned_s(result, size)]
    busiest = max(range(len(shares)), key=lambda index: shares[index])
    summed = sum(metrics.get(name, 0.0) for name in _SUMS)
    sent = f"{num_bytes(metrics['comm_bytes_per_sample'])} sent per sample"
    whose = (
        f"stage {busiest} computes {percent(min(1.0, shares[busiest]))} of it"
        if len(shares) > 1
        else (f"workers compute {percent(min(1.0, shares[0]))} of it")
    )
    return (
        f"{result.plan}: {seconds(minibatch_s)} per minibatch, {whose}, "
        f"{percent(metrics['comm_stall_fraction'])} of all time is waiting for bytes, {sent}, "
        f"{num_bytes(summed)} of it sums of gradients"
    )
