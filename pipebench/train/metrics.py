"""What a run came to, in numbers: metrics under their tracking names, and a row per stage."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pipebench.simulate.meter import sum_by
from pipebench.simulate.timeline import ACTIVATION, ALL_REDUCE, BUFFERS, EVALUATION, GRADIENT
from pipebench.train.prepare import DISTRIBUTED, Job


def describe(job: Job) -> dict[str, Any]:
    """Return the part of a result that is known before the run."""
    recipe, timing = job.recipe, job.profile.note
    wall = recipe.engine.kind == DISTRIBUTED
    if wall and job.profile.source != "measured":
        timing = f"measured while it ran, on {job.setup.device.type}; planned by: {timing}"
    return {
        "name": recipe.name,
        "mode": recipe.parallelism.mode,
        "plan": str(job.setup.plan),
        "engine": recipe.engine.kind,
        "clock": "wall" if wall else "virtual",
        "timing": timing,
        "seed": recipe.train.seed,
    }


def together(facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Put together what the processes counted; lists are by worker."""
    num_bytes: Counter[tuple[str, str]] = Counter()
    for each in facts:
        num_bytes.update({(kind, level): count for kind, level, count in each["num_bytes"]})
    lists = {name: [value for each in facts for value in each[name]] for name in ("peak_bytes", "weight_versions_max")}
    return {"num_bytes": num_bytes, **lists}


def byte_metrics(num_bytes: Mapping[tuple[str, str], int], samples: int) -> dict[str, float]:
    """Return communication metrics from bytes by (kind, level).

    The total is activations, gradients and all-reduces; buffers and evaluation are given apart.
    """
    counts = dict(num_bytes)
    training = (ACTIVATION, GRADIENT, ALL_REDUCE)
    kinds = sum_by(counts, 0, (*training, BUFFERS, EVALUATION))
    levels = sum_by(counts, 1, training)
    total = sum(kinds.get(kind, 0) for kind in training)
    metrics: dict[str, float] = {"comm_bytes_total": total}
    metrics |= {f"comm_bytes_{kind.replace('-', '_')}": value for kind, value in kinds.items()}
    metrics |= {f"comm_bytes_level_{level}": value for level, value in levels.items()}
    if samples > 0:
        metrics["comm_bytes_per_sample"] = total / samples
        for kind in training:
            if kind in kinds:
                metrics[f"comm_bytes_per_sample_{kind.replace('-', '_')}"] = kinds[kind] / samples
    return metrics


def describe_stages(job: Job) -> list[dict[str, Any]]:
    """Return what is known of every stage before the run."""
    setup = job.setup
    travels = max(setup.costs.stages[0].forward_s)
    names = [layer.name for layer in setup.graph.layers]
    return [
        {
            "index": index,
            "replicas": stage.replicas,
            "first_layer": names[stage.start],
            "last_layer": names[stage.stop - 1],
            "num_layers": stage.stop - stage.start,
            "depth": setup.pipeline.warmups[index],
            "forward_s": costs.forward_s[travels],
            "backward_s": costs.backward_s[travels],
            "update_s": costs.update_s,
            "samples_per_update": setup.pipeline.round_size(index) * setup.sampler.minibatch_size,
            "parameter_bytes": sum(bucket.num_bytes for bucket in costs.buckets),
        }
        for index, (stage, costs) in enumerate(zip(setup.plan.stages, setup.costs.stages, strict=True))
    ]


def stage_rows(job: Job, facts: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return a row per stage; `facts` as `together` returns them."""
    rows = describe_stages(job)
    for worker, (stage, _) in enumerate(job.setup.pipeline.places):
        row = rows[stage]
        versions, peak = facts["weight_versions_max"][worker], facts["peak_bytes"][worker]
        row["weight_versions_max"] = max(row.get("weight_versions_max", 0), versions)
        row["peak_memory_bytes"] = max(row.get("peak_memory_bytes", 0), peak)
    return tuple(rows)
