"""Fetches minibatches ahead in loader processes or in a thread beside a GPU, or else when they are asked for.

The order of minibatches is fixed beforehand, and each is a function of its samples and its draw, so that all three ways
give the same bits. Profiles time the way that training uses. Loader processes, which take 0.1 s each to start, are kept
from segment to segment.
"""

import gc
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Generator, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.queues import Queue
from pickle import PicklingError
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils import data

from pipebench.errors import UserCodeError
from pipebench.files import reopen_inherited
from pipebench.garbage import without_collector
from pipebench.recipe.users_code import as_users, reason
from pipebench.zoo.registry import Dataset

_OUTLIVES_S = 30.0  # seconds that a loader process outlives SIGTERM: as many as launchers give a run to drain
# How processes are started: forked on Linux, Python's default there before 3.14. Then data sets needn't be pickled, and
# there is no fork server, which a signal to the group would end. A process forked beside torch's threads must not use
# them; loader processes compute in one thread.
_START = "fork" if sys.platform == "linux" else None
# Minibatches fetched ahead, by the thread or by each loader process. The simulator's loader has as many buffers.
AHEAD = 2

_NO_ROOM = (
    "a minibatch doesn't fit in shared memory, /dev/shm: give the container more of it (docker's --shm-size), or make "
    "dataset.loader_processes or train.minibatch_size smaller"
)
# Words in torch's and Python's errors about sharing between processes, to advice.
_ADVICE = {
    "unable to allocate shared memory": _NO_ROOM,
    "AF_UNIX path too long": "the path of temporary files is too long for a socket: set TMPDIR to a shorter one",
}

Fields = dict[str, torch.Tensor]


class Task(NamedTuple):
    """A minibatch to fetch."""

    indices: Sequence[int]  # of its samples
    draw: int = 0  # seeds their augmentation
    epoch: int = 0  # from 0 on, in training

    def fetch(self, dataset: Dataset, split: str, fields: Sequence[str]) -> Fields:
        """Return fields of the minibatch."""
        if split == "train":
            dataset.begin_epoch(self.epoch)
        return dataset.fetch(split, self.indices, fields, self.draw)


@dataclass(frozen=True)
class Source:
    """Fields of a split of a data set, for a device."""

    dataset: Dataset
    split: str
    fields: Sequence[str]
    device: torch.device

    def minibatches(
        self, tasks: Iterator[Task], processes: "LoaderProcesses | None" = None
    ) -> Generator[Fields, None, None]:
        """Yield the tasks' minibatches in order, in pinned memory if they were fetched ahead for a GPU.

        While a GPU computes, the host waits for it and a thread can fetch. On a CPU a thread would take cores from
        computation, so minibatches are fetched when asked for. Closing the generator ends fetching.
        """
        if processes is not None:
            yield from processes.minibatches(self.split, self.fields, tasks)
        elif self.device.type == "cuda" and self.dataset.concurrent:
            yield from self._in_a_thread(tasks)
        else:
            yield from map(self.fetch, tasks)

    def fetch(self, task: Task) -> Fields:
        """Return a minibatch."""
        return task.fetch(self.dataset, self.split, self.fields)

    def _in_a_thread(self, tasks: Iterator[Task]) -> Iterator[Fields]:
        """Fetch in a thread, which also copies to pinned memory; torch reuses that memory once the GPU has read it."""
        # A new thread's current device is the first GPU; `cuda` without an index is the current one of this thread.
        gpu = torch.cuda.current_device() if self.device.index is None else self.device.index
        pool = ThreadPoolExecutor(1, "fetch-ahead", torch.cuda.set_device, (gpu,))
        ahead: deque[Future[Fields]] = deque()
        try:
            for task in tasks:
                ahead.append(pool.submit(self._pinned, task))
                if len(ahead) > AHEAD:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _pinned(self, task: Task) -> Fields:
        return {name: pinned(value) for name, value in self.fetch(task).items()}


class LoaderProcesses:
    """Processes that fetch ahead for one reader, one segment at a time.

    They start with the first segment; each has a copy of the data set as it is then.
    """

    def __init__(self, dataset: Dataset, device: torch.device, count: int) -> None:
        self._order = _Order()
        self._loader: Any = data.DataLoader(
            _Tasks(dataset),
            sampler=self._order,
            batch_size=None,
            num_workers=count,
            prefetch_factor=AHEAD,
            pin_memory=device.type == "cuda",
            persistent_workers=True,
            worker_init_fn=_begin,
            multiprocessing_context=_START,
        )

    def minibatches(self, split: str, fields: Sequence[str], tasks: Iterator[Task]) -> Iterator[Fields]:
        """Yield the tasks' minibatches in order, dropping those of an earlier segment that are still being fetched.

        Raises:
            UserCodeError: reading fails, or a process has ended.
        """
        self._order.tasks = ((split, fields, task) for task in tasks)
        try:
            for fetched in self._begun():
                if isinstance(fetched, _Mistake):
                    raise UserCodeError(f"in a process that fetches ahead, {fetched.sentence}")
                yield fetched
        except RuntimeError as error:
            if (ended := self._ended()) is None:
                raise
            raise UserCodeError(f"a process that fetches ahead {ended}") from error

    def _begun(self) -> Any:
        """Return torch's iterator, without its SIGCHLD handler, which could raise an error anywhere in this process."""
        handler = signal.getsignal(signal.SIGCHLD)
        try:
            with without_collector():  # until `_begin`, in the new processes
                fetching = iter(self._loader)
        except (PicklingError, AttributeError, TypeError) as error:  # where processes aren't forked
            raise UserCodeError(
                f"a process that fetches ahead can't be given the data set ({reason(error)}): keep no lambdas, local "
                "functions or open files in it, or set dataset.loader_processes to 0"
            ) from error
        if signal.getsignal(signal.SIGCHLD) is not handler:
            signal.signal(signal.SIGCHLD, handler)
        return fetching

    def _ended(self) -> str | None:
        """Return how a process has ended, as the end of a sentence; None if all are still running."""
        processes = getattr(self._loader._iterator, "_workers", ())  # None if they couldn't be started
        code = next((process.exitcode for process in processes if process.exitcode), None)
        if code is None:
            return None
        if code == -signal.SIGBUS:  # shared memory that was allocated couldn't be backed by pages
            return f"was ended by SIGBUS: {_NO_ROOM}"
        if code == -signal.SIGKILL:
            return "was ended by SIGKILL, as memory runs out: make dataset.loader_processes smaller"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"has ended with exit code {code}"

    def close(self) -> None:
        """End the processes."""
        self._loader = None


def _begin(_: int) -> None:
    """Prepare a loader process.

    It leaves the process group to which torchrun sends signals. It also outlives SIGTERM, which all processes of a job
    may get, for a while, since its reader still needs it to drain. If its queue can't send a minibatch, it sends the
    reason instead; otherwise the queue would drop the minibatch, and the reader would wait for ever. It doesn't collect
    garbage of the process that forked it: a process group of Gloo's, destroyed here, would wait for threads that only
    that process has, and crash. It opens anew what that process had opened to read, wherever the data set has it.
    """
    reopen_inherited()
    gc.freeze()
    gc.enable()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, _end_later)
    Queue._on_queue_feeder_error = _report_unsent  # type: ignore[attr-defined]  # Python's own hook for this


def _end_later(number: int, frame: FrameType | None) -> None:
    """End this process in `_OUTLIVES_S`, if it is still running: `multiprocessing` also ends processes by SIGTERM."""
    timer = threading.Timer(_OUTLIVES_S, os._exit, [1])
    timer.daemon = True
    timer.start()


class Loaders:
    """All loader processes of an engine, by reader."""

    def __init__(self, dataset: Dataset, device: torch.device) -> None:
        self._dataset, self._device = dataset, device
        self._is_prepared = False
        self._found: dict[tuple[Hashable, int], LoaderProcesses] = {}

    def prepare(self) -> None:
        """Renew the data set if loader processes will start, which would share the files that this one has opened."""
        if self._dataset.loader_processes > 0 and not self._is_prepared:
            self._dataset.renew()
            self._is_prepared = True

    def of(self, reader: Hashable, count: int) -> LoaderProcesses | None:
        """Return a reader's processes; None if it has none."""
        if count == 0:
            return None
        self.prepare()
        if (reader, count) not in self._found:
            self._found[reader, count] = LoaderProcesses(self._dataset, self._device, count)
        return self._found[reader, count]

    def close(self) -> None:
        """End all processes. If they were left to garbage collection, it would wait seconds for each."""
        while self._found:
            self._found.popitem()[1].close()


def pinned(value: torch.Tensor) -> torch.Tensor:
    """Return a value in pinned memory."""
    return value if value.is_pinned() else value.pin_memory()


def onto_device(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a value on a device; copies to a GPU are asynchronous.

    They are made from pinned memory, since a copy from any other memory waits for all earlier work of the GPU.
    """
    return (pinned(value) if device.type == "cuda" else value).to(device, non_blocking=True)


@dataclass(frozen=True)
class _Mistake:
    """A user's error in a loader process, sent as a sentence; torch's own way puts a traceback into its message."""

    sentence: str


def _report_unsent(queue: Any, error: Exception, item: Any) -> None:
    """Send what went wrong in place of a minibatch; `item` is torch's pair of its number and itself."""
    queue.put((item[0], _Mistake(_advice(error) or reason(error))))


def _advice(error: BaseException | None) -> str | None:
    """Return what to do about an error, or one of its causes, of sharing between processes; None for other errors."""
    if error is None:
        return None
    return next((advice for words, advice in _ADVICE.items() if words in str(error)), None) or _advice(error.__cause__)


@dataclass
class _Order:
    """The tasks of the current segment, as the sampler that torch's loader asks for an order of samples."""

    tasks: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tasks)


class _Tasks(data.Dataset[Any]):
    """A data set for torch's loader, whose indices are whole tasks."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    def __getitem__(self, asked: tuple[str, Sequence[str], Task]) -> Any:
        """Return a task's minibatch."""
        split, fields, task = asked
        try:
            return task.fetch(self._dataset, split, fields)
        except BaseException as error:  # one that isn't an Exception would end the process without a message
            if advice := _advice(error):
                return _Mistake(advice)
            theirs = as_users(error)
            if theirs is None:
                raise
            return _Mistake(str(theirs))
