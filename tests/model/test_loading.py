"""Loader processes that fail: the reader raises one sentence, and doesn't wait for missing minibatches."""

import gc
import os
import signal
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pipebench.errors import UserCodeError
from pipebench.model.loading import Loaders, Task
from tests.support import Blobs

NO_ROOM = "unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)"
ROOM = "a minibatch doesn't fit in shared memory, /dev/shm: give the container more of it (docker's --shm-size), or"


class Unsendable:
    """Can't be put into a queue."""

    def __init__(self, problem: str) -> None:
        self.problem = problem

    def __reduce__(self) -> Any:
        raise RuntimeError(self.problem)


class Failing(Blobs):
    """Fails in the given way."""

    loader_processes, how = 1, ""

    def fetch(self, split: str, indices: Any, fields: Any, draw: int = 0) -> Any:
        if self.how.isdigit():
            os.kill(os.getpid(), int(self.how))
        if self.how == "collates":
            try:
                raise RuntimeError(NO_ROOM)
            except RuntimeError as error:
                raise ValueError("doesn't go into a minibatch") from error
        return {"x": Unsendable(self.how)}


class Collecting(Blobs):
    """Collects garbage in the process that fetches."""

    loader_processes = 1

    def fetch(self, split: str, indices: Any, fields: Any, draw: int = 0) -> Any:
        gc.collect()
        return super().fetch(split, indices, fields, draw)


class Seeking(Blobs):
    """Reads a file that is open before loader processes start."""

    loader_processes = 1

    def __init__(self, descriptor: int) -> None:
        super().__init__(num_train=8)
        self.descriptor = descriptor

    def fetch(self, split: str, indices: Any, fields: Any, draw: int = 0) -> Any:
        os.lseek(self.descriptor, indices[0], os.SEEK_SET)
        return {"x": torch.tensor([*os.read(self.descriptor, 1)])}


class OfOneProcess:
    """Can't be destroyed in another process, as a group of Gloo's, which would wait for its thread there."""

    def __init__(self) -> None:
        self.owner, self.itself = os.getpid(), self

    def __del__(self) -> None:
        if os.getpid() != self.owner:
            os.kill(os.getpid(), signal.SIGSEGV)


@pytest.fixture
def limit() -> Iterator[None]:
    def end(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("limit")
@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        (NO_ROOM, f"in a process that fetches ahead, {ROOM}"),
        ("collates", f"in a process that fetches ahead, {ROOM}"),
        ("AF_UNIX path too long", "in a process that fetches ahead, the path of temporary files is too long"),
        ("it is torn", "in a process that fetches ahead, RuntimeError: it is torn"),
        (str(int(signal.SIGKILL)), "a process that fetches ahead was ended by SIGKILL, as memory runs out: make data"),
    ],
)
def test_failures_of_loader_processes_are_one_sentence(how: str, sentence: str) -> None:
    """An item that a queue can't send is dropped by it, and a handler of torch's raised an error anywhere."""
    data = Failing(num_train=8)
    data.how = how
    handler = signal.getsignal(signal.SIGCHLD)
    loaders = Loaders(data, torch.device("cpu"))
    processes = loaders.of("reader", 1)
    assert processes is not None
    tasks = [Task([0]), Task([1])]
    with pytest.raises(UserCodeError) as failed:
        list(processes.minibatches("train", ["x"], iter(tasks)))
    loaders.close()
    assert failed.value.problem.startswith(sentence)
    assert signal.getsignal(signal.SIGCHLD) is handler


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("limit", "no_collection")
def test_loader_processes_destroy_nothing_of_the_process_that_started_them() -> None:
    loaders = Loaders(Collecting(num_train=8), torch.device("cpu"))
    processes = loaders.of("reader", 1)
    assert processes is not None
    tasks = [Task([0, 1]), Task([2, 3], 1)]
    garbage = weakref.ref(OfOneProcess())
    found = [*processes.minibatches("train", ["x"], iter(tasks))]
    loaders.close()
    assert [len(each["x"]) for each in found] == [2, 2]
    assert garbage() is not None
    gc.collect()
    assert garbage() is None


@pytest.mark.usefixtures("limit")
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="processes aren't forked, and inherit no files")
def test_loader_processes_have_places_of_their_own_in_open_files(tmp_path: Path) -> None:
    """0.2.0: they shared the place in a file opened with the data set: one read where another had sought."""
    (tmp_path / "bytes").write_bytes(bytes(range(8)))
    descriptor = os.open(tmp_path / "bytes", os.O_RDONLY)
    os.lseek(descriptor, 2, os.SEEK_SET)
    loaders = Loaders(Seeking(descriptor), torch.device("cpu"))
    for reader in ("one", "another"):
        processes = loaders.of(reader, 1)
        assert processes is not None
        found = [*processes.minibatches("train", ["x"], iter([Task([5]), Task([6], 1)]))]
        assert [each["x"].tolist() for each in found] == [[5], [6]]
    loaders.close()
    assert os.lseek(descriptor, 0, os.SEEK_CUR) == 2
    os.close(descriptor)
