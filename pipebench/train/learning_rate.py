"""Learning rates of updates, as functions of the stage and of the samples seen, independent of plan and engine.

Stages make different numbers of updates, and runs resume under other plans and in other processes. The rate at a sample
is the same in all of them.

torch's schedulers are stepped in a loop, and most compute a rate from the one before. So each of their rates is
computed once, by stepping on an optimizer that serves only that purpose, and looked up from then on. How many epochs or
minibatches a step takes is a key of the recipe. A function of the user's own gets the fraction of training that is
done.
"""

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import partial
from typing import Any, Final

import torch

from pipebench.errors import UserCodeError
from pipebench.recipe.named import KINDS, SCHEDULE, given_arguments
from pipebench.recipe.options import arguments_of
from pipebench.recipe.schema import PeriodRecipe, ScheduleRecipe, TrainRecipe
from pipebench.recipe.targets import import_target
from pipebench.recipe.users_code import users_code
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

    The schedule depends on the samples before the update. Warm-up counts the update's own samples, too, so that no rate
    is 0; it ends at the stage's scaled rate. Differs: in Goyal et al. (2017), warm-up starts at the unscaled rate; here
    it starts near 0, so that a run with one worker warms up, too.

    Args:
        train: the recipe's section.
        pipeline: says how many samples a stage's update has.
        num_train: samples of an epoch.
        annealing_epochs: PipeMare's K, see `rescheduling`.
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
    """Return the factor of the rate by PipeMare's technique T1, as a function of (stage, samples seen).

    The factor is tau^-p, p = 1 - min(k / K, 1), with the stage's delay tau in updates, the epochs seen k, and K
    annealing epochs. The default K follows the paper: five warm-ups, or a quarter of the time until the rate first
    falls. Differs: a delay below one update, which would raise the rate, counts as one. With other weight policies the
    factor is 1.
    """
    if not WEIGHT_POLICIES[pipeline.weights].corrects:
        return lambda stage, before: 1.0
    schedule = train.schedule
    thumb = 5 * schedule.warmup_epochs or (schedule.every_epochs or train.max_epochs) / 4
    annealing = (thumb if annealing_epochs is None else annealing_epochs) * num_train
    taus = [max(1.0, delay(pipeline, stage)) for stage in range(pipeline.num_stages)]
    return lambda stage, before: math.pow(taus[stage], -max(0.0, 1 - before / annealing)) if annealing > 0 else 1.0


def lr_scales(train: TrainRecipe, pipeline: Pipeline) -> list[float]:
    """Return every stage's factor of the rate, by `lr_scaling`.

    - `replicas`: samples of the stage's update over those of the input stage's (the PipeDream artifact's rule); 1 in
      flushing modes.
    - `linear`: samples of the stage's update over `minibatch_size` (Goyal et al. 2017).
    - `sqrt`: the root of that (Krizhevsky 2014; Hoffer et al. 2017).
    - `none`: 1.
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
        rates, step_every = SchedulerRates(schedule, base), schedule.step_every or PeriodRecipe(epochs=1)
        return lambda before: rates.rate(steps_before(before, step_every, train.minibatch_size, num_train))
    # Exact: 1.1 epochs of 4,000 samples are 4,400 samples, where the product of floats is a little more.
    every = Fraction(str(schedule.every_epochs or 1.0)) * num_train
    falls, power = schedule.factor or 1.0, schedule.power or 0.0
    factors: dict[str, Callable[[int], float]] = {
        "constant": lambda before: 1.0,
        "step": lambda before: falls ** (before // every),
        "cosine": lambda before: 0.5 * (1 + math.cos(math.pi * (before - warmup) / max(1, total - warmup))),
        "polynomial": lambda before: (1 - before / total) ** power,
    }
    named = factors[str(schedule.name)]
    return lambda before: base * named(before)


def steps_before(before: int, every: PeriodRecipe, minibatch_size: int, num_train: int) -> int:
    """Return how many steps a scheduler takes during the first `before` samples; it steps after whole minibatches."""
    epochs, within = divmod(before, num_train)
    if every.epochs is not None:
        return epochs // every.epochs
    assert every.minibatches is not None
    minibatches = epochs * math.ceil(num_train / minibatch_size) + within // minibatch_size
    return minibatches // every.minibatches


_KEY = "train.schedule.name"


class SchedulerRates:
    """The rates of one of torch's schedulers, computed up to the last that was requested.

    Raises:
        UserCodeError: the class refuses its arguments.
    """

    def __init__(self, schedule: ScheduleRecipe, lr: float) -> None:
        self._name = str(schedule.name)
        self._optimizer = torch.optim.SGD([torch.zeros(1)], lr)
        with users_code(f"{self._name} can't make a schedule", _KEY):
            made = KINDS[SCHEDULE].make(self._name)
            self._scheduler = made(self._optimizer, **given_arguments(schedule))
        self._optimizer.step()  # torch warns of schedulers that step before their optimizer
        self._rates = [self._rate()]

    def rate(self, num_steps: int) -> float:
        """Return the rate after some steps.

        Raises:
            UserCodeError: the scheduler raises at a step, or its rate isn't a number of at least 0.
        """
        while num_steps >= len(self._rates):
            with users_code(f"{self._name} fails at step {len(self._rates)}", _KEY):
                self._scheduler.step()
            self._rates.append(self._rate())
        return self._rates[num_steps]

    def _rate(self) -> float:
        rate = float(self._optimizer.param_groups[0]["lr"])
        if not math.isfinite(rate) or rate < 0:
            raise UserCodeError(f"{self._name} gives a rate of {rate:g}, needed is one of at least 0", _KEY)
        return rate


_STEPS = ("it", "iter", "iteration", "step", "epoch", "current_step")  # first arguments of functions of steps
_NUM_TRIED = 100  # fractions of training at which a schedule is tried before it is used


def _refuse_steps(target: str, make: Callable[..., Any]) -> None:
    """Refuse a scheduler, and a function of a number of steps or epochs."""
    if isinstance(make, type) or "optimizer" in (arguments_of(make) or ()):
        raise UserCodeError(
            f"{target} counts steps, of which every stage makes its own number; needed is a "
            "function of the fraction of training that is done, 0 to 1, that gives a factor of the rate, or a name "
            "that `pipebench ls schedules` lists",
            "train.schedule.target",
        )
    given = next(iter(arguments_of(make) or ()), "")
    if given in _STEPS:
        raise UserCodeError(
            f"{target} takes {given} first, and what it gets is the fraction of training that is done, 0 to 1, since "
            "every stage makes its own number of steps; needed is a function of that fraction",
            "train.schedule.target",
        )


def own_schedule(schedule: ScheduleRecipe) -> Callable[[float], float]:
    """Return the factor of the learning rate as a function of the fraction of all training samples seen before.

    The rate may depend on samples seen only: every stage makes its own number of updates, and a run may resume under
    another plan. So schedulers, which count an optimizer's steps, are refused here.

    Raises:
        UserCodeError: the target is a class, takes an optimizer or a step, raises, or returns no factor of at least 0.
    """
    target = str(schedule.target)
    make = import_target(target)
    _refuse_steps(target, make)
    own: Callable[[float], Any] = partial(make, **given_arguments(schedule))

    def factor(fraction: float) -> float:
        with users_code(f"{target} fails at {fraction:.4g}", "train.schedule.target"):
            value = float(own(fraction))
        if not math.isfinite(value) or value < 0:
            raise UserCodeError(
                f"{target} gives {value:g} at {fraction:.4g} of training, needed is a factor of at least 0",
                "train.schedule.target",
            )
        return value

    fractions = [index / _NUM_TRIED for index in range(_NUM_TRIED)]
    factors = [factor(fraction) for fraction in fractions]
    for fraction, first in reversed([*zip(fractions, factors, strict=True)]):  # another order shows a hidden state
        if (again := factor(fraction)) != first:
            raise UserCodeError(
                f"{target} gives {first:g} at {fraction:.4g} of training and then {again:g}; needed is a function of "
                "that fraction only, since it is called in several processes and anew where a run goes on",
                "train.schedule.target",
            )
    return factor
