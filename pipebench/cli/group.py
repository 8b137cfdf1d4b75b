"""The group of commands, which turns errors into sentences and exit codes."""

import errno
import importlib
import os
import select
import sys
import traceback
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from threading import Timer
from types import MappingProxyType
from typing import Any

import click

from pipebench import interrupts
from pipebench.cli.terminal import outlive_terminal
from pipebench.errors import UserError, is_out_of_memory, limit_text, memory_text, nearest, printable, printable_lines
from pipebench.garbage import freeze_all, without_collector
from pipebench.recipe.users_code import as_users, traceback_of

USER_ERROR, INTERNAL_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 3, 130, 141
_SHORT_S = 1.0  # a command that takes longer to begin prints what it is loading
_VERBOSE = "pipebench.verbose"  # key in click's `meta`, which outlives the command


# Command to description. The module of the same name has the command, and is imported when it is used.
COMMANDS: Mapping[str, str] = {
    "calibrate": "Fit a report's constants on the cells that it names.",
    "compare": "Set recorded runs side by side.",
    "draw": "Draw the pipeline that a recipe makes.",
    "export": "Write the weights of a run's checkpoint to a file.",
    "largest": "Find the largest minibatch that fits in memory.",
    "links": "Measure what a cluster's links carry, and write them as its file.",
    "ls": "List models, data sets, optimizers, schedules, clusters, modes and more.",
    "plan": "Find the best plan: stages, replicas, and why.",
    "profile": "Show what every layer of a model costs.",
    "report": "Set published tables beside what is reproduced of them.",
    "run": "Train recipes to their target and record the answers.",
    "runs": "List past runs and comparisons.",
    "show": "Print a recipe, or a cluster, with everything filled in.",
    "ui": "Open the recorded runs in the MLflow UI.",
}


class _ReaderGoneError(Exception):
    """The process that reads the output has ended, as in `pipebench ls | head -1`."""


class _EndOfFileError(Exception):
    """An EOFError, such as of the user's data. It isn't from the terminal, which no command reads."""

    def __init__(self, ending: EOFError) -> None:
        self.ending = ending


class Commands(click.Group):
    """A group whose commands end with an exit code, and for a user's mistake with a sentence instead of a traceback."""

    _meta: Mapping[str, Any] = MappingProxyType({})

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return [*COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        if cmd_name not in COMMANDS:
            added = super().get_command(ctx, cmd_name)
            if added is None and not ctx.resilient_parsing and (hint := nearest(cmd_name, COMMANDS)):
                ctx.fail(f"No such command {cmd_name!r}{hint}")
            return added
        with without_collector():
            command: click.Command = getattr(importlib.import_module(f"pipebench.cli.{cmd_name}"), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write every command's description without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([*COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; raise others in place of BrokenPipeError and EOFError, which click takes for its own."""
        self._meta = ctx.meta
        _require_working_directory()
        try:
            with _loading_notice(ctx):
                result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BrokenPipeError as error:
            # click would take any broken pipe for the output's and exit silently with 1.
            raise (_ReaderGoneError() if _reader_is_gone() else RuntimeError("a pipe broke inside")) from error
        except SystemExit as ending:
            # If the reader is gone, rich exits with 1, which would mean a target that was missed.
            if isinstance(ending.__context__, BrokenPipeError):
                raise _ReaderGoneError() from ending
            raise
        except EOFError as error:
            # click would take the end of any file for Ctrl-D at the terminal and abort silently.
            raise _EndOfFileError(error) from error

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run the command line, and exit with its code, or return the code if not `standalone_mode`."""
        outlive_terminal()
        code = self._exit_code(*args, **extra)
        if standalone_mode:
            freeze_all()  # otherwise the collector scans all of torch's objects at exit, which may take seconds
            sys.exit(code)
        return code

    def _exit_code(self, *args: Any, **extra: Any) -> int:
        interrupts.forget()
        try:
            code: object = super().main(*args, standalone_mode=False, **extra)  # type: ignore[call-overload]
            return code if isinstance(code, int) else 0
        except BaseException as error:
            # After a signal, any other failure follows from it, such as of a module that was imported in part.
            by_signal = interrupts.exit_code()
            return self._failed(error) if by_signal is None else by_signal

    def _failed(self, error: BaseException) -> int:
        """Print what ended a command, with its traceback if it is pipebench's fault; return the exit code."""
        if isinstance(error, click.BadParameter) and not isinstance(error, click.MissingParameter) and error.param:
            return self._mistake(UserError(f"{error.param.opts[-1]}: {error.message}"))
        if isinstance(error, click.exceptions.NoArgsIsHelpError):
            error.show()
            return USER_ERROR
        if isinstance(error, click.ClickException):
            return self._mistake(UserError(_in_a_sentence(error)))
        if isinstance(error, UserError):
            return self._mistake(error)
        if isinstance(error, click.Abort | KeyboardInterrupt):
            return INTERRUPTED
        if isinstance(error, _ReaderGoneError):
            _drop_output()
            return BROKEN_PIPE
        return self._failed_inside(error.ending if isinstance(error, _EndOfFileError) else error)

    def _failed_inside(self, error: BaseException) -> int:
        """Print an error that is no `UserError` and no interrupt; return the exit code."""
        theirs = as_users(error)
        if theirs is not None:
            return self._mistake(theirs)
        if isinstance(error, SystemExit):
            raise error
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):  # a disk, or the output's
            try:
                sys.stdout.flush()
            except OSError:
                _drop_output()
            return self._mistake(UserError(f"what was to be written can't be: {error}"))
        if (limit := limit_text(error)) is not None:
            return self._mistake(UserError(limit))
        if is_out_of_memory(error):
            _print_error(f"pipebench: error: {printable(memory_text(error))}")
            return INTERNAL_ERROR
        trace = "".join(traceback.format_exception(error))
        _print_error(f"pipebench: internal error: {type(error).__name__}: {error}\n{trace}")
        return INTERNAL_ERROR

    def _mistake(self, error: UserError) -> int:
        for line in printable_lines(str(error) or type(error).__name__):
            click.echo(f"pipebench: error: {line}", err=True)
        if self._meta.get(_VERBOSE):
            _print_error(traceback_of(error))
        return USER_ERROR


def _require_working_directory() -> None:
    """Raise a UserError if the working directory was removed: files are searched there, and torch's import needs it."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError("the working directory has been removed: change to one that is there") from None


def _drop_output() -> None:
    """Redirect the output to /dev/null, since from 3.13 on Python exits with 120 if its last flush fails."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _in_a_sentence(error: click.ClickException) -> str:
    """Return the message of click's error, and the command whose help says what is allowed."""
    text = error.format_message()
    if not isinstance(error, click.UsageError) or error.ctx is None:
        return text
    if isinstance(error, click.NoSuchOption):  # versions of click have different sentences
        text = f"No such option {error.option_name!r}{_hint(error.option_name, error.ctx)}"
    ending = "" if text.endswith((".", "?")) else "."
    return f"{text}{ending} See {error.ctx.command_path} --help."


def _hint(option: str, ctx: click.Context) -> str:
    """Return a hint for an unknown option: a similar option or, if the command takes keys, a key, as for `--lr`."""
    parameters = ctx.command.params
    words = [item.value for each in parameters for item in each.shell_complete(ctx, "")]
    keys = [word.rstrip("=") for word in words if word.endswith("=")]
    keys += sorted({key.rpartition(".")[0] for key in keys} - {""})
    hint = nearest(option, [name for each in parameters for name in each.opts], keys)
    hint = f"; did you mean {key!r}?" if (key := option.lstrip("-")) in keys else hint
    return hint if "'-" in hint or not keys else f"{hint or '.'} Keys have no dashes: KEY=VALUE."


@contextmanager
def _loading_notice(ctx: click.Context) -> Iterator[None]:
    """Print on the standard error what a command is loading if it takes longer than `_SHORT_S`."""
    try:
        has_reader = sys.stderr.fileno() >= 0 and "RANK" not in os.environ
    except (OSError, ValueError):  # no file
        has_reader = False
    timer = Timer(_SHORT_S, lambda: _print_error(f"{_named(ctx)}: {_what_is_loading(sys.modules)}"))
    timer.daemon = True
    if has_reader:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _named(ctx: click.Context) -> str:
    """Return the command's words: `pipebench run`, or `pipebench` while the command's module is being imported."""
    return f"pipebench {ctx.invoked_subcommand or ''}".rstrip()


def _what_is_loading(modules: Container[str]) -> str:
    """Return what a command is doing in its first seconds, by the modules whose import has begun."""
    return next((f"loading {name}" for name in ("matplotlib", "mlflow", "torch") if name in modules), "starting")


def note_verbose(ctx: click.Context, option: click.Parameter, value: bool) -> bool:
    """Store whether to print tracebacks of errors in the user's code; the callback of `--verbose`."""
    ctx.meta[_VERBOSE] = value
    return value


# For commands that run a user's code.
tracebacks = click.option(
    "--verbose",
    is_flag=True,
    expose_value=False,
    callback=note_verbose,
    help="Show the whole traceback of an error in your own code.",
)

# For commands that execute code named in an earlier run's folder.
trust = click.option(
    "--trust",
    "trusts",
    is_flag=True,
    help="Use a run's folder that belongs to another user, and execute the code that it names.",
)


def _print_error(text: str) -> None:
    for line in printable_lines(text):
        click.echo(line, err=True)


def _reader_is_gone() -> bool:
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in output.poll(0))
