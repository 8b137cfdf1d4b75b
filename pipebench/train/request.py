"""A recipe's request to the planner, the sizes of its units, and its tensor slices; needs no model and no torch."""

import copy
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pipebench.cluster import LOCAL, Cluster, coarser
from pipebench.errors import GraphError, PlanError
from pipebench.model.plan import memory_of
from pipebench.model.sampling import InOrder, Sampler, Streams, Varying, microbatch_sizes
from pipebench.planner.cost_models import COST_MODELS
from pipebench.planner.memo import compared
from pipebench.planner.plans import Request
from pipebench.profile.devices import is_computed
from pipebench.profile.model import Profile
from pipebench.recipe.draft import turned_on
from pipebench.recipe.engines import engine_kind
from pipebench.recipe.schema import ParallelismRecipe, Recipe, TrainRecipe
from pipebench.recipe.suited import unshared, unsuited_modes
from pipebench.schedule.modes import AUTO, KEEP, MODES, RECOMPUTE
from pipebench.schedule.pipeline import SPLIT, default_microbatches
from pipebench.zoo.registry import Dataset


def samplers(train: TrainRecipe, dataset: Dataset) -> tuple[Sampler, Sampler]:
    """Return the samplers of training and of evaluation."""
    size = train.minibatch_size
    if dataset.sequential:
        streams = train.streams or 1
        return Streams(dataset.num_train, size, streams), Streams(dataset.num_eval, size, streams, covers=True)
    held_out = InOrder(dataset.num_eval, size)
    if dataset.lengths:
        return Varying(dataset.num_train, size, train.seed, dataset.lengths), held_out
    return Sampler(dataset.num_train, size, train.seed, dataset.buckets), held_out


def travelling_sizes(recipe: Recipe, dataset: Dataset) -> tuple[int, ...]:
    """Return all sizes of units in training and evaluation, in samples; in mode auto, of whole and cut minibatches."""
    training, held_out = (
        {sampler.size(0), sampler.size(sampler.minibatches_per_epoch - 1)}
        for sampler in samplers(recipe.train, dataset)
    )
    counts = {recipe.parallelism.microbatches, *([1] if recipe.parallelism.mode == AUTO else [])}
    units = {part for n in training for count in counts for part in microbatch_sizes(n, count)}
    return tuple(sorted((units | held_out) - {0}))


def sizes_to_plan(recipe: Recipe, cluster: Cluster, dataset: Dataset) -> tuple[int, ...]:
    """Return the travelling sizes, and those with which the planner compares modes that cut minibatches and others.

    These are the sizes of a full minibatch and, if times are computed, of its microbatches. If times are measured, no
    more is measured for it; and files have the sizes that they have.
    """
    whole, sizes = _minibatch_size(recipe, dataset), {*travelling_sizes(recipe, dataset)}
    if is_computed(recipe.engine.timing, cluster) and recipe.model.get("profile") is None:
        sizes.add(whole // default_microbatches(cluster.num_workers, whole))
    return tuple(sorted(sizes | {whole}))


def source_of_one(recipe: Recipe, dataset: Dataset) -> str:
    """Return why there are units of a single sample, and which key to change, in words."""
    for of, sampler in zip(("an epoch", "an evaluation"), samplers(recipe.train, dataset), strict=True):
        if sampler.size(sampler.minibatches_per_epoch - 1) == 1:
            size = recipe.train.minibatch_size
            return f"the last minibatch of {of} has 1 of {size} samples: choose another train.minibatch_size"
    return "some microbatches have 1 sample: choose a larger train.minibatch_size or fewer parallelism.microbatches"


def _minibatch_size(recipe: Recipe, dataset: Dataset) -> int:
    return min(recipe.train.minibatch_size, dataset.num_train)


def whole_minibatches(dataset: Dataset, minibatch_size: int) -> Dataset:
    """Return a data set without an epoch's short minibatch, and with one minibatch of evaluation."""
    whole = copy.copy(dataset)
    whole.num_train -= whole.num_train % minibatch_size
    whole.num_eval = minibatch_size
    return whole


def with_device_memory(recipe: Recipe, cluster: Cluster, profile: Profile) -> Cluster:
    """Return a cluster whose devices have the memory of the measured GPU, if its file gives no size.

    Applies to workers in processes, each of which has an equal part of the memory of a GPU that it shares. In one
    process all workers share a device, whatever they stand for.
    """
    if cluster.memory_bytes is not None or not profile.device_bytes or not engine_kind(recipe).in_processes:
        return cluster
    return replace(cluster, memory_bytes=profile.device_bytes // _processes_per_device(cluster, profile))


def _processes_per_device(cluster: Cluster, profile: Profile) -> int:
    """Return the most processes that share a GPU of this host: local rank r is on GPU r modulo the number of GPUs.

    A launcher says how many processes are on this host. Without one, all workers of cluster `local` are; of other
    clusters each process is assumed to have its own GPU, because they may be on several hosts.
    """
    launched = os.environ.get("LOCAL_WORLD_SIZE", "")
    if launched.isdecimal():
        num_here = int(launched)
    else:
        num_here = cluster.num_workers * profile.slices if cluster.name == LOCAL else 1
    return max(1, math.ceil(num_here / profile.num_local_gpus)) if profile.num_local_gpus else 1


def plan_request(recipe: Recipe, cluster: Cluster, profile: Profile, dataset: Dataset) -> Request:
    """Return a recipe's request to the planner; raises a PlanError if it names layers that the profile lacks."""
    parallelism, size = recipe.parallelism, _minibatch_size(recipe, dataset)
    row = None if parallelism.mode == AUTO else parallelism.row
    cuts, accumulate = row is None or row.takes_microbatches(), parallelism.accumulate_given
    if cuts and accumulate is None:
        accumulate = 1 if row is None else row.accumulate
    names = [each.name for each in profile.rows[:-1]]
    return Request(
        profile=profile,
        cluster=with_device_memory(recipe, cluster, profile),
        model=COST_MODELS[parallelism.cost_model],
        minibatch_size=size,
        microbatches=parallelism.microbatches if cuts else _of_others(cluster.num_workers, size, profile, accumulate),
        accumulate=accumulate,
        depth=None if parallelism.depth == AUTO else int(parallelism.depth),
        row=row,
        is_cut=parallelism.cuts is not None,
        memory=_memory(parallelism, names),
        chooses=() if parallelism.vpipe is None else parallelism.vpipe.policies,
        streams=(recipe.train.streams or 1) if dataset.sequential else None,
        unsuited=unsuited_modes(recipe.train, recipe.engine) | _unswappable_modes(parallelism),
        relay=parallelism.relay,
        ties=_stays(recipe),
        shares_norm=shares_norm(recipe.train),
        may_shard=_may_shard(recipe),
        may_recompute=_stays(recipe) and not asks_of_layers(parallelism) and not recipe.engine.compile,
    )


def scales(train: TrainRecipe) -> bool:
    """Return whether losses are scaled, as in fp16."""
    return train.precision == "fp16"


def shares_norm(train: TrainRecipe) -> bool:
    """Return whether an update needs the norm of its gradients: to clip them, or to skip it if they overflow."""
    return train.optimizer.clip_norm is not None or scales(train)


def _of_others(num_workers: int, minibatch_size: int, profile: Profile, accumulate: int | None) -> int:
    """Return the microbatches with which other modes are planned.

    It is 1 where they would run whole minibatches, as the recipe accumulates some, and without times of their size.
    """
    if accumulate not in (None, 1):
        return 1
    count = default_microbatches(num_workers, minibatch_size)
    return count if minibatch_size // count in profile.layers else 1


def asks_of_layers(parallelism: ParallelismRecipe) -> bool:
    """Return whether a recipe itself says what layers do with their activations: keep, recompute or swap them."""
    given = (parallelism.recompute, parallelism.recompute_layers, parallelism.swap_layers, parallelism.vpipe)
    return any(each is not None for each in given)


def _may_shard(recipe: Recipe) -> list[str]:
    """Return the modes in which the planner may shard optimizer state, to fit in memory."""
    parallelism = recipe.parallelism
    if parallelism.shard is not None or not _stays(recipe):
        return []
    rows = {**MODES, **({} if parallelism.mode == AUTO else {parallelism.mode: parallelism.row})}
    return [name for name, row in rows.items() if unshared(recipe, row) is None]


def may_tie(recipe: Recipe) -> bool:
    """Return whether stages may have copies of weights that their layers share; the mode must be resolved."""
    return recipe.parallelism.row.ties and _stays(recipe)


def _stays(recipe: Recipe) -> bool:
    """Return whether every layer stays in its stage."""
    return "moves" not in turned_on(partial(value_at, recipe))


def value_at(section: Any, key: str) -> Any:
    """Return the value of a full key of a recipe, or None."""
    for name in key.split("."):
        section = section.get(name) if isinstance(section, Mapping) else getattr(section, name, None)
    return section


def _unswappable_modes(parallelism: ParallelismRecipe) -> dict[str, str]:
    """Return the modes that can't swap, with reasons, if the recipe swaps layers."""
    why = "backwards are split, and their weight parts keep what layers read that are to swap"
    return {name: why for name, row in MODES.items() if row.backward == SPLIT} if parallelism.swap_layers else {}


def _memory(parallelism: ParallelismRecipe, names: Sequence[str]) -> tuple[str, ...] | None:
    """Return every layer's memory policy if the recipe names layers; None: the mode has one for all."""
    recompute, swap = parallelism.recompute_layers, parallelism.swap_layers
    if recompute is None and swap is None:
        return None
    return memory_of(names, recompute or (), swap or (), others=RECOMPUTE if parallelism.row.recompute else KEEP)


Profiled = Callable[[Recipe, Cluster], tuple[Profile, Dataset]]


def choose_slices(recipe: Recipe, cluster: Cluster, profiled: Profiled, mode: str = AUTO) -> tuple[Recipe, Cluster]:
    """Resolve `parallelism.tensor: auto`; return the recipe, and the cluster of its workers.

    Chosen is, of all divisors of the number of devices in the innermost level, the one with the fastest plan; of equals
    the smallest.

    Args:
        recipe: with `parallelism.tensor`.
        cluster: of devices.
        profiled: returns the profile and the data of a recipe on a cluster.
        mode: the plans' mode, `auto` for any.

    Raises:
        PlanError: no plan fits with any of them.
    """
    if recipe.parallelism.tensor != AUTO:
        return recipe, cluster
    count = cluster.levels[0].count
    found: dict[int, float] = {}
    refused: list[str] = []
    for num_slices in (each for each in range(1, count + 1) if count % each == 0):
        own, workers = sliced(recipe, cluster, num_slices)
        try:
            request = plan_request(own, workers, *profiled(own, workers))
            best = compared(request, None if mode == AUTO else mode, others=False).best
            found[num_slices] = best.minibatch_s
        except (GraphError, PlanError) as error:
            refused.append(str(error))
    if not found:
        raise PlanError(refused[0])
    return sliced(recipe, cluster, min(found, key=found.__getitem__))


def sliced(recipe: Recipe, cluster: Cluster, num_slices: int) -> tuple[Recipe, Cluster]:
    """Return a recipe with so many slices, and the cluster of workers of so many devices."""
    parallelism = replace(recipe.parallelism, tensor=num_slices)
    return replace(recipe, parallelism=parallelism), coarser(cluster, num_slices)
