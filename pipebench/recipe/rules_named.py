"""Rules on optimizer and schedule: each has a name or a target, and arguments that its class takes."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from pipebench.errors import choice, nearest, shown
from pipebench.recipe.draft import UNUSABLE, Draft, Problems, rule
from pipebench.recipe.leaves import ARGUMENTS, Key
from pipebench.recipe.named import KINDS, OPTIMIZER, SCHEDULE, Kind, arguments_in, is_class
from pipebench.recipe.options import problems_of
from pipebench.recipe.schema import OptimizerRecipe, ScheduleRecipe
from pipebench.recipe.targets import ALLOWED, is_target


@rule
def _names(draft: Draft) -> Problems:
    for section, kind in KINDS.items():
        given = draft.values[section[0]]
        given = given.get(section[1]) if isinstance(given, dict) else None
        whole = {section[:1], section, (*section, ARGUMENTS)}
        if isinstance(given, dict) and not whole & draft.leaves.faulty:
            yield from _section_problems(draft, section, kind, given)


def _section_problems(draft: Draft, section: Key, kind: Kind, given: Mapping[str, Any]) -> Problems:
    key = ".".join(section)
    name, target = draft.get(f"{key}.name"), draft.get(f"{key}.target")
    if UNUSABLE in (name, target):
        return
    if target is not None and not is_target(target):
        yield f"{key}.target", f"got {shown(target)}, allowed is {ALLOWED}"
    if (name is None) == (target is None):
        said = "neither" if name is None else "both"
        names = ", ".join(kind.names())
        yield key, f"got {said} of name and target, allowed is one of the names {names} or a target, {ALLOWED}"
    elif name is not None and kind.find(name) is None:
        yield f"{key}.name", f"{choice(name, kind.names())}; or a target, {ALLOWED}"
    elif is_class(given, kind):
        yield from _argument_problems(draft, section, kind, given)
    elif target is None:
        _refuse_arguments(draft, section, str(name), [])


def _argument_problems(draft: Draft, section: Key, kind: Kind, given: Mapping[str, Any]) -> Problems:
    """Compare the arguments of a class with its options."""
    key, name = ".".join(section), str(kind.find(given["name"]))
    arguments, parameters = arguments_in(given, kind), kind.parameters(name)
    problem = kind.refusal(name, arguments)
    if problem is not None:
        yield f"{key}.name", f"got {name}, {problem}"
        return
    _refuse_arguments(draft, section, name, list(parameters))
    for argument, said in problems_of(parameters, arguments):
        where, is_pending = f"{key}.{argument}", f"{key}.{ARGUMENTS}.{argument}" in draft.pending
        if argument in kind.keys and argument not in parameters:
            yield where, _not_taken(name, argument, arguments[argument], list(parameters))
        elif argument in parameters and draft.get(where) is not UNUSABLE and not is_pending:
            yield where, f"{said} ({name})"


def _not_taken(name: str, argument: str, value: object, taken: Sequence[str]) -> str:
    """Return what is wrong with an argument that only other classes take."""
    allowed = f", allowed are {', '.join(taken)}{nearest(argument, taken)}" if taken else ""
    return f"got {shown(value)}, which {name} doesn't take (null takes it away){allowed}"


def _refuse_arguments(draft: Draft, section: Key, name: str, taken: Sequence[str]) -> None:
    """Add faults for arguments that a class doesn't take, except keys of the schema, which have faults of their own.

    An argument that no class takes is an unknown key. Null is no argument: it removes one that a base file gives.
    """
    recipe = OptimizerRecipe if section == OPTIMIZER else ScheduleRecipe
    keys = [field.name for field in fields(recipe)]
    if taken:
        keys = [key for key in keys if key not in KINDS[section].keys]
    for found, leaf in list(draft.leaves.found.items()):
        if found[: len(section) + 1] != (*section, ARGUMENTS) or len(found) <= 3 or found[3] in taken:
            continue
        if leaf.value is not None and found[3] in KINDS[section].arguments:
            draft.leaves.fault((*section, *found[3:]), _not_taken(name, found[3], leaf.value, taken), leaf.file)
        elif leaf.value is not None:
            draft.leaves.unknown((*section, *found[3:]), [*keys, *taken], leaf.file)


@rule
def _schedule(schedule: Mapping[str, Any]) -> Problems:
    """Check the keys that only some schedules take."""
    name = schedule["name"]
    if schedule["step_every"] is not None and (name is None or name in KINDS[SCHEDULE].ours):
        yield "train.schedule.step_every", "is for torch's schedulers, whose steps it counts; others need null"
    if name not in KINDS[SCHEDULE].ours:  # a target or a class: its own parameters are checked
        return
    for key, taker in {"every_epochs": "step", "factor": "step", "power": "polynomial"}.items():
        value = schedule[key]
        if name == taker and value is None:
            yield f"train.schedule.{key}", f"is missing, the schedule {taker} needs a number"
        if name != taker and value is not None:
            yield f"train.schedule.{key}", f"got {value:g}, which only the schedule {taker} takes; {name} needs null"
