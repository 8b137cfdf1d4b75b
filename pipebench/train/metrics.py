"""A run's metrics under their tracking names, and a row per stage."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipebench import formats
from pipebench.engine.setup import Setup
from pipebench.formats import a_or_an, seconds
from pipebench.metrics import as_number
from pipebench.model.plan import PARAMETER, shared, stage_of_layers, stay_together
from pipebench.recipe.engines import engine_kind
from pipebench.recipe.options import zoo_options
from pipebench.recipe.plan_file import is_plan_file
from pipebench.recipe.schema import LARGEST
from pipebench.schedule.modes import AUTO, KEEP
from pipebench.schedule.orders import order_of
from pipebench.schedule.programs import most_in_flight
from pipebench.simulate.costs import shared_loaders
from pipebench.simulate.meter import MEMORY, PLAN, THROUGHPUT, RunMeasurements, sum_by
from pipebench.simulate.timeline import BUFFERS, EVALUATION, SWAP_KINDS, TRAINING_KINDS
from pipebench.train.clock import RunClock
from pipebench.train.curves import Curves
from pipebench.train.job import Job
from pipebench.train.largest import most_of_epoch
from pipebench.train.learning_rate import lr_scales
from pipebench.typed_json import shown


def describe(job: Job) -> dict[str, Any]:
    """Return the part of a result known before the run."""
    recipe, timing = job.recipe, job.profile.note
    kind = engine_kind(recipe)
    if kind.measures and job.profile.source != "measured":
        timing = f"measured while it ran, on {job.setup.device.type}; planned by: {timing}"
    return {
        "name": recipe.name,
        "mode": recipe.parallelism.mode,
        "plan": str(job.setup.plan),
        "engine": kind.name,
        "clock": kind.clock,
        "timing": timing,
        "seed": recipe.train.seed,
    }


def recipe_notes(job: Job) -> dict[str, str]:
    """Return notes on a recipe's numbers, by the fact in the summary."""
    notes, of_plan = {}, list[str]()
    policies = _policies_cut_for(job)
    if policies:
        of_plan.append(f"cut for layers that {' and '.join(policies)}: cuts may be others without, unless named")
    if job.chosen:
        of_plan.append(f"{job.chosen}, chosen as the fastest of what fits in memory")
    if job.recipe.parallelism.row.sums == AUTO:
        of_plan.append(f"sums: {job.setup.pipeline.sums}, chosen for the cluster's links")
    of_plan += _gathered_together(job.setup)
    if of_plan:
        notes[PLAN] = "; ".join(of_plan)
    if job.recipe.parallelism.accumulate == LARGEST:
        notes[MEMORY] = _largest_note(job)
    for each in job.extensions.values():
        notes |= each.notes(job.setup)
    rates = "; ".join(filter(None, (_short_updates(job), loading_note(job))))
    return notes | ({THROUGHPUT: rates} if rates else {})


def _gathered_together(setup: Setup) -> Iterator[str]:
    """Yield a sentence on every parameter that layers of one group share, if parameters are sharded.

    All layers between them are in that group, too, which is gathered and freed as a whole.
    """
    layers, stage_of = setup.graph.layers, stage_of_layers(setup.plan.stages)
    for (kind, name), users in shared(layers).items() if setup.pipeline.gathers else ():
        if kind == PARAMETER and stage_of[users[0]] == stage_of[users[-1]]:
            yield stay_together([layers[index].name for index in users], name, stage_of[users[0]])


# A note is written if updates have, on average, less than this share of their full samples. An incomplete last update
# of every epoch, or a short last minibatch, usually costs less than that.
_FULL = 0.9
_MOST_SEGMENTS = 1000  # between drains, over which the mean is taken


def _short_updates(job: Job) -> str:
    """Return a sentence if the run drains within updates, so that these have fewer samples; else ""."""
    sampler, update = job.setup.sampler, job.setup.pipeline.round_size(0)
    if update * sampler.minibatch_size > sampler.num_samples:
        return f"an epoch has {sampler.num_samples:,} samples, fewer than an update takes"
    done = num_updates = 0
    for _ in range(_MOST_SEGMENTS):
        drain = job.periods.next_drain(done)
        num_updates += math.ceil((drain - done) / update)
        done = drain
        if done >= sampler.minibatches_per_epoch:
            break
    mean = sampler.samples_before(done) / num_updates
    if mean >= _FULL * update * sampler.minibatch_size:
        return ""
    why = f"an update takes {update} minibatches, and drains before evaluations and checkpoints cut it short"
    return f"updates have {mean:,.0f} samples on average: {why}"


def _largest_note(job: Job) -> str:
    """Return how many minibatches the largest update has, and whether memory or the epoch is the limit."""
    assert job.cluster.memory_bytes is not None
    pipeline, memory = job.setup.pipeline, formats.num_bytes(job.cluster.memory_bytes)
    is_all = pipeline.accumulate == most_of_epoch(pipeline, job.setup.sampler)
    limit = "an epoch's, which all fit in" if is_all else "the most that fit in"
    return f"{pipeline.accumulate} minibatches per update, {limit} {memory}"


def _policies_cut_for(job: Job) -> list[str]:
    """Return a recipe's memory policies, if its open cuts were made for them."""
    asked, plan = job.recipe.parallelism, job.setup.plan
    if asked.cuts is not None or is_plan_file(asked.plan) or len(plan.stages) == 1:
        return []
    if not (asked.recompute_layers or asked.swap_layers or asked.recompute):
        return []
    return sorted({*plan.memory} - {KEEP})


def run_notes(job: Job, facts: Mapping[str, Any], earlier: "EarlierWorkers") -> dict[str, str]:
    """Return `recipe_notes` and notes on the run: on stages that clip alone, on earlier workers, and on memory.

    `facts` are those of `sum_facts`.
    """
    notes = recipe_notes(job)
    of_plan = [*_alone(job.setup)]
    if earlier.samples > 0:
        since = f"since epoch {earlier.samples / job.setup.sampler.num_samples:.3g}"
        of_plan.append(f"{since}, and so are rates, memory and prediction; totals are the whole run's")
    for fact, more in ((PLAN, of_plan), (MEMORY, [*_on_memory(job, facts["peak_bytes"])])):
        if more:
            notes[fact] = "; ".join([*filter(None, [notes.get(fact)]), *more])
    return notes


def _on_memory(job: Job, peaks: Sequence[int]) -> Iterator[str]:
    """Yield notes on workers' peak bytes: which devices they are of, and that a device would have held too much."""
    limit, slices = job.cluster.memory_bytes, job.setup.costs.slices
    if slices > 1:
        predicted = "" if engine_kind(job.recipe).in_processes else ", predicted: this engine holds all their slices"
        yield f"of one of a worker's {slices} devices{predicted}"
    worker = max(range(len(peaks)), key=peaks.__getitem__)
    if limit is not None and peaks[worker] > limit:
        held = f"worker {worker} ({job.setup.pipeline.worker_names[worker]}) held {formats.num_bytes(peaks[worker])}"
        yield f"{held}, more than the {formats.num_bytes(limit)} of {a_or_an(job.cluster.device)}"


def _alone(setup: Setup) -> Iterator[str]:
    """Yield notes on what every stage decides alone, since without a flush stages update at different times."""
    if setup.pipeline.flushes:
        return
    if setup.clip_norm is not None:
        yield "gradients are clipped by each stage's own norm, not by the global one"
    if setup.loss_scale is not None:
        yield "each stage has a loss scale of its own, and skips updates alone"


@dataclass(frozen=True)
class EarlierWorkers:
    """What a run did before it was resumed with another engine or plan, whose workers can't continue the counters."""

    samples: int = 0  # trained on
    training_s: float = 0.0
    num_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)  # sent, by (kind, level)


def run_metrics(
    job: Job,
    samples: int,
    clock: RunClock,
    facts: Mapping[str, Any],
    measured: RunMeasurements,
    earlier: EarlierWorkers,
) -> dict[str, float]:
    """Return the metrics of a run, except those of its curves.

    Rates are those of the present workers, whose plan the result names; totals are those of the whole run, which has
    trained on `samples`. `facts` are those of `sum_facts`, `measured` those of the engine's meters.
    """
    setup = job.setup
    own_samples, own_s = samples - earlier.samples, clock.training_s - earlier.training_s
    metrics: dict[str, float] = {
        "training_time_s": clock.training_s,
        "evaluation_time_s": clock.evaluation_s,
        "weight_versions_max": max(facts["weight_versions_max"]),
        "peak_memory_bytes_max": max(facts["peak_bytes"]),
        **({"host_peak_bytes_max": max(facts["host_peak_bytes"])} if setup.pipeline.swaps else {}),
        "samples_per_update": setup.pipeline.round_size(0) * setup.sampler.minibatch_size,
        "num_workers": setup.pipeline.num_workers,
        "num_devices": setup.pipeline.num_workers * setup.costs.slices,
        **byte_metrics(earlier.num_bytes + facts["num_bytes"]),
        **byte_rates(facts["num_bytes"], own_samples),
    }
    if earlier.samples > 0:
        metrics["workers_counted_from_samples"] = earlier.samples
    if clock.lost_s > 0:
        metrics["lost_time_s"] = clock.lost_s
    if own_samples > 0 and own_s > 0:
        metrics["throughput_samples_per_s"] = own_samples / own_s
        metrics["epoch_time_s"] = own_s * setup.sampler.num_samples / own_samples
        metrics |= measured.metrics
    return metrics


def finite_metrics(extension: str, found: Mapping[str, Any], note: Callable[[str], None]) -> dict[str, float]:
    """Return an extension's metrics that are finite numbers; call `note` with a sentence about each other one.

    A text or None among the metrics would make the result, and so the training, unreadable.
    """
    metrics = {}
    for name, value in found.items():
        number = as_number(value)
        if number is not None and math.isfinite(number):
            metrics[name] = number
        else:
            note(f"metric {name} of extension {extension} is left out: got {shown(value)}, allowed is a finite number")
    return metrics


def curve_metrics(job: Job, curves: Curves) -> dict[str, float]:
    """Return when the target was reached, if it was, and the curves' best and final values."""
    metrics: dict[str, float] = {}
    if curves.reached is not None:
        metrics["time_to_accuracy_s"] = curves.reached.clock_s
        metrics["time_to_accuracy_without_evaluation_s"] = curves.reached_training_s
        metrics["time_to_accuracy_checkpoint_s"] = curves.reached_checkpoint_s
        metrics["epochs_to_target"] = curves.reached.samples / job.setup.sampler.num_samples
    return metrics | curves.final_metrics()


def sum_facts(facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the counters of all processes together; lists are by worker."""
    num_bytes: Counter[tuple[str, str]] = Counter()
    for each in facts:
        num_bytes.update({(kind, level): count for kind, level, count in each["num_bytes"]})
    names = ("peak_bytes", "weight_versions_max", "host_peak_bytes")
    lists = {name: [value for each in facts for value in each[name]] for name in names}
    extensions: dict[str, list[Any]] = {}
    for name, counted in (item for each in facts for item in each["extensions"].items()):
        extensions.setdefault(name, []).extend(counted)
    return {"num_bytes": num_bytes, "extensions": extensions, **lists}


def result_fields(job: Job, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a result that extensions' counters give; `facts` are those of `sum_facts`."""
    fields: dict[str, Any] = {}
    for extension, fields_of in job.setup.pipeline.hooks("result").items():
        fields |= fields_of(facts["extensions"][extension])
    return fields


def byte_metrics(num_bytes: Mapping[tuple[str, str], int]) -> dict[str, float]:
    """Return communication metrics from bytes by (kind, level).

    The total has activations, gradients and sums over replicas; buffers, evaluation and swapping are apart.
    """
    counts = dict(num_bytes)
    kinds = sum_by(counts, 0, (*TRAINING_KINDS, BUFFERS, EVALUATION))
    levels = sum_by(counts, 1, TRAINING_KINDS)
    metrics: dict[str, float] = {"comm_bytes_total": sum(kinds.get(kind, 0) for kind in TRAINING_KINDS)}
    metrics |= {f"comm_bytes_{kind.replace('-', '_')}": value for kind, value in kinds.items()}
    metrics |= {f"comm_bytes_level_{level}": value for level, value in levels.items()}
    copied = sum_by(counts, 0, SWAP_KINDS)
    return metrics | {f"swap_bytes_{kind.removeprefix('swap-')}": value for kind, value in copied.items()}


def byte_rates(num_bytes: Mapping[tuple[str, str], int], samples: int) -> dict[str, float]:
    """Return the bytes per sample of training, in total and by kind; nothing without samples."""
    if samples == 0:
        return {}
    kinds = sum_by(dict(num_bytes), 0, TRAINING_KINDS)
    rates = {f"comm_bytes_per_sample_{kind.replace('-', '_')}": value / samples for kind, value in kinds.items()}
    return {"comm_bytes_per_sample": sum(kinds.values()) / samples, **rates}


def describe_stages(job: Job) -> list[dict[str, Any]]:
    """Return a row per stage: what is known before the run."""
    setup = job.setup
    travels = setup.costs.most_samples
    names = [layer.name for layer in setup.graph.layers]
    pipeline = setup.pipeline
    base, scales = job.recipe.train.optimizer.lr, lr_scales(job.recipe.train, pipeline)
    # With several stages per worker, or deferred weight parts, depth depends on the order.
    has_formula = pipeline.chunks == 1 and not order_of(pipeline.order).splits
    depths = pipeline.warmups if has_formula else most_in_flight(pipeline)
    return [
        {
            "index": index,
            "first_worker": min(pipeline.places[index]),
            "replicas": stage.replicas,
            "first_layer": names[stage.start],
            "last_layer": names[stage.stop - 1],
            "num_layers": sum(not layer.idle for layer in setup.graph.layers[stage.start : stage.stop]),
            "depth": depths[index],
            "forward_s": costs.forward_s[travels],
            "backward_s": costs.backward_s[travels],
            "update_s": costs.update_s,
            "samples_per_update": setup.pipeline.round_size(index) * setup.sampler.minibatch_size,
            "lr": base * scales[index],  # before the schedule, after warm-up
            "parameter_bytes": costs.parameter_bytes,
        }
        for index, (stage, costs) in enumerate(zip(setup.plan.stages, setup.costs.stages, strict=True))
    ]


def stage_rows(job: Job, facts: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return a row per stage: `describe_stages`, and what was counted; `facts` are those of `sum_facts`."""
    rows = describe_stages(job)
    pipeline = job.setup.pipeline
    for row in rows:
        workers = pipeline.places[row["index"]]
        row["weight_versions_max"] = max(facts["weight_versions_max"][worker] for worker in workers)
        row["peak_memory_bytes"] = max(facts["peak_bytes"][worker] for worker in workers)
        if row["index"] in pipeline.swaps:
            row["host_peak_bytes"] = max(facts["host_peak_bytes"][worker] for worker in workers)
    return tuple(rows)


# Workers that fetch their own minibatches compute nothing meanwhile: loading is worth a note from this share of the
# slowest worker's computing on.
_NOTEWORTHY = 0.1


def loading_note(job: Job) -> str:
    """Return a sentence if, by measured times, loading is slower than computing, or delays it; else ""."""
    setup = job.setup
    pipeline, costs = setup.pipeline, setup.costs
    size, microbatches = costs.most_samples, pipeline.microbatches
    if job.profile.source != "measured" or not size:
        return ""
    computing_s = loading_s = 0.0  # a minibatch, on the slowest worker
    for worker in range(pipeline.num_workers):
        stages = pipeline.stages_of(worker)
        own, replicas = [costs.stages[stage] for stage in stages], pipeline.replicas[stages[0]]
        own_s = sum(microbatches * (stage.forward_s[size] + stage.backward_s[size]) + stage.update_s for stage in own)
        computing_s = max(computing_s, own_s / replicas)
        loading_s = max(loading_s, microbatches * sum(stage.load_s[size] for stage in own) / replicas)
    binds = loading_s > computing_s or (costs.host.fetches and loading_s > _NOTEWORTHY * computing_s)
    if not binds or computing_s == 0.0:
        return ""
    note = f"loading takes {seconds(loading_s)} a minibatch beside {seconds(computing_s)} of computing"
    dataset = job.recipe.dataset
    if dataset.get("target") is None and "loader_processes" not in zoo_options("dataset", str(dataset.get("name"))):
        return note
    num_readers = sum(pipeline.replicas[stage] for stage in pipeline.loads)
    loaders_each = shared_loaders(setup.dataset.loader_processes, num_readers) or 1
    wanted = math.ceil(loading_s * loaders_each / computing_s) * num_readers
    return f"{note}: dataset.loader_processes={wanted} would keep up"
