"""The explicit validation step: what a recipe's types can't say.

Rules run once, over a recipe that is merged and resolved, and need neither data nor device. A rule names the keys it
reads and is passed over when one of them is already faulty, so every fault is reported and none twice.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pipebench.errors import choice
from pipebench.recipe.engines import ENGINES
from pipebench.recipe.leaves import Key, Leaves
from pipebench.recipe.typecheck import shown
from pipebench.schedule.modes import AUTO, MODES, ORDERS, WEIGHT_POLICIES

UNUSABLE: Final = object()
Problems = Iterator[tuple[str, str]]
_RULES: list[tuple[tuple[str, ...], Callable[..., Problems]]] = []


@dataclass
class Draft:
    """A recipe under validation.

    Attributes:
        values: nested plain data, resolved.
        leaves: where each value came from; takes the faults.
        pending: keys whose value only the environment knows.
        source: the recipe's own file, blamed for defaults.
        folder: where that file is.
        made: what rules made on the way for later rules: `@cluster`, `@dataset`.
    """

    values: Mapping[str, Any]
    leaves: Leaves
    pending: set[str]
    source: str
    folder: Path
    made: dict[str, Any] = field(default_factory=dict)

    def get(self, key: str) -> Any:
        """Return a value, or `UNUSABLE` if it is faulty or not known yet."""
        if key.startswith("@"):
            return self.made.get(key, UNUSABLE)
        path = tuple(key.split("."))
        if self.leaves.is_faulty(path) or any(each == key or each.startswith(f"{key}.") for each in self.pending):
            return UNUSABLE
        value: Any = self.values
        for part in path:
            if not isinstance(value, dict) or part not in value:
                return None
            value = value[part]
        return value

    def fault(self, key: str, problem: str) -> None:
        """Note a fault under the file that gave the key."""
        path = tuple(key.split(".")) if key else ()
        self.leaves.fault(path, problem, self._file(path))

    def _file(self, path: Key) -> str:
        for length in range(len(path), 0, -1):
            for key, leaf in reversed(self.leaves.found.items()):
                if key[:length] == path[:length] and (length > 1 or len(path) == 1):
                    return leaf.file
        return self.source


def check(draft: Draft) -> None:
    """Run every rule; faults go to `draft.leaves`."""
    # Imported here: they register their rules, and use what is above.
    from pipebench.recipe import rules_training, rules_zoo  # noqa: F401

    for key, names in CHOICES.items():
        _check_choice(draft, key, names)
    for key, (is_allowed, words) in RANGES.items():
        value = draft.get(key)
        if value is not UNUSABLE and value is not None and not is_allowed(value):
            draft.fault(key, f"got {shown(value)}, allowed is {words}")
    for keys, rule_function in _RULES:
        values = [draft if key == "@draft" else draft.get(key) for key in keys]
        if not any(value is UNUSABLE for value in values):
            for key, problem in rule_function(*values):
                draft.fault(key, problem)


def rule(*keys: str) -> Callable[[Callable[..., Problems]], Callable[..., Problems]]:
    """Register a function of these keys' values that yields pairs of key and problem."""

    def register(function: Callable[..., Problems]) -> Callable[..., Problems]:
        _RULES.append((keys, function))
        return function

    return register


def _check_choice(draft: Draft, key: str, names: tuple[str, ...]) -> None:
    value = draft.get(key)
    if value is UNUSABLE or value is None or value in names:
        return
    draft.fault(key, choice(str(value)[:60], names))


def _within(smallest: float, largest: float) -> Callable[[float], bool]:
    return lambda value: smallest <= value <= largest


CHOICES: dict[str, tuple[str, ...]] = {
    "train.optimizer.name": ("sgd", "adam", "adamw"),
    "train.optimizer.lr_scaling": ("replicas", "none"),
    "train.schedule.name": ("constant", "step", "cosine", "polynomial"),
    "parallelism.mode": (*MODES, AUTO),
    "parallelism.cost_model": ("overlap", "sosp19", "artifact"),  # as in planner.cost_models, which takes NumPy to load
    "parallelism.order": ORDERS,
    "parallelism.weights": WEIGHT_POLICIES,
    "engine.kind": tuple(ENGINES),
    "engine.device": ("auto", "cpu", "cuda"),
}

_COUNT = (_within(1, 2**31), "a whole number of at least 1, at most 2147483648")
_WEEK_S = 604_800.0  # sockets and timers refuse centuries
_LIMIT = "a number of seconds from 0.1 to 604800, a week"
RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "train.seed": (_within(0, 2**63 - 1), "a whole number from 0 on"),
    "train.minibatch_size": _COUNT,
    "train.streams": _COUNT,
    "train.max_epochs": _COUNT,
    "train.optimizer.lr": (lambda lr: 0 < lr <= 1e6, "a number above 0, at most 1e6"),
    "train.optimizer.momentum": (lambda momentum: 0 <= momentum < 1, "a number from 0 to below 1"),
    "train.optimizer.weight_decay": (_within(0, 1e6), "a number of at least 0, at most 1e6"),
    "train.optimizer.eps": (lambda eps: 0 < eps <= 1, "a number above 0, at most 1"),
    "train.optimizer.clip_norm": (lambda norm: norm > 0, "a number above 0, or null"),
    "train.optimizer.betas": (
        lambda betas: len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
        "two numbers from 0 to below 1",
    ),
    "train.schedule.every_epochs": (lambda epochs: epochs > 0, "a number above 0"),
    "train.schedule.factor": (lambda factor: factor > 0, "a number above 0"),
    "train.schedule.power": (lambda power: power > 0, "a number above 0"),
    "train.schedule.warmup_epochs": (lambda epochs: epochs >= 0, "a number of at least 0"),
    "train.evaluate_every.epochs": _COUNT,
    "train.evaluate_every.minibatches": _COUNT,
    "train.checkpoint_every.epochs": _COUNT,
    "train.checkpoint_every.minibatches": _COUNT,
    "engine.max_restarts": (_within(0, 2**31), "a whole number from 0 on, at most 2147483648"),
    "engine.stall_limit_s": (_within(0.1, _WEEK_S), _LIMIT),
    "engine.join_limit_s": (_within(0.1, _WEEK_S), _LIMIT),
    "cluster.servers": (lambda servers: servers >= 1, "a whole number of at least 1"),  # at most: the cluster's rule
    "parallelism.microbatches": _COUNT,
    "parallelism.accumulate": _COUNT,
}
