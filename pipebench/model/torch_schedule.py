"""torch's schedulers as functions of the number of steps: each rate is computed once, in order, and then looked up.

torch's schedulers are stepped in a loop, and most compute a rate from the one before. Here it must be a function of
samples seen, the same for every stage, in every process and after a resumption. The recipe says how long a step is.
"""

import math

import torch

from pipebench.errors import UserCodeError
from pipebench.recipe.named import KINDS, SCHEDULE, given_arguments
from pipebench.recipe.schema import ScheduleRecipe
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
