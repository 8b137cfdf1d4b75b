"""Rules on optimizer and schedule: each has a name or a target, with arguments that its class takes."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pipebench.errors import choice, nearest
from pipebench.recipe.draft import UNUSABLE, Draft, Problems, rule
from pipebench.recipe.leaves import ARGUMENTS, Key
from pipebench.recipe.named import KINDS, OPTIMIZER, SCHEDULE, Kind, arguments_in, is_class
from pipebench.recipe.options import problems_of
from pipebench.recipe.schema import OptimizerRecipe, ScheduleRecipe
from pipebench.recipe.targets import ALLOWED, is_target
from pipebench.recipe.typecheck import shown


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
        yield f"{key}.name", f"{choice(name[:60], kind.names())}; or a target, {ALLOWED}"
    elif is_class(given, kind):
        yield from _argument_problems(draft, section, kind, given)
    elif target is None:
        _refuse_arguments(draft, section, [])


def _argument_problems(draft: Draft, section: Key, kind: Kind, given: Mapping[str, Any]) -> Problems:
    """Compare the arguments of a class with its options."""
    key, name = ".".join(section), str(kind.find(given["name"]))
    arguments, parameters = arguments_in(given, kind), kind.parameters(name)
    problem = kind.refusal(name, arguments)
    if problem is not None:
        yield f"{key}.name", f"got {name}, {problem}"
        return
    _refuse_arguments(draft, section, list(parameters))
    for argument, said in problems_of(parameters, arguments):
        where, is_pending = f"{key}.{argument}", f"{key}.{ARGUMENTS}.{argument}" in draft.pending
        if argument in kind.keys and argument not in parameters:
            allowed = f"allowed are {', '.join(parameters)}{nearest(argument, parameters)}"
            yield where, f"got {shown(arguments[argument])}, which {name} doesn't take (null takes it away), {allowed}"
        elif argument in parameters and draft.get(where) is not UNUSABLE and not is_pending:
            yield where, f"{said} ({name})"


def _refuse_arguments(draft: Draft, section: Key, taken: list[str]) -> None:
    """Report arguments that nothing takes as unknown keys, except keys of the schema, which have their own fault."""
    recipe = OptimizerRecipe if section == OPTIMIZER else ScheduleRecipe
    keys = [field.name for field in fields(recipe)]
    if taken:
        keys = [key for key in keys if key not in KINDS[section].keys]
    for found, leaf in list(draft.leaves.found.items()):
        if found[: len(section) + 1] == (*section, ARGUMENTS) and len(found) > 3 and found[3] not in taken:
            draft.leaves.unknown((*section, *found[3:]), [*keys, *taken], leaf.file)


@rule
def _schedule(schedule: Mapping[str, Any]) -> Problems:
    """Keys that only some schedules take."""
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
