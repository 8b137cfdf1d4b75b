"""Learning rates of updates: functions of the stage and of samples seen, independent of plan and engine.

Stages make different numbers of updates, and runs resume under other plans and in other processes; the rate at a sample
stays the same.
"""

import math
from collections.abc import Callable, Mapping
from typing import Final

from pipebench.model.schedulers import Played, own_schedule
from pipebench.recipe.named import KINDS, SCHEDULE
from pipebench.recipe.schema import PeriodRecipe, TrainRecipe
from pipebench.schedule.pipeline import Pipeline
from pipebench.schedule.weights import WEIGHT_POLICIES, delay

# Factor of a stage's rate, from the minibatches per update of the stage and of the input stage.
LR_SCALINGS: Final[Mapping[str, Callable[[int, int], float]]] = {
    "replicas": lambda own, first: own / first,
    "none": lambda own, first: 1.0,
    "linear": lambda own, first: float(own),
    "sqrt": lambda own, first: math.sqrt(own),
}


def learning_rate(
    train: TrainRecipe, pipeline: Pipeline, num_train: int, annealing_epochs: float | None = None
) -> Callable[[int, int, int], float]:
    """Return the rate of an update as a function of (stage, samples seen before it, its own samples).

    The schedule depends on samples before the update. Warm-up counts the update's own samples too, so that no rate is
    zero; it ends at the stage's scaled rate. Differs: Goyal et al. (2017) start at the unscaled rate; here the rate
    passes it, so one worker warms up, too.

    With corrected weights, rates are rescheduled, see `rescheduling`; `annealing_epochs` is its K.
    """
    scales, base = lr_scales(train, pipeline), train.optimizer.lr
    warmup, rate_at = train.schedule.warmup_epochs * num_train, rate_of_samples(train, num_train)
    rescheduled = rescheduling(train, pipeline, num_train, annealing_epochs)

    def rate(stage: int, before: int, own: int) -> float:
        scale = scales[stage] * rescheduled(stage, before)
        if before < warmup:
            return base * scale * min(1.0, (before + own) / warmup)
        return scale * rate_at(before)

    return rate


def rescheduling(
    train: TrainRecipe, pipeline: Pipeline, num_train: int, annealing_epochs: float | None
) -> Callable[[int, int], float]:
    """Return the rate's factor in PipeMare's first technique, a function of (stage, samples seen).

    It is tau^-p, p = 1 - min(k / K, 1), with the stage's delay tau in updates and the fraction k / K of the annealing
    epochs seen. The default K follows the paper: five warm-ups, or a quarter of the time until the rate first falls.
    Differs: a delay below one update, which would raise the rate, counts as one.
    """
    if not WEIGHT_POLICIES[pipeline.weights].corrects:
        return lambda stage, before: 1.0
    schedule = train.schedule
    thumb = 5 * schedule.warmup_epochs or (schedule.every_epochs or train.max_epochs) / 4
    annealing = (thumb if annealing_epochs is None else annealing_epochs) * num_train
    taus = [max(1.0, delay(pipeline, stage)) for stage in range(pipeline.num_stages)]
    return lambda stage, before: math.pow(taus[stage], -max(0.0, 1 - before / annealing)) if annealing > 0 else 1.0


def lr_scales(train: TrainRecipe, pipeline: Pipeline) -> list[float]:
    """Return every stage's factor of the rate by `lr_scaling`.

    `replicas`: the samples of a stage's update over the input stage's (the PipeDream artifact's rule; 1 in flushing
    modes); `linear`: those samples over `minibatch_size` (Goyal et al. 2017); `sqrt`: the root of that (Krizhevsky
    2014; Hoffer et al. 2017).
    """
    scale, first = LR_SCALINGS[train.optimizer.lr_scaling], pipeline.round_size(0)
    return [scale(pipeline.round_size(stage), first) for stage in range(pipeline.num_stages)]


def rate_of_samples(train: TrainRecipe, num_train: int) -> Callable[[int], float]:
    """Return the input stage's rate with one worker as a function of samples seen, without warm-up.

    Raises:
        UserCodeError: the schedule is a target or a class that rejects its arguments.
    """
    schedule, base = train.schedule, train.optimizer.lr
    total, warmup = train.max_epochs * num_train, schedule.warmup_epochs * num_train
    if schedule.target is not None:
        factor = own_schedule(schedule)
        return lambda before: base * factor(before / total)
    if schedule.name not in KINDS[SCHEDULE].ours:
        played, step_every = Played(schedule, base), schedule.step_every or PeriodRecipe(epochs=1)
        return lambda before: played.rate(steps_before(before, step_every, train.minibatch_size, num_train))
    every, falls, power = schedule.every_epochs or 1.0, schedule.factor or 1.0, schedule.power or 0.0
    factors: dict[str, Callable[[int], float]] = {
        "constant": lambda before: 1.0,
        "step": lambda before: falls ** math.floor(before / (every * num_train)),
        "cosine": lambda before: 0.5 * (1 + math.cos(math.pi * (before - warmup) / max(1, total - warmup))),
        "polynomial": lambda before: (1 - before / total) ** power,
    }
    named = factors[str(schedule.name)]
    return lambda before: base * named(before)


def steps_before(before: int, every: PeriodRecipe, minibatch_size: int, num_train: int) -> int:
    """Return the scheduler's steps `before` so many samples, in whole minibatches; `num_train` are an epoch's."""
    epochs, within = divmod(before, num_train)
    if every.epochs is not None:
        return epochs // every.epochs
    assert every.minibatches is not None
    minibatches = epochs * math.ceil(num_train / minibatch_size) + within // minibatch_size
    return minibatches // every.minibatches
