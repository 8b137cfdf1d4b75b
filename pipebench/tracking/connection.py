"""The connection to the MLflow store where runs are recorded.

MLflow is imported when it is first used, as its import takes a second, and its output is turned off. If the store is a
SQLite file, one process at a time uses it: MLflow's migrations and transactions fail with several writers.
"""

import errno
import logging
import os
import re
import secrets
import sqlite3
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from pipebench import files
from pipebench.errors import UserError
from pipebench.files import FileLock

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

_SQLITE = "sqlite:///"
# In the URI of a file, `?` begins options of the connection, and `%20` is a space.
_MISREAD = re.compile(r"\?|%[0-9A-Fa-f]{2}")
_SCHEMELESS = re.compile(r"[\w.-]+:\d+(/.*)?", re.ASCII)  # host:port, which MLflow takes for a folder or a registry
# A process holds the lock for milliseconds, or for seconds while it creates the database (tens on a slow disk).
_TURN_LIMIT_S = 60.0
_LONGEST = 160  # characters of a reason
# MLflow's long messages end with their advice: words in the message, and a short text in its place.
_IN_SHORT = {
    "out-of-date database schema": "its tables are of another version of MLflow: back it up and run `mlflow db "
    "upgrade` with this address, or use the version that made it",
    "MLFLOW_ALLOW_FILE_STORE": "this version of MLflow takes no folders: set MLFLOW_TRACKING_URI to sqlite:///FILE, or "
    "MLFLOW_ALLOW_FILE_STORE to true",
}
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ASYNC_LOGGING": "false",  # `Sender` has a queue of its own
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    # With MLflow's defaults a request to a server that is down or hangs takes many minutes.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
}


def default_uri() -> str:
    """Return the store's URI: MLFLOW_TRACKING_URI, else `mlflow.db` in the working directory.

    Raises:
        UserError: the URI has no scheme, is SQLite's without a file, or is that of a file below a working directory
            whose name can't be written in a URI, so that MLflow would use another file.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI", "").strip() or f"{_SQLITE}mlflow.db"
    if _SCHEMELESS.fullmatch(uri):
        raise UserError(f"MLFLOW_TRACKING_URI: got {uri!r}, allowed is an address with its scheme: http://{uri}")
    # A database in memory would be lost at the end of this process.
    if uri.startswith("sqlite") and uri.removeprefix(_SQLITE) in (uri, "", ":memory:"):
        raise UserError(
            f"MLFLOW_TRACKING_URI: got {uri!r}, allowed is {_SQLITE}FILE, with a fourth slash before an absolute path"
        )
    path = sqlite_path(uri)
    here = Path.cwd()
    misread = _MISREAD.search(str(here))
    if path is not None and path.is_relative_to(here) and misread:
        raise UserError(
            f"runs can't be recorded in {path}: MLflow takes {misread[0]!r} in a path for something else; run in "
            "another folder, or set MLFLOW_TRACKING_URI"
        )
    return uri if path is None else f"{_SQLITE}{path}"


def shown_uri(uri: str) -> str:
    """Return a store's URI without the user and password it may hold.

    >>> shown_uri("postgresql://me:secret@host/runs")
    'postgresql://host/runs'
    """
    return re.sub(r"//[^/@]*@", "//", uri)


def reason_of(error: BaseException | str) -> str:
    """Return the reason of an MLflow failure on one short line, without the users and passwords of addresses."""
    while isinstance(error, BaseException):
        deeper = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        # A LookupError's text is the key alone; the error that wraps it says more.
        if deeper is None or isinstance(deeper, LookupError):
            break
        error = deeper  # MLflow and urllib3 wrap a short cause such as `Connection refused` in paragraphs
    text = shown_uri(" ".join(str(error).split())) or type(error).__name__
    text = next((short for words, short in _IN_SHORT.items() if words in text), text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def sqlite_path(uri: str) -> Path | None:
    """Return the absolute path of a SQLite store's file, None for any other store."""
    return Path(uri.removeprefix(_SQLITE)).absolute() if uri.startswith(_SQLITE) else None


def quiet_environment() -> dict[str, str]:
    """Return this process's environment with MLflow's telemetry and progress output off, unless the user set them.

    MLflow's import fails without a home folder, which a container's user may lack: then HOME is /dev/null.
    """
    home = {"HOME": os.devnull} if os.path.expanduser("~") == "~" else {}
    return _ENVIRONMENT | home | os.environ


class StoreConnection:
    """MLflow's client on one store. Not thread-safe; methods raise MLflow's own exceptions."""

    def __init__(self, uri: str) -> None:
        """Prepare for an MLflow tracking URI, without importing MLflow."""
        self.uri = uri
        self._path = sqlite_path(uri)
        self._client: MlflowClient | None = None
        os.environ.update({name: value for name, value in quiet_environment().items() if name not in os.environ})
        # Not catch_warnings: it replaces a list that all threads share, and MLflow runs in a thread of its own.
        warnings.filterwarnings("ignore", module=r"(mlflow|alembic)(\.|$)")

    @property
    def local(self) -> bool:
        """Whether the store is a file on this machine."""
        return self._path is not None

    @property
    def is_there(self) -> bool:
        """Whether the store exists; True for a server."""
        return self._path is None or (self._path.exists() and self._path.stat().st_size > 0)

    @property
    def artifacts(self) -> Path | None:
        """The folder of artifacts, beside a store that is a file: a folder per experiment in it; None for others."""
        return None if self._path is None else self._path.parent / "mlartifacts"

    @contextmanager
    def turn(self) -> "Iterator[MlflowClient]":
        """Import MLflow, create the database if missing, and lock a store that is a file; yields MLflow's client."""
        client_of = _mlflow()  # before the lock, as the import takes a second
        with self._locked():
            if self._client is None:
                if self._path is not None and not self.is_there:
                    _make_database(self._path)
                if self._path is not None:
                    _check_opens(self._path)
                self._client = client_of(tracking_uri=self.uri)
            yield self._client

    def _locked(self) -> AbstractContextManager[object]:
        """Lock a store that is a file; not if neither the file nor the lock can be written, so that it is only read."""
        if self._path is None:
            return nullcontext()
        try:
            return FileLock(Path(f"{self._path}.lock"), patience_s=_TURN_LIMIT_S)
        except BlockingIOError:
            problem = (
                f"another process has held {self._path}.lock for {_TURN_LIMIT_S:.0f} s; Ctrl-Z may have stopped it"
            )
            raise TimeoutError(problem) from None
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS) or os.access(self._path, os.W_OK):
                raise
            return nullcontext()


def _mlflow() -> "type[MlflowClient]":
    from mlflow.tracking import MlflowClient

    # These libraries' failures are raised as exceptions, which pipebench reports once.
    for library in ("mlflow", "alembic", "urllib3.connectionpool"):
        logging.getLogger(library).setLevel(logging.CRITICAL)
    return MlflowClient


def _check_opens(path: Path) -> None:
    """Open a SQLite file, or raise SQLite's error at once; MLflow would retry for 100 s."""
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as database:
        database.execute("select 1 from sqlite_master")


def _make_database(path: Path) -> None:
    """Create the SQLite file under a temporary name and rename it: MLflow could never use an incomplete one."""
    for left_over in path.parent.glob(f".{path.name}.new-*"):
        left_over.unlink()
    # A new name each time, as MLflow keeps connections to every file that this process has opened.
    aside = path.with_name(f".{path.name}.new-{secrets.token_hex(4)}")
    _make_tables(aside)
    files.rename(aside, path)


def _make_tables(path: Path) -> None:
    """Let MLflow create its tables in a new file, which takes a second: it migrates through all its versions."""
    _mlflow()(tracking_uri=f"{_SQLITE}{path}").search_experiments(max_results=1)
