"""Read keys of a YAML file and collect faults with their full keys."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from pipebench.errors import Fault, choice, nearest, shown
from pipebench.recipe.typecheck import problem_with

_T = TypeVar("_T")
WORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)  # a name in an expression
NO_WORD = "is no name that an expression can have (letters, digits and _)"


@dataclass
class Reading:
    """The faults of a file, in the order found."""

    file: str  # as displayed
    faults: list[Fault] = field(default_factory=list)

    def fault(self, key: str, problem: str) -> None:
        """Record a fault."""
        self.faults.append(Fault(self.file, key, problem))

    def mapping(self, given: object, key: str, allowed: Collection[str] = ()) -> dict[str, Any]:
        """Return a mapping without invalid keys; {} if it is null or no mapping.

        Args:
            given: as read from the file.
            key: its full key, "" for the file.
            allowed: names of keys; if empty, any text.
        """
        if given is None:
            return {}
        if not isinstance(given, dict):
            keys = f" with the keys {', '.join(allowed)}" if allowed else ""
            self.fault(key, f"got {shown(given)}, allowed is a mapping{keys}")
            return {}
        found = {}
        for name, value in given.items():
            if not isinstance(name, str):
                self.fault(self.inside(key, str(name)), f"got the key {shown(name)}, allowed is text; put it in quotes")
            elif allowed and name not in allowed:
                self.fault(
                    self.inside(key, name[:60]),
                    f"unknown key, allowed here are {', '.join(allowed)}{nearest(name[:60], allowed)}",
                )
            else:
                found[name] = value
        return found

    def named(self, given: object, key: str) -> dict[str, Any]:
        """Return a mapping whose keys are valid names in expressions."""
        found = self.mapping(given, key)
        for name in list(found):
            if not WORD.fullmatch(name):
                self.fault(f"{key}.{name[:60]}", NO_WORD)
                del found[name]
        return found

    def items(self, given: object, key: str, what: str) -> list[Any]:
        """Return a list, [] if it is null or no list; `what` describes its elements."""
        if given is None:
            return []
        if not isinstance(given, list):
            self.fault(key, f"got {shown(given)}, allowed is a list of {what}")
            return []
        return given

    def plain(self, data: Mapping[str, Any], key: str, name: str, kind: type[_T], default: _T | None = None) -> _T:
        """Return a value of a plain type; if it is missing or wrong, the default or else the type's empty value.

        Args:
            data: the mapping that has the value.
            key: its full key.
            name: the value's key in it.
            kind: the value's type.
            default: None if the value is required.
        """
        given = data.get(name)
        if given is None and default is not None:
            return default
        problem = "is missing and has no default" if given is None else problem_with(given, kind)
        if problem is None and kind is str and not str(given).strip():
            problem = "got nothing readable, needed is a sentence or a word"
        if problem is not None:
            self.fault(self.inside(key, name), problem)
            return default if default is not None else kind()
        return cast("_T", given)

    def one_of(self, data: Mapping[str, Any], key: str, name: str, allowed: Collection[str], default: str) -> str:
        """Return the word at `name`, one of the allowed ones; the default if it is missing or wrong."""
        given = data.get(name)
        if given is None:
            return default
        if given not in allowed:
            self.fault(self.inside(key, name), choice(given, allowed))
            return default
        return str(given)

    def words(self, data: Mapping[str, Any], key: str, name: str) -> tuple[str, ...]:
        """Return a list of texts, empty if missing or wrong."""
        given = data.get(name)
        if given is None:
            return ()
        problem = problem_with(given, list[str])
        if problem is not None:
            self.fault(self.inside(key, name), problem)
            return ()
        return tuple(given)

    @staticmethod
    def inside(key: str, name: str | int) -> str:
        """Return the full key of an element of a mapping or list."""
        return f"{key}.{name}" if key else str(name)


def as_title(name: str) -> str:
    """Return the default title of a name."""
    return name.replace("_", " ")
