"""Writes plain dataclasses as JSON, and reads JSON as dataclasses, checked by pydantic.

Files may have been changed on disk, so all of a file must match its type before any of it is used. Fields without a
default are required, unknown ones are refused, and nothing is converted: "3" is no number, and 1 isn't true.
`Annotated` gives ranges of numbers. All faults of a user's file are reported, and only the first of a file that
pipebench alone writes.
"""

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

from pipebench import errors
from pipebench.errors import Fault, RecipeError, UserError, nearest
from pipebench.files import read_text
from pipebench.lines import LinedFile

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic_core import ErrorDetails

# Larger numbers are mistakes: these are 31 years and an exabyte.
MAX_SECONDS = 1e9
MAX_BYTES = 2**60
_MOST_FAULTS = 100  # faults of a file that are reported
T = TypeVar("T")


class JsonError(UserError, ValueError):
    """JSON that doesn't match its type; `faults` are sentences, or pairs of a place and the end of a sentence."""

    def __init__(self, *faults: tuple[str, str] | str) -> None:
        self.faults = [("", fault) if isinstance(fault, str) else fault for fault in faults]
        where, problem = self.faults[0]
        super().__init__(f"{where}: {problem}" if where else problem)


@dataclass(frozen=True)
class Within:
    """A range for a number of type int or float, as an annotation: finite, from `low` to `high` inclusive."""

    low: float
    high: float
    allowed: str  # the range in words, as the end of a sentence

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        number = {**handler(source), "ge": self.low, "le": self.high}
        if source is float:
            number["allow_inf_nan"] = False
        return _saying(self.allowed, number)


class _Number:
    """An int or a float, infinite and NaN included, without conversion: 3 doesn't become 3.0."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return _saying("a number", core_schema.union_schema([core_schema.int_schema(), core_schema.float_schema()]))


class _Samples:
    """A number of samples as a key, without leading zeros, so that equal keys have equal texts."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        digits = core_schema.str_schema(pattern=r"^[1-9][0-9]{0,14}$")
        return _saying("numbers of samples as keys", core_schema.no_info_after_validator_function(int, digits))


Count = Annotated[int, Within(0, MAX_BYTES, "a whole number from 0 on")]
Ordinal = Annotated[int, Within(1, MAX_BYTES, "a whole number from 1 on")]
Share = Annotated[float, Within(0, 1, "a share from 0 to 1")]
Seconds = Annotated[float, Within(0, MAX_SECONDS, f"seconds from 0 to {MAX_SECONDS:g}")]
Amount = Annotated[float, Within(0, 1e308, "a number from 0 on")]
Finite = Annotated[float, Within(-1e308, 1e308, "a finite number")]
Number = Annotated[float, _Number()]
Samples = Annotated[int, _Samples()]

# pydantic's type of an error to what is allowed.
_ALLOWED = {
    "bool_type": "true or false",
    "dataclass_type": "an object",
    "dict_type": "an object",
    "float_type": "a number",
    "int_type": "a whole number",
    "list_type": "a list",
    "string_type": "text",
    "tuple_type": "a list",
}


def write(value: Any) -> str:
    """Return a dataclass of plain values as indented JSON; `read` reads it back exactly."""
    return json.dumps(asdict(value), indent=1)


def read(kind: type[T], source: str | bytes | dict[str, Any] | list[Any], where: str = "") -> T:
    """Read JSON as a dataclass or another type that pydantic knows.

    Args:
        kind: the type.
        source: text, or JSON that is parsed already.
        where: begins the dotted path of faults.

    Raises:
        JsonError: `source` doesn't match `kind`; names place, value and what is allowed.
    """
    from pydantic import ValidationError

    text = json.dumps(source) if isinstance(source, dict | list) else source
    try:
        found: T = _reader(cast("Any", kind)).validate_json(text, strict=True, extra="forbid")
    except ValidationError as error:
        raise JsonError(*_problems(error.errors(include_url=False), where)) from None
    return found


def read_file(kind: type[T], path: str, check: Callable[[T], Iterator[tuple[str, str]]]) -> T:
    """Read a user's JSON file as a dataclass.

    Args:
        kind: the dataclass.
        path: the file.
        check: yields faults that types can't express, as pairs of a place and the end of a sentence.

    Raises:
        RecipeError: the file can't be read, or isn't valid; names every fault and its line.
    """
    text = read_text(path)
    with faults_in(path):
        found = read(kind, text)
        if faults := [*check(found)]:
            raise JsonError(*faults)
    return found


@contextmanager
def faults_in(path: str) -> Iterator[None]:
    """Raise a `JsonError` about a file's content as a `RecipeError` that names the file and the lines."""
    try:
        yield
    except JsonError as error:
        raise RecipeError(Fault(LinedFile(path), *fault) for fault in error.faults) from error


def shown(value: Any) -> str:
    """Return a short text of a value as `errors.shown` does, but of a list or an object the kind alone."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return errors.shown(value)


@functools.cache
def _reader(kind: Any) -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _saying(allowed: str, schema: Any) -> Any:
    """Return a pydantic schema whose faults are all reported as "allowed is" and these words."""
    from pydantic_core import core_schema

    return core_schema.custom_error_schema(schema, custom_error_type="allowed", custom_error_message=allowed)


def _problems(faults: "list[ErrorDetails]", where: str) -> list[tuple[str, str]]:
    """Return place and end of a sentence per fault; unknown keys come first.

    A required key that an unknown one was meant for isn't reported as missing, too.
    """
    unknown = ("unexpected_keyword_argument", "extra_forbidden")
    missing = [str(each["loc"][-1]) for each in faults if each["type"] == "missing"]
    problems: list[tuple[str, str]] = []
    meant: set[tuple[str, str]] = set()
    for fault in sorted(faults, key=lambda each: each["type"] not in unknown)[:_MOST_FAULTS]:
        at, text = _problem(fault, where)
        if fault["type"] in unknown:
            at, name = _at(where, fault["loc"][:-1]), fault["loc"][-1]
            text = f"unknown key {shown(name)}{nearest(name, missing)}"
            meant.add((at, text.rpartition("did you mean ")[2]))
        if (at, f"{text.removesuffix(' is missing')}?") not in meant:
            problems.append((at, text))
    more = len(faults) - _MOST_FAULTS
    return [*problems, ("", f"there are {more} more faults")] if more > 0 else problems


def _problem(fault: "ErrorDetails", where: str) -> tuple[str, str]:
    """Return a fault's place, and the end of a sentence about it."""
    kind, path, found = fault["type"], fault["loc"], fault["input"]
    if kind == "json_invalid":
        return "", f"isn't JSON: {fault['ctx']['error']}"
    if kind == "missing":
        name = f"item {path[-1]}" if isinstance(path[-1], int) else repr(path[-1])
        return _at(where, path[:-1]), f"{name} is missing"
    if kind == "too_long":
        most = fault["ctx"]["max_length"]
        return _at(where, path), f"has {fault['ctx']['actual_length']} items, allowed is {most}"
    if path[-1:] == ("[key]",):
        path = path[:-2]
    allowed = fault["msg"] if kind == "allowed" else _ALLOWED.get(kind, fault["msg"])
    return _at(where, path), f"got {shown(found)}, allowed is {allowed}"


def _at(where: str, path: tuple[int | str, ...]) -> str:
    """Return a place such as `layers[4][0].forward_s`: `where`, then names after dots and others in brackets."""
    for step in path:
        if isinstance(step, str) and step.isidentifier():
            where += f".{step}" if where else step
        else:
            where += f"[{step if str(step).isdecimal() else shown(step)}]"
    return where
