"""The largest minibatch that fits a recipe's plan on its cluster, by the memory model.

vPipe (TPDS'21, section 6) gives every system "the largest batch that fits in all GPUs", without saying how it is found.
Here each size is simulated: powers of two, then steps of an eighth between the largest that fits and the smallest that
does not. Each is planned, and cut into microbatches, as a run of that size is. If the run goes through several models,
all must fit.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from pipebench.cluster import Cluster
from pipebench.errors import PlanError
from pipebench.formats import a_or_an, num_bytes
from pipebench.profile.choose import has_one_size
from pipebench.recipe.load import LoadedRecipe
from pipebench.recipe.make import make_dataset
from pipebench.recipe.microbatches import microbatches_by_default
from pipebench.recipe.schema import Recipe
from pipebench.schedule.modes import MODES
from pipebench.train.memory_forecast import MemoryForecast
from pipebench.train.prepare import prepare
from pipebench.train.request import value_at

_STEPS: Final = 8  # from one power of two to the next
_MICROBATCHES: Final = "parallelism.microbatches"


@dataclass(frozen=True)
class Trial:
    """The result for one size."""

    minibatch_size: int
    peak_bytes: int | None  # of the fullest worker; None if no plan fits
    fits: bool  # in a device's memory
    problem: str = ""  # why no plan fits, or ""


def largest_minibatch(loaded: LoadedRecipe, on_trial: Callable[[Trial], None] = lambda _trial: None) -> Trial:
    """Return the largest tried size that fits, a multiple of the microbatches that the recipe gives.

    The search starts at the recipe's minibatch size; a smaller size than one that fits is assumed to fit, too.

    Raises:
        PlanError: not even the smallest fits, the cluster has no limit of memory, or the profile has one size only.
        UserError: the recipe has an error at any size.
    """
    recipe, cluster = loaded.recipe, loaded.cluster
    _check_known(recipe, cluster)
    unit = recipe.parallelism.microbatches if _MICROBATCHES in loaded.origins else 1
    known: dict[int, Trial] = {}

    def tried(count: int) -> Trial:
        if count not in known:
            known[count] = trial(loaded, unit * count)
            on_trial(known[count])
        return known[count]

    most = max(1, make_dataset(recipe.dataset).num_train // unit)
    low = 1 << max(0, (min(recipe.train.minibatch_size // unit, most)).bit_length() - 1)
    while not tried(low).fits:
        if low == 1:
            assert cluster.memory_bytes is not None
            raise PlanError(_nothing_fits(known[1], recipe, cluster.device, cluster.memory_bytes))
        low //= 2
    while 2 * low <= most and tried(2 * low).fits:
        low *= 2
    between = [low + step * max(1, low // _STEPS) for step in range(1, min(low, _STEPS))]
    between = [count for count in between if count <= most]
    while between:
        middle = len(between) // 2
        if tried(between[middle]).fits:
            low, between = between[middle], between[middle + 1 :]
        else:
            between = between[:middle]
    return known[low]


def _check_known(recipe: Recipe, cluster: Cluster) -> None:
    """Raise a PlanError unless the limit of memory, and layers' costs at other sizes, are known."""
    if cluster.memory_bytes is None:
        raise PlanError(
            f"cluster.name: got {cluster.name}, whose file gives no memory size; a largest minibatch needs one, "
            "such as cluster.memory=16GB"
        )
    if has_one_size(recipe):
        key = "engine.timing" if recipe.model.get("profile") is None else "model.profile"
        raise PlanError(
            f"{key}: got a graph.txt, which holds one size and doesn't say which: nothing is known of others; a "
            "largest minibatch needs a model, or a profile in JSON of the sizes"
        )


def trial(loaded: LoadedRecipe, minibatch_size: int) -> Trial:
    """Return whether a recipe fits with another minibatch size.

    Raises:
        UserError: the recipe has an error other than that no plan fits.
    """
    recipe = _with_size(loaded, minibatch_size)
    limit = loaded.cluster.memory_bytes
    assert limit is not None, "`_check_known` refuses it"
    try:
        job = prepare(recipe, loaded.cluster, trains=False, whole_only=True)
        variants = [variant for part in job.extensions.values() for variant in part.variants(job)] or [job]
        peak = max(MemoryForecast(each).memory.fullest.num_bytes for each in variants)
    except PlanError as error:
        return Trial(minibatch_size, None, False, str(error))
    return Trial(minibatch_size, peak, peak <= limit)


def _with_size(loaded: LoadedRecipe, minibatch_size: int) -> Recipe:
    recipe = replace(loaded.recipe, train=replace(loaded.recipe.train, minibatch_size=minibatch_size))
    if _MICROBATCHES in loaded.origins:
        return recipe
    microbatches = microbatches_by_default(partial(value_at, recipe), loaded.cluster, minibatch_size)
    return replace(recipe, parallelism=replace(recipe.parallelism, microbatches=microbatches))


def _nothing_fits(smallest: Trial, recipe: Recipe, device: str, limit: int) -> str:
    if smallest.peak_bytes is None:
        return smallest.problem
    whole = MODES[recipe.parallelism.mode].is_one_stage
    ways = "a mode of several stages, or fsdp" if whole else "more stages, other cuts, or recomputation"
    return (
        f"train.minibatch_size: not even {smallest.minibatch_size} fits with parallelism.mode "
        f"{recipe.parallelism.mode}: it needs {num_bytes(smallest.peak_bytes)} on a worker, and {a_or_an(device)} has "
        f"{num_bytes(limit)}; what would help: {ways}"
    )
