"""The answer of `pipebench plan` and the bottleneck of a plan, also as plain data with unrounded numbers."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pipebench.model.plan import PARAMETER, shared, stage_of_layers
from pipebench.model.plan_layers import form_of
from pipebench.planner.plans import Comparison, PlanEstimate, Request, StageTime
from pipebench.profile.model import LayerProfile
from pipebench.schedule.modes import Mode
from pipebench.schedule.syncs import algorithm_of
from pipebench.simulate.costs import loading_stages
from pipebench.simulate.network import Network

COMPUTE, SYNC, TRANSFER, LOADING = "compute", "sync", "transfer", "loading"
WAITING, PORT, RECURRENCE = "waiting", "port", "recurrence"
_CAUSES = {
    COMPUTE: "computing",
    SYNC: "gradient sum",
    TRANSFER: "transfers",
    WAITING: "wait for minibatches to come back from later stages",
    LOADING: "loading of data",
}
_PARTS = {"compute_s": COMPUTE, "sync_s": SYNC, "transfer_s": TRANSFER}
ALMOST = 1e-6  # relative difference below which two times are equal


@dataclass(frozen=True)
class PlanFindings:
    """The answer of `pipebench plan`."""

    name: str  # of the model
    request: Request  # to the planner
    mode: Mode  # of the best plan
    comparison: Comparison  # the planner's result
    says_samples: bool  # whether the minibatch size is known; if not, rates are in minibatches
    # Predicted seconds per minibatch of the best plan with one more minibatch in flight; None if not simulated
    spare_s: float | None = None
    # How every stage of the best plan spends its time in the simulator; empty if the plan is too large to simulate
    times: tuple[StageTime, ...] = ()
    # Simulated peak bytes of a replica of the best plan, by stage, where a device has less
    over_memory: Mapping[int, int] = field(default_factory=dict)
    given: PlanEstimate | None = None  # the plan that the recipe names; None if it names none
    total_s: float = 0.0  # seconds that the command took until the answer

    @property
    def size(self) -> int:
        """Samples per minibatch; 1 if unknown."""
        return self.request.minibatch_size if self.says_samples else 1

    @property
    def unit(self) -> str:
        """The unit of work of rates and bytes."""
        return "sample" if self.says_samples else "minibatch"

    @property
    def units(self) -> str:
        """The plural of `unit`."""
        return "samples" if self.says_samples else "minibatches"

    @property
    def rows(self) -> tuple[LayerProfile, ...]:
        """The layers at the size of the best plan's microbatches, or of whole minibatches."""
        return self.request.profile.layers[self.rows_size]

    @property
    def rows_size(self) -> int:
        """Samples of a microbatch or minibatch in `rows`."""
        whole = self.request.minibatch_size
        part = -(-whole // self.comparison.best.microbatches)
        return part if part in self.request.profile.layers else whole

    @property
    def layer_names(self) -> list[str]:
        """The names of the layers in the order of the best plan."""
        return [self.rows[layer].name for layer in self.comparison.best.order]


@dataclass(frozen=True)
class Bottleneck:
    """What limits a plan's speed."""

    stages: tuple[int, ...]  # of one worker, usually a single one; empty for a port and the recurrence
    cause: str  # COMPUTE, SYNC, TRANSFER, LOADING, WAITING, PORT or RECURRENCE

    def __str__(self) -> str:
        if not self.stages:
            return "the busiest port between components" if self.cause == PORT else "the recurrence, level by level"
        return (
            f"stage{'s' if len(self.stages) > 1 else ''} {' and '.join(map(str, self.stages))}'s {_CAUSES[self.cause]}"
        )


def bottleneck_of(answer: PlanFindings, found: PlanEstimate) -> Bottleneck:
    """Return a plan's bottleneck: the largest part of the slowest stage, or the busiest port."""
    # A worker's stages count together; most plans have one per worker.
    sums_s = [sum(stage.stage_s for stage in stages) for stages in found.by_position]
    index = max(range(len(sums_s)), key=lambda position: sums_s[position])
    stage_s, stages = sums_s[index], found.by_position[index]
    own = tuple(found.plan.by_position[index])
    parts = {cause: sum(getattr(stage, part) for stage in stages) for part, cause in _PARTS.items()}
    if found.port_s > stage_s * (1 + ALMOST):
        return Bottleneck((), PORT)
    if found.plan.chunks == 1:
        if found.bottleneck_s > stage_s * (1 + ALMOST):
            return Bottleneck((), RECURRENCE)  # the hierarchical recurrence may count more than the stages' times
        unit_size = -(-answer.request.minibatch_size // found.microbatches)
        load_s = answer.request.profile.load_s.get(unit_size, 0.0) * found.microbatches / found.plan.replicas[index]
        loads = answer.request.model.has_ports and index in _loading(answer, found)
        if loads and 0 < stage_s <= load_s * (1 + ALMOST):
            return Bottleneck(own, LOADING)
        if 0 < stage_s <= parts[TRANSFER] * (1 + ALMOST):
            return Bottleneck(own, TRANSFER)
        if not answer.request.model.has_ports:
            del parts[TRANSFER]
        elif stage_s > sum(parts.values()) * (1 + ALMOST):
            if not answer.mode.flush and index + 1 < len(sums_s):
                return Bottleneck(own, WAITING)
            # The rest of the stage's time: transfers with latencies and copies, which ports don't count.
            parts[TRANSFER] = stage_s - parts[COMPUTE] - parts[SYNC]
    return Bottleneck(own, max(parts, key=lambda cause: parts[cause]))


def _loading(answer: PlanFindings, found: PlanEstimate) -> tuple[int, ...]:
    rows = answer.request.profile.rows
    return loading_stages(found.plan, [*(rows[layer] for layer in found.order), rows[-1]])


def depth_is_lowered(answer: PlanFindings) -> bool:
    """Return whether the best plan's depth is below NOAM because more minibatches in flight don't fit in memory."""
    best = answer.comparison.best
    asked = answer.request.depth is not None or answer.mode.depth is not None or answer.mode.flush
    return not asked and best.plan.depth < best.plan.noam


@dataclass(frozen=True)
class TiedParameter:
    """A parameter of several layers."""

    parameter: str  # its name
    layers: tuple[str, ...]  # that use it
    stages: tuple[int, ...]  # that have it; several have a copy each
    # That workers send to sum the gradients of all copies; 0 if every worker has a copy, or a shard of each
    bytes_per_update: int
    update_s: float  # seconds of that sum on links without other traffic


def ties(answer: PlanFindings) -> list[TiedParameter]:
    """Return the parameters that several layers of the best plan share."""
    best = answer.comparison.best
    rows = [answer.rows[layer] for layer in best.order]
    stage_of, found = stage_of_layers(best.plan.stages), []
    for (kind, name), users in shared(rows).items():
        if kind == PARAMETER:
            stages = tuple(sorted({stage_of[index] for index in users}))
            found.append(_tied(answer, name, tuple(rows[index].name for index in users), stages))
    return found


def _tied(answer: PlanFindings, name: str, layers: tuple[str, ...], stages: tuple[int, ...]) -> TiedParameter:
    plan, request, mode = answer.comparison.best.plan, answer.request, answer.mode
    devices = sorted({device for stage in stages for device in plan.stages[stage].devices})
    if len(stages) == 1 or len(devices) == 1 or mode.is_sharded:
        return TiedParameter(name, layers, stages, 0, 0.0)
    size = next(row.parameter_sizes[name] for row in answer.rows if name in row.parameter_sizes)
    network = Network(request.model.links(request.cluster.for_stages(len(plan.positions))))
    seconds = network.alone_s(algorithm_of(mode.sync, mode.sums), tuple(devices), size)
    return TiedParameter(name, layers, stages, 2 * (len(devices) - 1) * size, seconds)


def quotient(whole: float, part: float) -> float | None:
    """Return whole over part; None for a part of 0."""
    return whole / part if part > 0 else None


def plan_data(answer: PlanFindings) -> dict[str, Any]:
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
        "over_memory": [{"stage": stage, "memory_bytes": peak} for stage, peak in answer.over_memory.items()],
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


def plan_summary(answer: PlanFindings, found: PlanEstimate) -> dict[str, Any]:
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


def _outcome(answer: PlanFindings, found: PlanEstimate) -> dict[str, Any]:
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
