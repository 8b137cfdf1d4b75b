"""Optimizers and learning-rate schedulers by name: a name stands for a class, and takes the arguments of that class.

Their arguments are read from torch's source, so that torch is imported only when a class is used.
"""

import importlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipebench.recipe.leaves import Key, expected_type
from pipebench.recipe.options import typed_arguments
from pipebench.recipe.schema import OptimizerRecipe, ScheduleRecipe
from pipebench.recipe.signatures import bare
from pipebench.recipe.typecheck import problem_with

# Where a word begins in a class's name: StepLR is step_lr, ReduceLROnPlateau reduce_lr_on_plateau, AdamW adamw.
_WORDS = re.compile(r"(?<=[a-z])(?=[A-Z][a-z]|LR)|(?<=LR)(?=[A-Z])")
# Arguments that change how a step is computed, but not its result. They are allowed, but not filled in as defaults.
_HOW = ("foreach", "fused", "capturable", "differentiable", "maximize")
# The classes, by module
_OPTIMIZERS = {
    "torch.optim": (
        "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon", "NAdam", "RAdam",
        "RMSprop", "Rprop", "SGD", "SparseAdam",
    ),
    "pipebench.model.large_batch": ("LAMB", "LARS"),
}  # fmt: skip
_SCHEDULERS = {
    "torch.optim.lr_scheduler": (
        "ChainedScheduler", "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR",
        "ExponentialLR", "LambdaLR", "LinearLR", "MultiStepLR", "MultiplicativeLR", "OneCycleLR", "PolynomialLR",
        "ReduceLROnPlateau", "SequentialLR", "StepLR",
    ),
}  # fmt: skip
_PLAIN = "and a recipe holds plain values: a function of the fraction of training done, 0 to 1, can be a target"
# Why a class isn't supported with any arguments, as the end of a sentence.
REFUSED: Mapping[str, str] = {
    "LBFGS": "whose step asks for the loss again (a closure): a stage has each gradient once",
    "SparseAdam": "which takes sparse gradients only, and those of a stage are dense",
    "ChainedScheduler": f"which takes schedulers (schedulers), {_PLAIN}",
    "LambdaLR": f"which takes a function (lr_lambda), {_PLAIN}",
    "MultiplicativeLR": f"which takes a function (lr_lambda), {_PLAIN}",
    "ReduceLROnPlateau": "whose step asks for metrics: a rate here is a function of the samples seen and nothing else",
    "SequentialLR": f"which takes schedulers (schedulers), {_PLAIN}",
}


@dataclass(frozen=True)
class Kind:
    """A section of the recipe in which a name stands for a class."""

    classes: Mapping[str, Sequence[str]]  # by module
    passed: tuple[str, ...]  # arguments that pipebench passes, as in `options.target_problems`
    keys: tuple[str, ...]  # keys of the schema that are also arguments of some of the classes
    about: Mapping[str, str] = field(default_factory=dict)  # pipebench's own names, with their descriptions

    @property
    def ours(self) -> tuple[str, ...]:
        """Pipebench's own names, which stand for no class."""
        return tuple(self.about)

    def targets(self) -> dict[str, str]:
        """Return the target of each class by name."""
        found = {_name(each): f"{module}:{each}" for module, classes in self.classes.items() for each in classes}
        return dict(sorted(found.items()))

    def find(self, name: str) -> str | None:
        """Return the listed spelling of a name in any form (`RMSprop`, `step_lr`, `StepLR`); None if unknown."""
        if name in self.ours:
            return name
        return next((known for known in self.targets() if _letters(known) == _letters(name)), None)

    def names(self) -> list[str]:
        """Return all names except those of classes that are always refused."""
        return [*self.ours, *(name for name, target in self.targets().items() if _class(target) not in REFUSED)]

    def make(self, name: str) -> Callable[..., Any]:
        """Return the class of a name."""
        target = self.targets()[name]
        made: Callable[..., Any] = getattr(importlib.import_module(target.partition(":")[0]), _class(target))
        return made

    def parameters(self, name: str) -> dict[str, inspect.Parameter]:
        """Return the parameters that a recipe may give to the class of a name, without importing it."""
        target = self.targets()[name]
        taken = None if _class(target) in REFUSED else typed_arguments(bare(target), ("self", *self.passed))
        return taken or {}

    @property
    def arguments(self) -> set[str]:
        """All arguments that any of the classes takes."""
        return {argument for name in self.targets() for argument in self.parameters(name)}

    def refusal(self, name: str, given: Mapping[str, Any]) -> str | None:
        """Return why the class of a name can't be used with these arguments, as the end of a sentence, or None."""
        always, taken = REFUSED.get(_class(self.targets()[name])), self.parameters(name)
        if always is None and "scale_fn" in taken and "scale_fn" in given:
            return f"which takes a function (scale_fn), {_PLAIN}"
        if always is None and given.get("cycle_momentum", "cycle_momentum" in taken):
            return "which would change the momentum, too, and a schedule is of the rate: it needs cycle_momentum: false"
        return always

    def defaults(self, name: str) -> dict[str, Any]:
        """Return the defaults of a name's arguments as YAML data, without those that YAML can't express."""
        plain = {key: _plain(each.default) for key, each in self.parameters(name).items() if key not in _HOW}
        return {key: value for key, value in plain.items() if value is not None}


OPTIMIZER: Key = ("train", "optimizer")
SCHEDULE: Key = ("train", "schedule")
KINDS: dict[Key, Kind] = {
    OPTIMIZER: Kind(_OPTIMIZERS, ("*", "lr"), ("momentum", "weight_decay", "betas", "eps")),
    SCHEDULE: Kind(
        _SCHEDULERS,
        ("*", "last_epoch"),
        ("every_epochs", "factor", "power"),
        {
            "constant": "the same rate from beginning to end",
            "step": "every_epochs: ..., factor: ...",
            "cosine": "to zero at max_epochs",
            "polynomial": "power: ..., to zero at max_epochs",
        },
    ),
}


def given_arguments(section: OptimizerRecipe | ScheduleRecipe) -> dict[str, Any]:
    """Return the arguments for a section's class or target: its `arguments`, and given keys of the schema."""
    kind = KINDS[OPTIMIZER if isinstance(section, OptimizerRecipe) else SCHEDULE]
    return arguments_in({**{key: getattr(section, key) for key in kind.keys}, "arguments": section.arguments}, kind)


def arguments_in(section: Mapping[str, Any], kind: Kind) -> dict[str, Any]:
    """Return the same from a section's plain data."""
    ours = {key: section[key] for key in kind.keys}
    return {**{key: value for key, value in ours.items() if value is not None}, **section["arguments"]}


def is_class(section: Mapping[str, Any], kind: Kind) -> bool:
    """Return whether a section's plain data name a class, not a target or one of pipebench's own names."""
    return section["target"] is None and section["name"] is not None and section["name"] not in kind.ours


def fill(resolved: dict[str, Any]) -> None:
    """Write listed spellings of names, and defaults of arguments not given, into a recipe."""
    for key in KINDS:
        resolved[key[0]][key[1]] = filled(resolved[key[0]][key[1]], key)


def filled(section: Mapping[str, Any], key: Key) -> dict[str, Any]:
    """Return a section's plain data with the defaults of its class, and without arguments that null removes."""
    made, kind = dict(section), KINDS[key]
    name = kind.find(made["name"]) if is_class(made, kind) else None
    if made["target"] is None:
        taken = {} if name is None else kind.parameters(name)
        given = made["arguments"].items()
        made["arguments"] = {argument: value for argument, value in given if value is not None or argument in taken}
    if name is None:  # not a class, or known only with the environment
        return made
    made["name"] = name
    given = arguments_in(made, kind)
    for argument, default in kind.defaults(name).items():
        if argument in given:
            continue
        if argument in kind.keys and problem_with(default, expected_type((*key, argument))) is None:
            made[argument] = default
        else:
            made["arguments"] = {**made["arguments"], argument: default}
    if made.get("step_every", "") is None:
        made["step_every"] = {"epochs": 1, "minibatches": None}
    return made


def _name(of_class: str) -> str:
    return _WORDS.sub("_", of_class).lower()


def _class(target: str) -> str:
    return target.partition(":")[2]


def _letters(name: str) -> str:
    return name.replace("_", "").lower()


def _plain(default: Any) -> Any:
    """Return a default as YAML data; None if there is no default or YAML can't express it."""
    value = list(default) if isinstance(default, tuple) else default
    is_plain = isinstance(value, bool | int | float | str | list)
    return value if is_plain and problem_with(value, Any) is None else None
