"""A recipe as leaves: every value by its full key, with the file that gave it.

Files and the command line are merged leaf by leaf, so that all faults are found, each with its file and key.
"""

import functools
import itertools
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, make_dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipebench.errors import Fault, nearest, shown
from pipebench.hooks import hooks, with_section
from pipebench.recipe.schema import Recipe
from pipebench.recipe.sweep import SweptList, as_sweep, elements, problem_with_elements
from pipebench.recipe.typecheck import in_words, problem_with
from pipebench.recipe.yaml_file import MAX_DEPTH, parse

COMMAND_LINE = "command line"
# Sections whose keys exclude each other: a file that gives one of the keys replaces all of them.
TOGETHER = (("train", "evaluate_every"), ("train", "checkpoint_every"), ("train", "schedule", "step_every"))
# Sections in which the arguments of a class or target are written beside the section's own keys.
TARGETED = (("train", "optimizer"), ("train", "schedule"))
ARGUMENTS = "arguments"
LISTED = (("parallelism", "vpipe", "moves"),)  # keys of type Any whose lists are values, not sweeps
_OPTION = re.compile(r"[A-Za-z_]\w*", re.ASCII)

Key = tuple[str, ...]


@dataclass(frozen=True)
class Leaf:
    """A value and where it was given."""

    value: Any  # as written, interpolations included
    file: str  # for messages: the file, or `command line`
    folder: Path  # what relative paths in the value are relative to


def dotted(key: Key) -> str:
    """Return a key as text, with dots between its parts, printable and cut to a readable length."""
    return ".".join(part if part.isprintable() and len(part) <= 60 else repr(part)[:60] for part in key)


def is_expression(value: object) -> bool:
    """Return whether a value holds an interpolation, `${...}`."""
    if isinstance(value, list | dict):
        return any(is_expression(item) for item in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, str) and "${" in value


@functools.cache
def types_of(section: type) -> Mapping[str, Any]:
    """Return the declared types of a section's keys by name."""
    return (_WithExtensions if section is Recipe else dict)(get_type_hints(section))


class _WithExtensions(dict[str, Any]):
    """The types of a recipe's top-level keys; looking up the section of an extension imports the extension."""

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in with_section()

    def __iter__(self) -> Iterator[str]:
        return chain(super().__iter__(), with_section())

    def __missing__(self, name: str) -> Any:
        if name not in with_section():
            raise KeyError(name)
        return hooks("section", [name])[name] | None


@functools.cache
def recipe_with(sections: tuple[tuple[str, bool], ...]) -> type[Recipe]:
    """Return the class of recipes with sections of extensions; `sections` are pairs of a name and whether it is used.

    A section that isn't used is always null, and its extension isn't imported.
    """
    made = [(name, types_of(Recipe)[name] if on else None, None) for name, on in sections]

    def reduced(recipe: Recipe) -> tuple[Any, ...]:  # pickle finds classes by name, and this one is in no module
        return _with_sections, (sections, {each.name: getattr(recipe, each.name) for each in fields(recipe)})

    own = {"__doc__": Recipe.__doc__, "__reduce__": reduced}
    return make_dataclass(Recipe.__name__, made, bases=(Recipe,), namespace=own, frozen=True)


def _with_sections(sections: tuple[tuple[str, bool], ...], values: Mapping[str, Any]) -> Recipe:
    return recipe_with(sections)(**values)


def expected_type(key: Key) -> Any:
    """Return the declared type of a key of the schema; Any for an option of a model or dataset."""
    expected: Any = Recipe
    for part in key:
        section = section_in(expected)
        expected = types_of(section)[part] if section else Any
    return expected


def full_keys(section: type = Recipe, prefix: Key = ()) -> Iterator[str]:
    """Yield the schema's full keys in order, sections included, without options of models, data sets and targets."""
    for name, expected in types_of(section).items():
        if name != ARGUMENTS:
            yield dotted((*prefix, name))
            inside = section_in(expected)
            yield from () if inside is None else full_keys(inside, (*prefix, name))


class Leaves:
    """The leaves of a recipe and the faults found in them."""

    def __init__(self) -> None:
        self.found: dict[Key, Leaf] = {}
        self.faults: list[Fault] = []
        self.faulty: set[Key] = set()

    def add(self, data: Mapping[Any, Any], file: str, folder: Path) -> None:
        """Merge the data of a file over the leaves so far."""
        new = {key: Leaf(value, file, folder) for key, value in self._flatten(data, Recipe, (), file)}
        self._drop_replaced(new)
        self.found.update(new)

    def add_overrides(self, overrides: Sequence[str]) -> None:
        """Merge `key=value` words of the command line over the leaves; the last value of a key wins."""
        for text in overrides:
            name, _, written = text.partition("=")
            key: Key = tuple(name.strip().split("."))
            try:
                data = self._nested(key, _override(text, key, written))
            except ValueError as error:
                self.fault(key if len(key) <= MAX_DEPTH else key[:2], str(error), COMMAND_LINE)
            else:
                self.add(data, COMMAND_LINE, Path.cwd())

    def chosen(self, values: Mapping[str, Any]) -> "Leaves":
        """Return the leaves of one run of a sweep, with the run's elements in place of lists."""
        leaves = Leaves()
        leaves.found = {
            key: replace(leaf, value=values[dotted(key)]) if isinstance(leaf.value, SweptList) else leaf
            for key, leaf in self.found.items()
        }
        leaves.faults, leaves.faulty = [*self.faults], {*self.faulty}
        return leaves

    def fault(self, key: Key, problem: str, file: str) -> None:
        """Add a fault of a key."""
        self.faults.append(Fault(file, dotted(key), problem))
        self.faulty.add(key)

    def unknown(self, key: Key, allowed: Sequence[str], file: str) -> None:
        """Add a fault for an unknown key; `allowed` are those of its section."""
        names = [name for name in allowed if name != ARGUMENTS]
        name, colon, value = key[-1].partition(":")
        if name in names and colon:  # in `{mode:dp}` all is the key
            self.fault((*key[:-1], name), f"got '{name}:{value}'; put a space after the colon: '{name}: {value}'", file)
            return
        where = "here" if len(key) > 1 else "at the top of a recipe"
        problem = f"unknown key, allowed {where} are {', '.join(names)}{nearest(key[-1][:60], names, full_keys())}"
        self.faults.append(Fault(file, dotted(key), problem))

    def is_faulty(self, key: Key) -> bool:
        """Return whether a key, a section it is in or a key inside it has a fault."""
        return any(key[: len(bad)] == bad or bad[: len(key)] == key for bad in self.faulty)

    def _drop_replaced(self, new: Mapping[Key, Leaf]) -> None:
        """Remove the leaves that new ones replace: sections they are in, keys inside them, and excluded keys."""
        given = [key for key, leaf in new.items() if leaf.value is not None]  # null replaces no other key
        groups = {group for group in TOGETHER for key in given if key[: len(group)] == group}
        for old in list(self.found):  # a section replaces its keys, and a key the section that was given as a whole
            replaced = any(old[: len(key)] == key or key[: len(old)] == old for key in new)
            if (replaced and old not in new) or any(old[: len(group)] == group for group in groups):
                del self.found[old]

    def _flatten(self, data: Mapping[Any, Any], section: type, prefix: Key, file: str) -> Iterator[tuple[Key, Any]]:
        """Yield the leaves in the data of a section; add a fault for each key that isn't allowed there."""
        expected = types_of(section)
        for name, value in data.items():
            if value is None and not prefix and name in with_section():
                yield (name,), None  # without looking up, and so importing, the section
            elif name in expected:
                yield from self._value((*prefix, name), value, expected[name], file)
            elif prefix in TARGETED and isinstance(name, str) and _OPTION.fullmatch(name):
                yield from self._value((*prefix, ARGUMENTS, name), value, Any, file)  # faulty unless for a target
            else:
                self.unknown((*prefix, str(name)), list(expected), file)

    def _value(self, key: Key, value: Any, expected: Any, file: str) -> Iterator[tuple[Key, Any]]:
        """Yield the leaves of a key's value, or add a fault if it isn't of the expected type."""
        section = section_in(expected)
        is_option = key[0] in ("model", "dataset") or ARGUMENTS in key or key in LISTED
        if isinstance(value, dict) and section is not None and (value or expected is section):
            yield from self._flatten(value, section, key, file)
        elif isinstance(value, dict) and get_origin(expected) is dict:
            yield from self._options(key, value, file)
        elif section is None and (swept := as_sweep(value, expected, is_option=is_option)) is not None:
            yield from self._sweep(key, swept, expected, file)
        elif value != MISSING and (problem := _problem(value, expected)) is not None:
            self.fault(key, problem + _hint(key, value, expected), file)
        else:
            yield key, value

    def _sweep(self, key: Key, swept: SweptList, expected: Any, file: str) -> Iterator[tuple[Key, Any]]:
        """Yield the leaf of a sweep's list, or add the faults of its elements."""
        count = len(swept.values)
        problems = [
            (index, problem)
            for index, value in enumerate(swept.values, 1)
            if (problem := _problem(value, expected)) is not None
        ]
        if problems and _problem([*swept.values], expected) is None:
            listed = ",".join(map(str, swept.values))
            self.fault(key, f"got {shown(listed)}, allowed is {in_words(expected)}{_as_list(key, listed)}", file)
            return
        for index, problem in problems:
            self.fault(key, f"{problem} (element {index} of {count})" if count > 1 else problem, file)
        whole = problem_with_elements(swept.values)
        if whole is not None and not problems:
            is_plan = key == ("parallelism", "plan") and all(isinstance(value, int) for value in swept.values)
            hint = f"; did you mean {'-'.join(map(str, swept.values))}?" if is_plan and swept.values else ""
            self.fault(key, f"{whole}{hint}", file)
        if key == ("name",):
            self.fault(key, "got a list, allowed is text: the runs of a sweep are named by what varies", file)
        if not self.is_faulty(key):
            yield key, swept

    def _options(self, key: Key, data: Mapping[Any, Any], file: str) -> Iterator[tuple[Key, Any]]:
        for name, value in data.items():
            if isinstance(name, str) and _OPTION.fullmatch(name):
                yield from self._value((*key, name), value, Any, file)
            else:
                self.fault((*key, str(name)), "is not a name an option can have (letters, digits and _)", file)

    def _nested(self, key: Key, value: Any) -> dict[str, Any]:
        """Return a key's value as nested data.

        A leaf may be a mapping, such as an option's value. If the key is inside one, the data has its other keys, too.
        """
        found = next((key[:count] for count in range(1, len(key)) if key[:count] in self.found), ())
        before = self.found[found].value if found else None
        nested = _with(before, key[len(found) :], value)
        for part in reversed(found):
            nested = {part: nested}
        return dict(nested)


def _override(text: str, key: Key, written: str) -> Any:
    """Return the value of a word `key=value`; raises a ValueError, the end of a sentence, if it isn't one."""
    if len(key) > MAX_DEPTH:
        raise ValueError(f"got {text[:60]!r}, keys are nested at most {MAX_DEPTH} deep")
    listed = elements(written)
    parts = [written] if listed is None else listed
    values = [_as_text(part, parse(part), key) for part in parts]
    if not all(key):
        raise ValueError(f"got {text[:60]!r}, allowed is key=value")
    if not all(part.strip() for part in parts):
        given = "no value after =" if listed is None else f"{shown(written)}, a list with an empty element"
        raise ValueError(f"got {given}; null takes a value away")
    if key == ("extends",):
        raise ValueError("is for files: name another recipe instead")
    return values[0] if listed is None else SweptList(tuple(values))


def _with(mapping: object, key: Key, value: Any) -> Any:
    """Return a copy of a nested mapping with a new value for one key; anything but a mapping counts as an empty one."""
    if not key:
        return value
    others = mapping if isinstance(mapping, dict) else {}
    return {**others, key[0]: _with(others.get(key[0]), key[1:], value)}


def section_in(expected: Any) -> type | None:
    """Return the dataclass in a type such as `TargetRecipe | None`; None for other types."""
    for part in (expected, *get_args(expected)):
        if isinstance(part, type) and is_dataclass(part):
            return part
    return None


def _needs_nothing(section: type | None) -> bool:
    """Return whether a section may be given as `{}`: all its keys have defaults, and not all of these are null."""
    values = [] if section is None else defaults(section).values()
    return MISSING not in values and any(value is not None for value in values)


def _problem(value: object, expected: Any) -> str | None:
    """Return what is wrong with a value that isn't resolved yet, as the end of a sentence, or None."""
    holds_keys = section_in(expected) is not None or get_origin(expected) is dict
    if value == {} and _needs_nothing(section_in(expected)):
        return None
    if holds_keys and (value == {} or is_expression(value)):
        given = "an empty mapping" if value == {} else "an interpolation"
        return f"got {given}, allowed is {in_words(expected)}"
    if not _is_text_expression(value) and problem_with(_without_expressions(value), expected):
        return problem_with(value, expected)
    if not is_expression(value):
        return None
    if _nesting(str(value)) > MAX_DEPTH:
        return f"got {shown(value)}, whose brackets are nested more than {MAX_DEPTH} deep"
    try:
        OmegaConf.create({"value": value})
    except OmegaConfBaseException:
        return f"got {shown(value)}, which is no interpolation: allowed is ${{key}} or ${{oc.env:NAME}}"
    return None


def _hint(key: Key, value: object, expected: Any) -> str:
    """Return a hint where a list or a section is expected: the word in a list, or the section's key that takes it."""
    if isinstance(value, str) and _problem([value], expected) is None:
        return _as_list(key, value)
    section = section_in(expected)
    if (section is None and get_origin(expected) is not dict) or is_expression(value):
        return ""
    types = types_of(section) if section is not None else {"name": str}
    takes = (name for name in ("name", "kind", "mode", "epochs", "value") if name in types)
    found = next((name for name in takes if problem_with(value, types[name]) is None), None)
    return "" if found is None else f"; did you mean '{dotted((*key, found))}={str(value)[:60]}'?"


def _as_list(key: Key, given: str) -> str:
    return f"; did you mean '{dotted(key)}=[{given[:60]}]'?"


def _nesting(text: str) -> int:
    """Return the largest depth of nested brackets."""
    return max(itertools.accumulate((letter in "{[(") - (letter in "}])") for letter in text))


def _without_expressions(value: object) -> object:
    """Return the part of a value that can be checked before interpolations are resolved."""
    if isinstance(value, list):
        return [item if not is_expression(item) else [] for item in value if not _is_text_expression(item)]
    return value


def _is_text_expression(value: object) -> bool:
    return isinstance(value, str) and is_expression(value)


def _as_text(written: str, value: Any, key: Key) -> Any:
    """Return a command line's number as text if its key takes text: the shell removes the quotes of `name="2019"`."""
    try:
        expected = expected_type(key)
    except KeyError:
        return value
    wants_text = expected is str or (str in get_args(expected) and get_origin(expected) is not list)
    return written.strip() if wants_text and isinstance(value, int | float) else value


def defaults(section: type = Recipe) -> dict[str, Any]:
    """Return the schema's defaults as nested plain data; `???` where a value is required."""
    found: dict[str, Any] = pickle.loads(_pickled_defaults(section))  # a copy, ten times as fast as `deepcopy`
    return found | dict.fromkeys(with_section() if section is Recipe else ())


@functools.cache
def _pickled_defaults(section: type) -> bytes:
    return pickle.dumps(asdict(section()))
