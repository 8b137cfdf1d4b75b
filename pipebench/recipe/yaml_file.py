"""Reads a YAML file and the files that it extends, strictly: plain data, every key once, unambiguous numbers.

Differs from YAML 1.1: dates, sexagesimal and octal numbers stay text (`2019-10-27`, `1:30`, `010`), `1e-3` is a
number, and anchors are refused (use `extends` and `${...}`, which can't grow exponentially).
"""

import math
import os
import pickle
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from pipebench.errors import Fault, RecipeError, shown
from pipebench.files import FileError, read_text
from pipebench.recipe.catalog import display
from pipebench.recipe.typecheck import in_words

MAX_BYTES = 1_000_000  # a recipe is a page of text
MAX_DEPTH = 32  # of nested values or brackets, since they are read recursively
_DROPPED = ("timestamp", "merge", "value", "int", "float")


class _Loader(yaml.SafeLoader):
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise yaml.composer.ComposerError(
                None, None, "anchors (& and *) are not taken, use ${...} instead", event.start_mark
            )
        if self._depth == MAX_DEPTH:
            raise yaml.composer.ComposerError(None, None, f"nested more than {MAX_DEPTH} deep", event.start_mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key is not a plain word", key_node.start_mark)
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key_node.value[:40]!r} is there twice", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag.rpartition(":")[2] not in _DROPPED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?(0|[1-9][0-9]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?$|[-+]?[0-9]+[eE][-+]?[0-9]+$|[-+]?\.(inf|nan)$", re.I
    ),
    list("-+0123456789."),
)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers  # by which it quotes text


def to_yaml(data: Any) -> str:
    """Return plain data as YAML that `parse` reads back; mappings without others inside are on one line."""
    text: str = yaml.dump(
        data, Dumper=_Dumper, sort_keys=False, default_flow_style=None, allow_unicode=True, width=math.inf
    )
    return text


def parse(text: str) -> Any:
    """Return YAML text as plain data; raises a ValueError with the line if it isn't valid."""
    return pickle.loads(_pickled(text))


@lru_cache(maxsize=256)  # the recipes of a report share a few bases; each gets a copy, faster than `deepcopy` makes it
def _pickled(text: str) -> bytes:
    return pickle.dumps(_parsed(text))


def _parsed(text: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        problem = error.problem or error.context or ""
        problem = f"{error.context}, {problem}" if problem.startswith("but ") else problem
        raise ValueError(f"{line}is not YAML we take: {problem}") from error
    except yaml.reader.ReaderError as error:
        line = f"line {text.count(chr(10), 0, error.position) + 1}: "
        raise ValueError(f"{line}is not YAML: the character U+{error.character:04X} is not allowed") from error
    except (ValueError, OverflowError, TypeError, AttributeError, KeyError) as error:
        # PyYAML raises these when a value doesn't match its explicit tag (`!!int x`) or is a number without end.
        raise ValueError(
            "is not YAML we take: a value can't be read as its type, such as a number of thousands of digits"
        ) from error


def read_mapping(path: Path) -> dict[Any, Any]:
    """Return the mapping in a YAML file; raises a RecipeError if it can't be read, or isn't YAML or a mapping."""
    name = display(path)
    try:
        data = parse(read_text(path, MAX_BYTES))
    except ValueError as error:
        raise RecipeError([Fault(name, "", error.problem if isinstance(error, FileError) else str(error))]) from error
    if not isinstance(data, dict):
        kind = "a list" if isinstance(data, list) else in_words(type(data))
        problem = "is empty" if data is None else f"holds {kind}"
        raise RecipeError([Fault(name, "", f"{problem}; a mapping of keys to values is needed")])
    return data


EXTENDS = "extends"


def chain(path: Path, what: str, find: Callable[[str, Path], Path]) -> list[tuple[Path, dict[Any, Any]]]:
    """Return the files of an `extends` chain, the base first, each with its other content.

    Args:
        path: the file that extends the others.
        what: `recipe` or `cluster`, for messages.
        find: returns the file that a reference names, given the folder of the file that refers to it.

    Raises:
        RecipeError: a file can't be read, doesn't exist, or extends itself.
    """
    found: list[tuple[Path, dict[Any, Any]]] = []
    seen: list[str] = []
    following: Path | None = path
    while following is not None:
        real = os.path.realpath(following)  # Path.resolve refuses a link to itself, which can't be read either
        if real in seen:
            circle = " -> ".join(display(file) for file, _ in [*found[::-1], (following, {})])
            raise RecipeError([Fault(display(path), EXTENDS, f"goes round in a circle: {circle}")])
        seen.append(real)
        data = read_mapping(following)
        base = data.pop(EXTENDS, None)
        found.insert(0, (following, data))
        following = None if base is None else _base(base, following, what, find)
    return found


def _base(given: object, file: Path, what: str, find: Callable[[str, Path], Path]) -> Path:
    if not isinstance(given, str):
        problem = f"got {shown(given)}, allowed is a file beside this one or the short name of a {what}"
        raise RecipeError([Fault(display(file), EXTENDS, problem)])
    try:
        found = find(given, file.parent)
    except RecipeError as error:
        raise RecipeError([Fault(display(file), EXTENDS, f"{each}") for each in error.faults]) from error
    if found.is_dir():
        raise RecipeError([Fault(display(file), EXTENDS, f"got {given!r}, which is a folder; a file is needed")])
    return found
