"""Differences of macOS and of containers from the Linux of developers, by stand-ins."""

import contextlib
import errno
import os
import pwd
import resource
import signal
import socket
from unittest.mock import Mock

import pytest
import torch

from pipebench.distributed import interfaces, launch
from pipebench.errors import UserCodeError, UserError
from pipebench.model import loading
from pipebench.model.loading import Loaders, Task
from pipebench.run import trial
from pipebench.tracking import ui
from pipebench.tracking.connection import quiet_environment
from pipebench.zoo.places import cache_folder, write_whole
from tests.support import Blobs


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """As users of containers without an entry in passwd, some of which don't set HOME."""
    for variable in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)


@pytest.mark.usefixtures("homeless")
def test_a_user_without_a_home_has_a_cache_that_cannot_be_written() -> None:
    with pytest.raises(NotADirectoryError):
        write_whole(cache_folder("bpe") / "a.json", b"")


@pytest.mark.usefixtures("homeless")
def test_mlflow_has_a_home_where_the_user_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """`import mlflow` raises an error without one."""
    assert quiet_environment()["HOME"] == os.devnull
    monkeypatch.setenv("HOME", "/of/mine")
    assert quiet_environment()["HOME"] == "/of/mine"


@pytest.mark.filterwarnings("ignore:Got pickle error:UserWarning")  # torch's, which precedes the error
def test_a_data_set_that_cannot_be_pickled_is_refused_where_processes_are_spawned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On macOS."""
    monkeypatch.setattr(loading, "_START", "spawn")
    data = Blobs(num_train=8)
    vars(data)["transform"] = lambda value: value
    loaders = Loaders(data, torch.device("cpu"))
    processes = loaders.of("reader", 1)
    assert processes is not None
    message = r"can't be given the data set \(\w+Error: .*<lambda>.*loader_processes to 0"
    with pytest.raises(UserCodeError, match=message):
        next(iter(processes.minibatches("train", ["x"], iter([Task([0])]))))
    loaders.close()


def test_cores_are_counted_without_affinities(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    with trial._all_cores():
        assert torch.get_num_threads() >= 1


def test_an_infinite_limit_of_open_files_is_raised_to_what_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """MacOS starts programs with 256 of infinitely many, and refuses more than OPEN_MAX."""
    soft, most = 256, 2**63 - 1

    def set_limit(_: int, limits: tuple[int, int]) -> None:
        nonlocal soft
        if limits[0] > 1 << 16:
            raise ValueError("current limit exceeds maximum limit")
        soft = limits[0]

    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, most))
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    interfaces._allow_files()
    assert soft == 10240
    soft = 1 << 16
    interfaces._allow_files()
    assert soft == 1 << 16, "one that the user has raised further stays"


def test_ended_processes_are_sent_no_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the parent has asked for the exit code, macOS raises an error, and Linux ignores the signal."""
    forbids = Mock(side_effect=PermissionError(errno.EPERM, os.strerror(errno.EPERM)))
    monkeypatch.setattr(os, "killpg", forbids)
    with contextlib.closing(launch.Attempt(1, 0)) as attempt:
        attempt.start(lambda *_: Mock(pid=1, returncode=None, poll=lambda: None), {}, {})
        attempt.kill()
    ui._end(Mock(pid=1))
    assert [call.args[1] for call in forbids.call_args_list] == [signal.SIGKILL, signal.SIGTERM]


def test_a_port_is_taken_by_a_server_of_all_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """MacOS lets a second server take a port on one interface, such as 5000, which its AirPlay serves on all."""
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(socket.socket, "bind", lambda *_: None)
        with pytest.raises(UserError, match=f"port {port} is taken"):
            ui.choose_port(port)
