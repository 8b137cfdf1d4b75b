"""`--json`: an answer as JSON on standard output, and nothing else there."""

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import click

# For commands that have an answer.
json_flag = click.option("--json", "as_json", is_flag=True, help="Print JSON, numbers unrounded, and nothing else.")


def print_json(data: Any) -> None:
    """Print plain data as JSON on standard output."""
    click.echo(json_text(data))


@contextlib.contextmanager
def only_json() -> Iterator[Callable[[str], None]]:
    """Redirect all that is printed, also by child processes, to standard error; yield a function that writes JSON.

    The function writes a text and a newline to standard output.
    """
    output = sys.stdout
    output.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)

    def write(text: str) -> None:
        data = f"{text}\n".encode()
        if output is sys.__stdout__:
            while data:
                data = data[os.write(stdout, data) :]
        else:  # a test's
            output.write(data.decode())

    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield write
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def json_text(data: Any) -> str:
    """Return plain data as indented JSON, with null for numbers that aren't finite, which JSON doesn't have."""
    return json.dumps(_finite(data), indent=1, allow_nan=False)


def json_line(data: Any) -> str:
    """Return plain data as JSON like `json_text`, on one line."""
    return json.dumps(_finite(data), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
