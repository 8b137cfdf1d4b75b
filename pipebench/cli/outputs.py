"""Prints the answers of commands and writes their files, which replace only files of the same kind."""

import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from pipebench.cli.json_output import print_json
from pipebench.errors import UserError
from pipebench.files import folder_problem, rename, start_of
from pipebench.show.console import print_written
from pipebench.show.shown import Shown
from pipebench.show.terminal import standard_output

PNG = (".png",)


def print_answer(answer: Shown, *, as_json: bool) -> None:
    """Print an answer, for people or as JSON."""
    if as_json:
        print_json(answer.to_dict())
    else:
        answer.print_to(standard_output())


@dataclass(frozen=True)
class Output:
    """A file to write."""

    option: str  # the option that names it
    path: Path | None  # None: nothing is written
    what: str  # its kind, in words
    is_ours: Callable[[Path], bool]  # whether an existing file is of the same kind
    suffixes: tuple[str, ...] = ()  # allowed ends of its name; () for any

    def write(self, write: Callable[[Path], object], console: Console | None = None) -> None:
        """Write the file beside its target, rename it, and print its path; do nothing if `path` is None.

        Raises:
            UserError: the file can't be written; an existing one stays.
        """
        if self.path is None:
            return
        target = self.path.resolve()
        beside = target.with_name(f".{secrets.token_hex(4)}{target.suffix}")
        try:
            write(beside)
            rename(beside, target)
        except OSError as error:
            raise UserError(f"{self.option}: {self.path} can't be written: {error.strerror or error}") from error
        finally:
            with suppress(OSError):  # a read-only disk refuses even where there is no file
                beside.unlink()
        print_written(str(self.path), console)


def is_picture_by(made_by: str, path: Path) -> bool:
    """Return whether a file is a PNG that names this origin as its software."""
    start = start_of(path, 4096)
    return start.startswith(b"\x89PNG\r\n") and f"Software\0{made_by}".encode() in start


def refuse_to_overwrite(outputs: Sequence[Output]) -> None:
    """Check all files before any work.

    Raises:
        UserError: a file isn't writable, exists and is of another kind, is given twice, or has a wrong suffix.
    """
    taken: dict[Path, str] = {}
    for each in outputs:
        option, path, what = each.option, each.path, each.what
        if path is None:
            continue
        there = True
        try:
            path.stat()  # not `exists`, which ignores different errors in different versions of Python
        except (FileNotFoundError, NotADirectoryError):
            there = False
        except OSError as error:
            raise UserError(f"{option}: {str(path)[:80]} can't be written: {error.strerror}") from error
        other = taken.setdefault(path.resolve(), option)
        if other != option:
            raise UserError(f"{option}: got {path}, which {other} writes to as well; give each a file of its own")
        if not path.parent.is_dir():
            raise UserError(f"{option}: got {path}, but there is no folder {path.parent}")
        if there and not (path.is_file() and each.is_ours(path)):
            raise UserError(f"{option}: {path} is there and isn't {what}, so it is left alone; name another file")
        if problem := folder_problem(path.resolve().parent):
            raise UserError(f"{option}: got {path}, but {problem}")
    for each in outputs:
        if each.path is not None and each.suffixes and each.path.suffix.lower() not in each.suffixes:
            fitting = each.path.with_suffix(each.suffixes[0]).name
            raise UserError(f"{each.option}: got {each.path}, allowed is a name such as {fitting}, of {each.what}")
