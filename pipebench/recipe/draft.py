"""Validates a merged and resolved recipe by ranges and rules, without data or device.

A rule is skipped if one of the keys that it reads is faulty, so that each fault is reported once.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Final, TypeVar

from pipebench.errors import choice, shown
from pipebench.hooks import EXTENSIONS, hooks, keys_of
from pipebench.recipe.leaves import ARGUMENTS, Key, Leaves, full_keys
from pipebench.recipe.ranges import CHOICES, RANGES
from pipebench.schedule.modes import MODES
from pipebench.schedule.syncs import SYNCS

_Row = TypeVar("_Row")
UNUSABLE: Final = object()  # in place of a value that is faulty, or not known yet
Problems = Iterator[tuple[str, str]]
_KEYS = tuple(full_keys())
RULES: list[tuple[tuple[str, ...], Callable[..., Problems]]] = []
# Parameters of rules that are no keys: the draft itself, and what earlier rules made of the recipe.
MADE = ("draft", "builds", "cluster", "row", "dataset", "metrics")


@dataclass
class Draft:
    """A recipe under validation."""

    values: Mapping[str, Any]  # nested plain data, resolved
    leaves: Leaves  # where each value came from; collects the faults
    pending: set[str]  # keys whose values need environment variables that aren't set
    source: str  # the recipe's own file, named in faults of defaults
    folder: Path  # of that file
    made: dict[str, Any] = field(default_factory=dict)  # values that rules made for later rules: `@cluster`

    def __post_init__(self) -> None:
        self.made["@draft"] = self

    def get(self, key: str) -> Any:
        """Return a key's value, None if it has none, or `UNUSABLE`."""
        if key.startswith("@"):
            return self.made.get(key, UNUSABLE)
        path = tuple(key.split("."))
        if self.leaves.faulty and self.leaves.is_faulty(path):
            return UNUSABLE
        if self.pending and any(each == key or each.startswith(f"{key}.") for each in self.pending):
            return UNUSABLE
        value: Any = self.values
        for part in path:
            if not isinstance(value, dict) or part not in value:
                return None
            value = value[part]
        return value

    def given(self, section: str, *names: str) -> dict[str, Any]:
        """Return the values of those keys of a section that are neither null nor faulty."""
        found = {name: self.get(f"{section}.{name}") for name in names}
        return {name: value for name, value in found.items() if value is not None and value is not UNUSABLE}

    def fault(self, key: str, problem: str) -> None:
        """Add a fault of a key, in the file that gave its value."""
        path = tuple(key.split(".")) if key else ()
        self.leaves.fault(path, problem, self._file(path))

    def _file(self, path: Key) -> str:
        written = self.leaves.found.get((*path[:-1], ARGUMENTS, *path[-1:]))  # an argument of a class or target
        if written is not None:
            return written.file
        # The last file that gave the key, else the last one that gave anything in the innermost section around it.
        for length in range(len(path), 0, -1):
            for key, leaf in reversed(self.leaves.found.items()):
                if key[:length] == path[:length] and (length > 1 or len(path) == 1):
                    return leaf.file
        return self.source


def rule(function: Callable[..., Problems]) -> Callable[..., Problems]:
    """Register a function that yields pairs of a key and what is wrong with it.

    Its parameters name the keys whose values it gets: by the last word of a key, or, if several keys end in that word,
    by more words joined by `__` (`engine__compile`). Parameters in MADE get what other rules made.
    """
    RULES.append((tuple(map(_key_of, inspect.signature(function).parameters)), function))
    return function


def either(table: Mapping[str, _Row], fits: Callable[[_Row], object]) -> str:
    """Return the names of a table's fitting rows, joined by `or`, to say what is allowed."""
    return " or ".join(name for name, row in table.items() if fits(row))


def _key_of(parameter: str) -> str:
    if parameter in MADE:
        return f"@{parameter}"
    name = parameter.replace("__", ".")
    fitting = [key for key in _KEYS if f".{key}".endswith(f".{name}")]
    # The default is for keys that aren't in the schema: sections of extensions.
    return min(fitting, key=lambda key: key.count("."), default=name)


def check(draft: Draft) -> None:
    """Run every rule; faults go to `draft.leaves`."""
    on = turned_on(draft.get)
    for key, names in chain(CHOICES.items(), *(each.items() for each in hooks("choices", on).values())):
        value = draft.get(key)
        if value is not UNUSABLE and value is not None and value not in names:
            draft.fault(key, choice(value, names))
    for key, (is_allowed, words) in chain(RANGES.items(), *(each.items() for each in hooks("ranges", on).values())):
        value = draft.get(key)
        if value is not UNUSABLE and value is not None and not is_allowed(value):
            draft.fault(key, f"got {shown(value)}, allowed is {words}")
    # In the order of their modules, which may be imported in any: rules_cluster, the first, makes what others read.
    rules = sorted(RULES, key=lambda each: each[1].__module__)
    for keys, rule_function in chain(rules, *hooks("rules", on).values()):
        values = [draft.get(key) for key in keys]
        if not any(value is UNUSABLE for value in values):
            for key, problem in rule_function(*values):
                draft.fault(key, problem)


def turned_on(get: Callable[[str], Any]) -> list[str]:
    """Return the extensions that a recipe enables; `get` returns the value of a key."""
    mode, sync = get("parallelism.mode"), get("parallelism.sync")
    if sync is None and mode in MODES:
        sync = MODES[mode].sync
    needed = SYNCS[sync].extension if isinstance(sync, str) and sync in SYNCS else ""
    return [name for name in EXTENSIONS if name == needed or any(_is_on(get(key)) for key in keys_of(name))]


def _is_on(value: Any) -> bool:
    return value is not None and value is not False and value != []
