"""Learning-rate schedules that aren't our own, as functions: torch's schedulers, played ahead, and what a target names.

torch's schedulers are stepped in a loop, and most know their rate from the one before. Here the rate must be a function
of samples seen, the same for every stage, in every process and after a resumption, so a step's rate is played once, on
an optimizer of its own, and looked up from then on. What a step is (so many epochs or minibatches) is the recipe's to
say. A function of the user's own gets the fraction of training that is done.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from pipebench.errors import UserCodeError
from pipebench.recipe.named import KINDS, SCHEDULE, given_arguments
from pipebench.recipe.schema import ScheduleRecipe
from pipebench.recipe.targets import import_target
from pipebench.recipe.users_code import users_code

_KEY = "train.schedule.name"


class Played:
    """The rates of one of torch's schedulers, from the first to the last that was requested.

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


_LOOKED_AT = 100  # places in training at which a schedule is tried before it is used


def own_schedule(schedule: ScheduleRecipe) -> Callable[[float], float]:
    """Return the factor of the learning rate as a function of the fraction of all training samples seen before.

    The rate must depend on samples seen only: every stage makes its own number of updates, and a run may resume under
    another plan. So torch's schedulers, which count steps, are refused.

    Raises:
        UserCodeError: the target is a scheduler of torch's, raises, or returns no factor of at least 0.
    """
    target = str(schedule.target)
    make = import_target(target)
    if isinstance(make, type) and issubclass(make, LRScheduler):
        raise UserCodeError(
            f"{target} counts steps, of which every stage makes its own number; needed is a "
            "function of the fraction of training that is done, 0 to 1, that gives a factor of the rate",
            "train.schedule.target",
        )
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

    for place in range(_LOOKED_AT):
        factor(place / _LOOKED_AT)
    return factor
