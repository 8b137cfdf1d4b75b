"""Types of click's options: counts, names, quantities with units, levels of links, seeds.

A wrong value is refused in one sentence that names the option.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from pipebench.cluster import Cluster, Level
from pipebench.errors import UserError, choice
from pipebench.units import UnitError, parse_bandwidth

FILE = click.Path(path_type=Path)
MOST_WORKERS = 1 << 20  # of --levels and --servers; planning for so many still takes seconds only
_MOST_LEVELS = 8
_LONGEST_TEXT = 60
_LEVELS_FORM = "is N@BYTES_PER_S for every level, innermost first, joined by commas, such as 4@1e10,4@1.25e9"


# For commands that take sweeps.
zip_flag = click.option(
    "--zip",
    "zipped",
    is_flag=True,
    help="Combine the lists of several keys by position: the first elements, the second ones, and so on.",
)


class Parameter(click.ParamType):  # type: ignore[type-arg] # in older versions of click it is no generic class
    """The type of an option; `parse` returns the value of a text, or raises a ValueError."""

    name = "text"

    def __init__(self, parse: Callable[[str], Any]) -> None:
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the value of a text (a default is a value already); raises a UserError that names the option."""
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            option = f"{param.opts[-1]}: " if param is not None else ""
            raise UserError(f"{option}{error}") from error


class Choice(click.Choice):  # type: ignore[type-arg] # as above
    """The type of one of some words, which the command's help lists."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the word; raises a UserError with the nearest one if it isn't allowed."""
        if value not in self.choices:
            where = f"{param.opts[-1]}: " if isinstance(param, click.Option) else ""
            raise UserError(f"{where}{choice(value, self.choices)}")
        return value


def option(name: str, kind: Any, metavar: str, about: str) -> Callable[[Any], Any]:
    """Return the decorator of an option that takes a value; `kind` is a `Parameter` or a type of click."""
    return click.option(name, type=kind, metavar=metavar, help=about)


def count(most: int) -> Parameter:
    """Return the type of whole numbers from 1 to `most`."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,12}", text, re.ASCII) or not 1 <= int(text) <= most:
            raise ValueError(f"got {_short(text)}, allowed is a whole number from 1 to {most}")
        return int(text)

    return Parameter(parse)


def name_of(names: Iterable[str]) -> Parameter:
    """Return the type of one of some names."""
    known = tuple(names)

    def parse(text: str) -> str:
        if text not in known:
            raise ValueError(choice(text, known))
        return text

    return Parameter(parse)


def parse_levels(text: str) -> Cluster:
    """Return the cluster that `4@1e10,4@1.25e9` describes by its levels, innermost first; its device has no name.

    Raises:
        ValueError: the text has another form, or there are more than MOST_WORKERS workers.
    """
    levels: list[Level] = []
    num_workers = 1
    for index, part in enumerate(text.split(",")):
        number, at, rate = part.partition("@")
        if not at or not re.fullmatch(r"\s*[0-9]{1,9}\s*", number, re.ASCII) or int(number) == 0:
            inside = f" in {_short(text)}" if part != text else ""
            raise ValueError(f"got {_short(part)}{inside}, allowed {_LEVELS_FORM}")
        try:
            bandwidth_bytes_per_s = parse_bandwidth(rate)
        except UnitError as error:
            raise ValueError(f"level {index + 1}: {error}") from error
        num_workers *= int(number)
        levels.append(Level(str(index + 1), int(number), bandwidth_bytes_per_s, latency_s=0.0))
        if num_workers > MOST_WORKERS or len(levels) > _MOST_LEVELS:
            raise ValueError(
                f"got {_short(text)}, allowed are at most {MOST_WORKERS:,} workers on {_MOST_LEVELS} levels"
            )
    return Cluster(text, "device", None, tuple(levels))


def parse_seeds(text: str) -> tuple[int, ...]:
    """Return the seeds in a text such as `0,1,2`; raises a ValueError for other texts and repeated seeds."""
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        seeds = [-1]
    if len(set(seeds)) != len(seeds) or not all(0 <= seed < 2**63 for seed in seeds):
        raise ValueError(f"got {text[:_LONGEST_TEXT]!r}, allowed are different whole numbers from 0 on, such as 0,1,2")
    return tuple(seeds)


def _short(text: str) -> str:
    return repr(text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 2]}..")
