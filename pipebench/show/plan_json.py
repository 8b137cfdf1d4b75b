"""A plan as plain data, numbers unrounded."""

from dataclasses import asdict
from typing import Any

from pipebench.model.plan_layers import form_of
from pipebench.planner.plans import PlanEstimate
from pipebench.show.plan_answer import Answer, bottleneck_of, depth_is_lowered, quotient, ties


def plan_data(answer: Answer) -> dict[str, Any]:
    """Return the answer as plain data, numbers unrounded; docs/planner.md documents the keys."""
    comparison, request, cluster = answer.comparison, answer.request, answer.request.cluster
    best, dp, bottleneck = comparison.best, comparison.dp, bottleneck_of(answer, comparison.best)
    return {
        "name": answer.name,
        **plan_summary(answer, best),
        "bottleneck": {"stage": next(iter(bottleneck.stages), None), **asdict(bottleneck)},
        "plan": form_of(best.plan, answer.layer_names).data(),
        "stages": [asdict(stage) for stage in best.stages],
        "stage_times": [asdict(each) for each in answer.times],
        "idle_workers": cluster.num_workers - len(best.plan.devices),
        "noam": best.plan.noam,
        "depth_lowered_for_memory": depth_is_lowered(answer),
        "tied": [{**asdict(each), "stage": each.stages[0]} for each in ties(answer)],
        "speedup_over_dp": quotient(dp.minibatch_s, best.minibatch_s),
        "bottleneck_speedup_over_dp": quotient(dp.bottleneck_s, best.bottleneck_s),
        **{f"dp_{key}": value for key, value in _outcome(answer, dp).items()},
        "recipe_plan": None if answer.given is None else plan_summary(answer, answer.given),
        "dp_fits_in_memory": "dp" not in comparison.refused,
        "others": [plan_summary(answer, found) for found in comparison.others],
        "refused": comparison.refused,
        "cost_model": request.model.name,
        "cluster": {"name": cluster.name, "device": cluster.device, "levels": [*map(asdict, cluster.levels)]},
        "num_workers": cluster.num_workers,
        "memory_limit_bytes": cluster.memory_bytes,
        "minibatch_size": request.minibatch_size if answer.says_samples else None,
        "profile": {key: getattr(request.profile, key) for key in ("model", "device", "source", "note")},
        "runnable": request.runnable,
        "num_states": comparison.num_states,
        "bottleneck_at_most": comparison.at_most,
        "minibatch_at_least_s": best.at_least_s or None,
        "tried_all": best.tried_all,
        "solve_s": comparison.solve_s,
        "took_s": {**comparison.took_s, "in all": answer.total_s},
    }


def plan_summary(answer: Answer, found: PlanEstimate) -> dict[str, Any]:
    """Return the part of `plan_data` that every plan has, other modes' too."""
    return {
        "mode": found.plan.mode,
        "config": str(found.plan),
        "found_by": found.found_by,
        "replicas": list(found.plan.replicas),
        "depth": found.plan.depth,
        "microbatches": found.microbatches,
        "accumulate": found.accumulate,
        "port_s": found.port_s,
        "memory_choices": [asdict(each) for each in found.choices],
        **_outcome(answer, found),
    }


def _outcome(answer: Answer, found: PlanEstimate) -> dict[str, Any]:
    """Return a plan's predicted rates, bytes and memory."""
    rate, known = quotient(1.0, found.minibatch_s), answer.says_samples
    sent = {**found.num_bytes, "total": sum(found.num_bytes.values())}
    return {
        "bottleneck_s": found.bottleneck_s,
        "minibatch_s": found.minibatch_s,
        "is_simulated": found.is_simulated,
        "minibatches_per_s": rate,
        "samples_per_s": rate * answer.size if known and rate is not None else None,
        "bytes_per_minibatch": sent,
        "bytes_per_sample": {kind: value / answer.size for kind, value in sent.items()} if known else None,
        "memory_bytes": found.memory_bytes,
    }
