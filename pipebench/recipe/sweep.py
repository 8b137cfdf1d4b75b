"""Sweeps: a list for a key that takes one value makes a run per element.

It is given as `parallelism.depth=1,2,4,7` on the command line, or as a list in a recipe. For a key that takes a list,
it is a list of lists. Several lists are combined in all ways or, zipped, by position.
"""

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin

import yaml

from pipebench.errors import printable

MOST_RUNS = 64  # of one recipe; more are a mistake, or better split into several comparisons
_CLOSING = {"[": "]", "{": "}"}
_MODE = "parallelism.mode"
_LONGEST = 60  # characters of a run's name, or of a value in it
_LEAST = 7  # characters that are left of a value in a name that is too long


@dataclass(frozen=True)
class SweptList:
    """A list given for a key that takes one value: an element per run."""

    values: tuple[Any, ...]


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep: an element of each list."""

    values: Mapping[str, Any]  # full key to the run's element
    places: Mapping[str, tuple[int, int]]  # full key to the element's place in its list from 1, and the list's length

    @property
    def texts(self) -> dict[str, str]:
        """Full key to the element as text."""
        return {key: _text(value) for key, value in self.values.items()}

    @property
    def name(self) -> str:
        """Name of the run in its sweep: `depth=4`, `servers=2,minibatch_size=32`; for a mode its value alone, `dp`.

        In a name that is too long, values lose their middle, and a hash keeps names apart.
        """
        lasts = [key.rpartition(".")[2] for key in self.values]
        short = [last if lasts.count(last) == 1 else key for key, last in zip(self.values, lasts, strict=True)]
        short = ["" if key == _MODE else f"{each}=" for key, each in zip(self.values, short, strict=True)]
        texts = self.texts.values()
        name = ",".join(f"{key}{text}" for key, text in zip(short, texts, strict=True))
        if len(name) <= _LONGEST:
            return name
        room = max(_LEAST, (_LONGEST - sum(len(key) + 1 for key in short)) // len(short))
        cut = ",".join(f"{key}{_without_middle(text, room)}" for key, text in zip(short, texts, strict=True))
        return f"{_without_middle(cut, _LONGEST)}~{hashlib.sha256(name.encode()).hexdigest()[:4]}"

    @property
    def words(self) -> tuple[str, ...]:
        """The elements as words of a command line: lists of one element, so that the run has the same name there."""
        return tuple(f"{key}={_written(value)}," for key, value in self.values.items())

    def with_place(self, key: str, problem: str) -> str:
        """Return the problem of a key, with the element's place if the key has a list."""
        for name, (place, count) in self.places.items():
            if key == name and count > 1:
                return f"{problem} (element {place} of {count})"
        return problem


def elements(written: str) -> list[str] | None:
    """Split a command-line value at commas outside brackets and quotes, ignoring a trailing one; None without commas.

    >>> elements("1,2,4"), elements("[a, b],[c]"), elements("'a,b'"), elements("4,")
    (['1', '2', '4'], ['[a, b]', '[c]'], None, ['4'])
    """
    parts = [""]
    closing = ""  # the closing brackets and quotes that are still expected, the next one last
    for letter in written:
        if letter == "," and not closing:
            parts.append("")
            continue
        quoted = closing[-1:] in ("'", '"')
        if closing and letter == closing[-1]:
            closing = closing[:-1]
        elif letter in "[{" and not quoted:
            closing += _CLOSING[letter]
        elif letter in "'\"" and not quoted and (closing or not parts[-1].strip()):
            closing += letter
        parts[-1] += letter
    if len(parts) == 1:
        return None
    return parts[:-1] if not parts[-1].strip() else parts


def as_sweep(value: object, expected: Any, *, is_option: bool) -> SweptList | None:
    """Return a list as the elements of a sweep, unless its key takes such a list as a value; None for other values.

    Args:
        value: as given.
        expected: the key's type.
        is_option: whether the key may take a list although its type is `Any`.
    """
    if isinstance(value, SweptList):
        return value
    if not isinstance(value, list) or (expected is Any and is_option):
        return None
    takes_list = any(get_origin(part) in (list, tuple) for part in (expected, *get_args(expected)))
    if takes_list and not (value and all(isinstance(item, list) for item in value)):
        return None
    return SweptList(tuple(value))


def problem_with_elements(values: Sequence[Any]) -> str | None:
    """Return what is wrong with a list as a whole (it is empty or has an element twice), or None."""
    if not values:
        return "got an empty list, allowed is a value, or a list with one run per element"
    for index, value in enumerate(values):
        if any(type(value) is type(other) and value == other for other in values[:index]):
            return f"got {_text(value)} twice in a list with one run per element"
    return None


def combinations(lists: Mapping[str, SweptList], *, zipped: bool) -> Iterator[SweepRun]:
    """Yield the elements of each run: all combinations or, `zipped`, those at the same position.

    Raises:
        ValueError: zipped lists differ in length, or there are more than MOST_RUNS runs.
    """
    lengths = [len(each.values) for each in lists.values()]
    given = ", ".join(f"{key} has {length}" for key, length in zip(lists, lengths, strict=True))
    if zipped and len({*lengths}) > 1:
        raise ValueError(f"--zip takes the lists' elements together, so they must be equally long: {given}")
    count = max(lengths) if zipped else math.prod(lengths)
    if count > MOST_RUNS:
        raise ValueError(f"the lists make {count:,} runs, allowed are at most {MOST_RUNS} in one comparison: {given}")
    places = [range(length) for length in lengths]
    for chosen in zip(*places, strict=True) if zipped else itertools.product(*places):
        pairs = list(zip(lists.items(), chosen, strict=True))
        yield SweepRun(
            {key: each.values[index] for (key, each), index in pairs},
            {key: (index + 1, len(each.values)) for (key, each), index in pairs},
        )


def _text(value: object) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    text = f"[{' '.join(map(_text, value))}]" if isinstance(value, list) else str(value)
    return printable(text if len(text) <= _LONGEST else f"{text[: _LONGEST - 2]}..")


def _written(value: object) -> str:
    """Return a value as on a command line: words of letters plainly, others as JSON."""
    is_word = isinstance(value, str) and re.fullmatch(r"[a-z][a-z0-9-]+", value) and yaml.safe_load(value) == value
    return str(value) if is_word else json.dumps(value)


def _without_middle(text: str, most: int) -> str:
    """Return a text, without its middle if it has more than `most` characters.

    >>> _without_middle("recipes/quickstart/dp.yaml", 12)
    'recip..yaml'
    """
    return text if len(text) <= most else f"{text[: (most - 1) // 2]}..{text[-((most - 3) // 2) :]}"
