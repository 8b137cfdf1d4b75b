"""A learning-rate schedule of the user's: a function of the fraction of training that is done."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from pipebench.errors import UserCodeError
from pipebench.recipe.named import given_arguments
from pipebench.recipe.schema import ScheduleRecipe
from pipebench.recipe.targets import import_target
from pipebench.recipe.users_code import users_code

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
