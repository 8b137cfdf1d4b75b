"""Reports exceptions of the user's own code (a recipe's `target`s) in one sentence with file and line.

Imports nothing but the standard library.
"""

import contextlib
import os
import site
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path

import pipebench
from pipebench.errors import PipebenchError, UserCodeError, is_out_of_memory

_PACKAGE = Path(pipebench.__file__).resolve().parent
_ZOO = _PACKAGE / "zoo"
_TRACED = "<eval_with_key>"  # beginning of the file name of code that torch.fx generates from a model's forward
# What operations raise on unsuitable data. Exhausted memory and failing devices raise other classes.
_OF_DATA = (IndexError, ValueError, TypeError, NotImplementedError)
_COMPILER = ("torch._dynamo", "torch._inductor")  # modules of the errors of torch.compile
_OF_DEVICES = ("CUDA", "cuDNN", "CUDNN", "cublas", "CUBLAS", "NCCL")  # in texts of RuntimeErrors
_INSTALLED = {"site-packages", "dist-packages"}
_LONGEST = 300  # characters of an exception's message


@contextlib.contextmanager
def users_code(what: str, key: str = "") -> Iterator[None]:
    """Raise any exception in this context as a `UserCodeError`, even SystemExit, but not pipebench's own or Ctrl-C.

    Args:
        what: begins the sentence, such as `my_model:Net can't make the model`.
        key: the target's full key, if known.
    """
    try:
        yield
    except (PipebenchError, KeyboardInterrupt):
        raise
    except BaseException as error:  # also of a class of the user's own
        raise UserCodeError(f"{what}: {message_of(error)}", key) from error


def as_users(error: BaseException) -> UserCodeError | None:
    """Return an exception of the user's own code, or of torch's compiler, as a `UserCodeError`, or None."""
    if type(error).__module__.startswith(_COMPILER):
        problem = f"got true, and torch.compile fails; allowed for these layers is false ({reason(error)})"
        return UserCodeError(problem, "engine.compile")
    place = _place(error)
    if isinstance(error, PipebenchError | KeyboardInterrupt) or (place is None and not _is_about_data(error)):
        return None
    theirs = UserCodeError(f"{place}: {reason(error)}" if place else message_of(error))
    theirs.__cause__ = error
    return theirs


def located(error: BaseException, where: str) -> UserCodeError | None:
    """Return an exception as `as_users` does, with `where` it was raised in front."""
    theirs = error if isinstance(error, UserCodeError) else as_users(error)
    return UserCodeError(f"{where}: {theirs.problem}", theirs.key) if theirs else None


@contextlib.contextmanager
def during(where: str) -> Iterator[None]:
    """Add the name of a part of a run to exceptions of the user's own code that are raised in this context."""
    try:
        yield
    except BaseException as error:
        if theirs := located(error, where):
            raise theirs from error
        raise


def message_of(error: BaseException) -> str:
    """Return an exception as the end of a sentence: class, message, and the line of the user's code, if any.

    >>> message_of(ValueError("no such width"))
    'ValueError: no such width'
    """
    if _is_about_data(error):
        return " ".join(str(error).split()) + (f": {message_of(error.__cause__)}" if error.__cause__ else "")
    place = _place(error)
    return reason(error) + (f" ({place})" if place else "")


def reason(error: BaseException) -> str:
    """Return an exception's class and message on one printable line."""
    if isinstance(error, SystemExit):
        return "it ends the program (SystemExit)"
    text = " ".join(str(error).split())
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    text = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def traceback_of(error: BaseException) -> str:
    """Return the traceback of the exception that caused a `UserError`; "" if none did."""
    root: BaseException = error
    while isinstance(root, PipebenchError) and root.__cause__ is not None:
        root = root.__cause__
    return "" if isinstance(root, PipebenchError) else "".join(traceback.format_exception(error)).rstrip()


def is_users(file: str) -> bool:
    """Return whether a file is the user's: not of pipebench, the zoo or a library."""
    return not _is_library(file) and not os.path.realpath(file).startswith(f"{_PACKAGE}{os.sep}")


def _is_about_data(error: BaseException) -> bool:
    """Return whether an exception is the zoo's, which describes what is wrong with a user's data, loss or metric."""
    registry = sys.modules.get("pipebench.zoo.registry")
    return registry is not None and isinstance(error, registry.DataError)


def _place(error: BaseException) -> str | None:
    """Return file, line and function of the user's own code that raised an exception, or None.

    That is the last frame outside libraries and pipebench. If frames of pipebench follow it, the user's code only
    called pipebench, which raised the exception.
    """
    if isinstance(error, SyntaxError) and error.filename and not _is_library(error.filename):
        if _is_pipebench(error.filename):
            return None
        return f"{_display(error.filename)}:{error.lineno}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_pipebench(frame.filename):
            return None
        if frame.filename.startswith(_TRACED) and _is_of_an_operation(error):
            layer = (frame.line or "").partition(" = ")[0]
            return "the model's forward, as traced" + (f", in layer {layer}" if layer.isidentifier() else "")
        if not _is_library(frame.filename):
            return f"{_display(frame.filename)}:{frame.lineno}, in {frame.name}"
    return None


def _is_of_an_operation(error: BaseException) -> bool:
    """Return whether an operation raised an exception because of its arguments, not for lack of memory or a device."""
    if type(error) in _OF_DATA:
        return True
    fails = any(word in str(error) for word in _OF_DEVICES) or is_out_of_memory(error)
    return type(error) is RuntimeError and not fails


def _is_pipebench(file: str) -> bool:
    """Return whether a file is pipebench's. The zoo counts as a library, which a user's code may call."""
    return Path(file).is_relative_to(_PACKAGE) and not Path(file).is_relative_to(_ZOO)


@lru_cache(maxsize=4096)  # called for every module that a run's targets import
def _is_library(file: str) -> bool:
    """Return whether a file is the zoo's, the standard library's, an installed package's, or not a file."""
    return (
        file.startswith("<")
        or not _INSTALLED.isdisjoint(Path(file).parts)  # also of another Python with shared packages
        or any(Path(file).is_relative_to(folder) for folder in _libraries())
        or any(Path(file).relative_to(folder).parts[0] in _installed_in(folder) for folder in Path(file).parents)
    )


@cache
def _installed_in(folder: Path) -> frozenset[str]:
    """Return the names of the packages and modules that pip has put into a folder, such as by `--target`."""
    names = set[str]()
    for record in folder.glob("*.dist-info/RECORD"):
        with contextlib.suppress(OSError):  # an unreadable file mustn't hide the error that is being reported
            lines = record.read_text(errors="replace").splitlines()
            names.update(line.partition(",")[0].partition("/")[0] for line in lines)
    return frozenset(names)


@cache
def _libraries() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    found = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    found |= {*site.getsitepackages(), site.getusersitepackages(), str(_ZOO)}
    return tuple({path for folder in found for path in (folder, os.path.realpath(folder))})


def _display(file: str) -> str:
    path = Path(os.path.abspath(file))
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
