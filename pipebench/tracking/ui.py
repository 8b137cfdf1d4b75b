"""The command `pipebench ui`: serves MLflow's pages on the store of runs, to this machine only."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO

from pipebench.errors import PipebenchError, UserError, printable, printable_lines
from pipebench.tracking.connection import default_uri, quiet_environment, shown_uri, sqlite_path
from pipebench.tracking.orphaned import close_orphaned
from pipebench.tracking.view import VIEW_TAG, runs_address

HOST, DEFAULT_PORT = "127.0.0.1", 5000
_PORTS_TRIED = 20
_EXPERIMENTS_ASKED, _EXPERIMENTS_SHOWN = 100, 8
_START_LIMIT_S, _END_LIMIT_S = 60.0, 5.0


def open_ui(port: int | None = None, records: Iterable[Path] = ()) -> int:
    """Serve MLflow's pages until the user presses Ctrl-C, and return the exit code.

    Args:
        port: None for the first free one from 5000 on.
        records: folders of runs' records; orphaned runs among them are ended first.

    Raises:
        UserError: the port is taken, or there are no runs to look at.
        PipebenchError: the server doesn't start.
    """
    uri = default_uri()
    if uri.startswith("http"):
        print(f"The runs are on {printable(shown_uri(uri))}: open it in a browser.")
        return 0
    path = sqlite_path(uri)
    if path is not None and not path.exists():
        raise UserError(f"{path.name}: no runs are recorded in this directory; run a recipe first")
    chosen = choose_port(port)
    close_orphaned(uri, records)
    # The server's output is printed only if it does not come up.
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(
            _command(uri, chosen),
            # Neither the server nor its children import from the working directory.
            env=quiet_environment() | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "PYTHONSAFEPATH": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a process group of its own, so that its children can be ended too
        )
        for name in (signal.SIGTERM, signal.SIGHUP):  # like Ctrl-C, so that the server ends too
            signal.signal(name, signal.default_int_handler)
        try:
            return _serve(server, chosen, log)
        except KeyboardInterrupt:
            return 0
        finally:
            _end(server)


def server_address() -> str:
    """Return the address of MLflow's pages without a final slash: the server's, or the default of `pipebench ui`."""
    uri = default_uri()
    return shown_uri(uri).rstrip("/") if uri.startswith("http") else f"http://{HOST}:{DEFAULT_PORT}"


def _serve(server: "subprocess.Popen[bytes]", port: int, log: IO[bytes]) -> int:
    if _answers(server, port):
        address = f"http://{HOST}:{port}"
        print(f"MLflow: {address} (Ctrl-C ends it)")
        for name, experiment_id in newest_experiments(address):
            print(f"  {name}: {runs_address(address, experiment_id)}")
        sys.stdout.flush()
        return server.wait()
    log.seek(0)
    print("\n".join(printable_lines(log.read().decode(errors="replace"))), file=sys.stderr)
    raise PipebenchError(f"the MLflow server did not come up on {HOST}:{port}; its output is above")


def newest_experiments(address: str) -> list[tuple[str, str]]:
    """Return name and id of the newest experiments that have a view; none if the server doesn't answer."""
    question = {"max_results": _EXPERIMENTS_ASKED, "order_by": ["creation_time DESC"]}
    request = urllib.request.Request(
        f"{address}/api/2.0/mlflow/experiments/search",
        data=json.dumps(question).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=_START_LIMIT_S) as answer:
            experiments = json.load(answer).get("experiments", [])
    except (OSError, ValueError):  # the list is a convenience: the pages work without it
        return []
    with_view = [each for each in experiments if any(tag["key"] == VIEW_TAG for tag in each.get("tags", []))]
    return [(each["name"], each["experiment_id"]) for each in with_view[:_EXPERIMENTS_SHOWN]]


def _end(server: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError, PermissionError):  # on macOS the second, for a process that ended unwaited for
        os.killpg(server.pid, signal.SIGTERM)
    with suppress(KeyboardInterrupt):
        try:
            server.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)


def choose_port(port: int | None) -> int:
    """Return a free port on this machine; raises a UserError if the given port is taken, or all that were tried."""
    candidates = range(DEFAULT_PORT, DEFAULT_PORT + _PORTS_TRIED) if port is None else (port,)
    for candidate in candidates:
        if _is_free(candidate):
            return candidate
    tried = f"port {port} is" if port is not None else f"ports {candidates[0]} to {candidates[-1]} are"
    raise UserError(f"{tried} taken or not allowed on {HOST}; name another one: pipebench ui --port 8080")


def _is_free(port: int) -> bool:
    # On macOS a port can be bound on one interface although a server of all interfaces has it (AirPlay's at 5000).
    with suppress(OSError, OverflowError), socket.create_connection((HOST, port), timeout=1):
        return False
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except (OSError, OverflowError):
            return False
    return True


def _command(uri: str, port: int) -> list[str]:
    store = ["--backend-store-uri", uri, "--host", HOST, "--port", str(port)]
    # uvicorn imports from this folder first; its default is the working directory.
    options = f"--log-level=warning --app-dir={os.devnull}"
    return [sys.executable, "-m", "mlflow", "server", *store, "--workers", "1", "--uvicorn-opts", options]


def _answers(server: "subprocess.Popen[bytes]", port: int) -> bool:
    deadline_s = time.monotonic() + _START_LIMIT_S
    while server.poll() is None and time.monotonic() < deadline_s:
        with suppress(OSError), socket.create_connection((HOST, port), timeout=1):
            return True
        time.sleep(0.1)
    return False
