"""Optimizers and learning-rate schedulers by name: a name is short for a target, a class, and takes what that takes.

What torch has is found by looking into its source, so there is no list of it here that could fall behind. torch is
imported when a class is to be used. Classes that can't work here are told by what they ask for, not by their names.
"""

import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pipebench.recipe.leaves import Key, expected_type
from pipebench.recipe.options import arguments_of
from pipebench.recipe.schema import OptimizerRecipe, ScheduleRecipe
from pipebench.recipe.skeletons import skeleton, subclasses
from pipebench.recipe.typecheck import problem_with

_OURS = {"lars": "pipebench.model.large_batch:LARS", "lamb": "pipebench.model.large_batch:LAMB"}
# Where a word begins in a class's name: StepLR is step_lr, ReduceLROnPlateau reduce_lr_on_plateau, AdamW adamw.
_WORDS = re.compile(r"(?<=[a-z])(?=[A-Z][a-z]|LR)|(?<=LR)(?=[A-Z])")
# Arguments that say how a step is computed, not what it comes to: a recipe may give them, and needn't show them.
_HOW = ("foreach", "fused", "capturable", "differentiable", "maximize")
_AT_BEST = {"cycle_momentum": False}  # given this, no class is refused for what it could be given


@dataclass(frozen=True)
class Kind:
    """A section of the recipe in which a name is short for a class.

    Attributes:
        targets: name to target, of every class there is.
        passed: arguments that pipebench passes itself, as in `options.target_problems`.
        keys: keys of the schema that such a class may take as arguments, too.
        about: names that aren't classes, and what they do.
    """

    targets: Callable[[], Mapping[str, str]]
    passed: tuple[str, ...]
    keys: tuple[str, ...]
    about: Mapping[str, str] = field(default_factory=dict)

    @property
    def ours(self) -> tuple[str, ...]:
        """Names that aren't classes."""
        return tuple(self.about)

    def find(self, name: str) -> str | None:
        """Return the name as it is written here, given in any form: `RMSprop`, `step_lr`, `StepLR`."""
        if name in self.ours:
            return name
        return next((known for known in self.targets() if _letters(known) == _letters(name)), None)

    def names(self) -> list[str]:
        """Return every name there is, but for classes that are refused whatever they are given."""
        return [*self.ours, *(name for name in self.targets() if refusal(self.like(name), _AT_BEST) is None)]

    def make(self, name: str) -> Callable[..., Any]:
        """Return the class of a name."""
        module, _, attribute = self.targets()[name].partition(":")
        made: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
        return made

    def like(self, name: str) -> Callable[..., Any]:
        """Return what takes the arguments that the class of a name takes, without importing torch."""
        return skeleton(self.targets()[name])

    def parameters(self, name: str) -> dict[str, inspect.Parameter]:
        """Return what the class of a name takes from a recipe."""
        return arguments_of(self.like(name), self.passed) or {}

    def defaults(self, name: str) -> dict[str, Any]:
        """Return the defaults of a name's arguments as a recipe writes them; null stands for itself and is left out."""
        plain = {key: _plain(each.default) for key, each in self.parameters(name).items() if key not in _HOW}
        return {key: value for key, value in plain.items() if value is not None}


@cache
def _optimizers() -> Mapping[str, str]:
    return dict(sorted({**_classes("torch.optim", "Optimizer"), **_OURS}.items()))


@cache
def _schedulers() -> Mapping[str, str]:
    return dict(sorted(_classes("torch.optim.lr_scheduler", "LRScheduler").items()))


OPTIMIZER: Key = ("train", "optimizer")
SCHEDULE: Key = ("train", "schedule")
KINDS: dict[Key, Kind] = {
    OPTIMIZER: Kind(_optimizers, ("*", "lr"), ("momentum", "weight_decay", "betas", "eps")),
    SCHEDULE: Kind(
        _schedulers,
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
    """Return the arguments of a section's class or target: its own, and those keys of the schema that were given."""
    kind = KINDS[OPTIMIZER if isinstance(section, OptimizerRecipe) else SCHEDULE]
    return arguments_in({**{key: getattr(section, key) for key in kind.keys}, "arguments": section.arguments}, kind)


def arguments_in(section: Mapping[str, Any], kind: Kind) -> dict[str, Any]:
    """Return the same of a section's plain data."""
    ours = {key: section[key] for key in kind.keys}
    return {**{key: value for key, value in ours.items() if value is not None}, **section["arguments"]}


def is_class(section: Mapping[str, Any], kind: Kind) -> bool:
    """Return whether a section's plain data name a class, and not a target or one of our own."""
    return section["target"] is None and section["name"] is not None and section["name"] not in kind.ours


def fill(resolved: dict[str, Any]) -> None:
    """Write names as they are written here, and every argument that wasn't given with its default, into a recipe."""
    for key in KINDS:
        resolved[key[0]][key[1]] = filled(resolved[key[0]][key[1]], key)


def filled(section: Mapping[str, Any], key: Key) -> dict[str, Any]:
    """Return a section's plain data with everything that its class takes; as it is where it names none."""
    made, kind = dict(section), KINDS[key]
    name = kind.find(made["name"]) if is_class(made, kind) else None
    if name is None:  # none of a class, or only the environment knows which
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


def refusal(make: Callable[..., Any], given: Mapping[str, Any]) -> str | None:
    """Return why a class of torch's can't work here, as the end of a sentence; None if nothing it asks for says so."""
    if "sparse" in make.__name__.lower():  # nothing but its name says so before it takes a step
        return "which takes sparse gradients only, and those of a stage are dense"
    step = [*inspect.signature(make.step).parameters.values()][1:]  # type: ignore[attr-defined]
    asked = [each.name for each in step if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
    if "closure" in asked:
        return "whose step asks for the loss again (a closure): a stage has each gradient once"
    if asked:
        return f"whose step asks for {', '.join(asked)}: a rate here is a function of the samples seen and nothing else"
    for name, each in inspect.signature(make).parameters.items():
        about = next((word for word in ("Callable", "LRScheduler") if word in str(each.annotation)), None)
        if about is not None and (each.default is each.empty or name in given):
            what = "a function" if about == "Callable" else "schedulers"
            return f"which takes {what} ({name}), and a recipe holds plain values: a function can be a target"
        if name == "cycle_momentum" and given.get(name, each.default):
            return "which would change the momentum, too, and a schedule is of the rate: it needs cycle_momentum: false"
    return None


def _classes(module: str, base: str) -> dict[str, str]:
    return {_WORDS.sub("_", name).lower(): f"{module}:{name}" for name in subclasses(module, base)}


def _letters(name: str) -> str:
    return name.replace("_", "").lower()


def _plain(default: Any) -> Any:
    """Return a default as YAML has it, or None for what YAML hasn't, and for no default."""
    value = list(default) if isinstance(default, tuple) else default
    is_plain = isinstance(value, bool | int | float | str | list)
    return value if is_plain and problem_with(value, Any) is None else None
