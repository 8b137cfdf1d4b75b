"""Shortcuts of runs in tests: pictures aren't drawn, and new MLflow databases are copies.

Both take more than half of a small run's time.
"""

import functools
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, PngImagePlugin

from pipebench.show import inline
from pipebench.tracking import connection
from pipebench.zoo.mnist5k import Mnist5k

TABLES = Path()  # the database that others are copies of; conftest.py names it

_composed: dict[object, str | None] = {}  # `made_by` of the figures composed since a test file began, by function
_make_tables = connection._make_tables


def take(replace: Callable[[object, str, object], object], tables: Path) -> None:
    """Take all shortcuts.

    The first figure of each kind is composed, so that wrong arguments of its function are noticed.

    Args:
        replace: sets an attribute, such as `MonkeyPatch.setattr`.
        tables: the database that others are copies of; it is made if it doesn't exist.
    """
    global TABLES
    TABLES = tables

    def copy(path: Path) -> None:
        if not tables.exists():
            _make_tables(tables)
        shutil.copyfile(tables, path)
        from mlflow.store.db import utils  # whoever makes a database has imported it

        # For every database MLflow reads all its migrations, for the newest version.
        if not hasattr(utils._get_latest_schema_revision, "cache_clear"):
            replace(utils, "_get_latest_schema_revision", functools.cache(utils._get_latest_schema_revision))

    replace(connection, "_make_tables", copy)
    replace(inline.InlineFigure, "write", write_dot)
    replace(inline, "draw", _draw)


def compose_again() -> None:
    _composed.clear()


def _draw(figure: Callable[..., Any], of: Sequence[Any], path: Path) -> None:
    if figure in _composed:
        _dot(path, _composed[figure])
    else:
        made = figure(*of)
        made.write(path)
        _composed[figure] = made.made_by


def write_dot(figure: Any, path: str | os.PathLike[str]) -> None:
    """Write a picture of one dot instead of a figure, with the metadata of the figure's file."""
    _dot(path, figure.made_by)


def _dot(path: str | os.PathLike[str], made_by: str | None = None) -> None:
    about = PngImagePlugin.PngInfo()
    if made_by is not None:
        about.add_text("Software", made_by)
    Image.new("1", (1, 1)).save(path, format="png", pnginfo=about)


def evaluate_few_digits(patch: pytest.MonkeyPatch, num_eval: int) -> None:
    """Let data sets of digits that are made from here on have the first `num_eval` of the thousand held-out ones."""
    begin = Mnist5k.__init__

    def with_few(self: Mnist5k, *given: Any) -> None:
        begin(self, *given)
        self.num_eval = num_eval

    patch.setattr(Mnist5k, "__init__", with_few)
