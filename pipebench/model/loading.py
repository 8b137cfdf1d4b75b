"""Fetching ahead: minibatches in loader processes, in a thread beside a GPU, or when they are asked for.

Their order is fixed beforehand and each is a function of its samples and its draw, so all three give the same bits.
Profiles time the path that training takes. Loader processes stay between segments: to start one takes 0.1 s.
"""

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
from typing import Any

import torch
from torch.utils import data

from pipebench.errors import UserCodeError
from pipebench.recipe.users_code import as_users, reason
from pipebench.zoo.registry import Dataset

_OUTLIVES_S = 30.0  # as launchers give a run to drain
# As before Python 3.14 everywhere on Linux: data sets go as they are, and no server that starts processes ends with a
# signal to the group. A process that is forked beside threads, torch's, must not use them; loaders compute on one.
_START = "fork" if sys.platform == "linux" else None
AHEAD = 2  # minibatches fetched ahead, by a thread or per loader process; the simulator's loader has as many buffers

_NO_ROOM = (
    "a minibatch doesn't fit in shared memory, /dev/shm: give the container more of it (docker's --shm-size), or make "
    "dataset.loader_processes or train.minibatch_size smaller"
)
# What to do, by words of torch's and Python's errors about what processes share.
_ADVICE = {
    "unable to allocate shared memory": _NO_ROOM,
    "AF_UNIX path too long": "the path of temporary files is too long for a socket: set TMPDIR to a shorter one",
}

Task = tuple[list[int], int]  # the samples of a minibatch, and what their augmentation is drawn from
Fields = dict[str, torch.Tensor]


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
        """Yield the tasks' minibatches in order, pinned if they were fetched ahead for a GPU; `close` ends fetching.

        A GPU computes while the host waits for it, so that a thread can fetch; on a CPU a thread would take cores from
        computation, and minibatches are fetched when asked for.
        """
        if processes is not None:
            yield from processes.minibatches(self.split, self.fields, tasks)
        elif self.device.type == "cuda" and self.dataset.concurrent:
            yield from self._in_a_thread(tasks)
        else:
            yield from map(self.fetch, tasks)

    def fetch(self, task: Task) -> Fields:
        """Return a minibatch."""
        indices, draw = task
        return self.dataset.fetch(self.split, indices, self.fields, draw)

    def _in_a_thread(self, tasks: Iterator[Task]) -> Iterator[Fields]:
        """Fetch in a thread, which also copies to pinned memory: torch reuses it once the GPU has read it."""
        # A thread begins on the first GPU; `cuda` without a number is the one that this thread is on.
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
    """Processes that fetch ahead for one reader, segment after segment: at most one at a time.

    Each has a copy of the data set as it is when they start, with the first segment.
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
        """Yield the tasks' minibatches in order; what is still being fetched of an earlier segment is dropped.

        Raises:
            UserCodeError: reading fails, or a process has ended.
        """
        self._order.tasks = ((split, fields, *task) for task in tasks)
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
        """Return torch's iterator; without its handler, which raises an error wherever this process is just then."""
        handler = signal.getsignal(signal.SIGCHLD)
        try:
            fetching = iter(self._loader)
        except (PicklingError, AttributeError, TypeError) as error:  # other systems don't fork
            raise UserCodeError(
                f"a process that fetches ahead can't be given the data set ({reason(error)}): keep no lambdas, local "
                "functions or open files in it, or set dataset.loader_processes to 0"
            ) from error
        if signal.getsignal(signal.SIGCHLD) is not handler:
            signal.signal(signal.SIGCHLD, handler)
        return fetching

    def _ended(self) -> str | None:
        """Return how a process has ended, as the end of a sentence; None if all are there."""
        processes = getattr(self._loader._iterator, "_workers", ())  # None if they couldn't be started
        code = next((process.exitcode for process in processes if process.exitcode), None)
        if code is None:
            return None
        if code == -signal.SIGBUS:  # no room is left for what was there a moment ago
            return f"was ended by SIGBUS: {_NO_ROOM}"
        if code == -signal.SIGKILL:
            return "was ended by SIGKILL, as memory runs out: make dataset.loader_processes smaller"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"has ended with exit code {code}"

    def close(self) -> None:
        """End the processes."""
        self._loader = None


def _begin(_: int) -> None:
    """Prepare a loader process.

    It leaves the group of processes that torchrun sends its signals to, and outlives SIGTERM, which all processes of a
    job may get, for a while: loaders end with their reader, which drains.
    What its queue can't send it reports in its place: the queue would drop it, and the reader wait for ever.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, _end_later)
    Queue._on_queue_feeder_error = _report_unsent  # type: ignore[attr-defined]  # Python's own hook for this


def _end_later(number: int, frame: FrameType | None) -> None:
    """End this process if it hasn't ended by itself by then: `multiprocessing` asks by this signal, too, and waits."""
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
        """Renew the data set if there will be processes, which would share the files that this one has opened in it."""
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
        """End all processes; garbage collection would wait seconds for each."""
        while self._found:
            self._found.popitem()[1].close()


def pinned(value: torch.Tensor) -> torch.Tensor:
    """Return a value in pinned memory."""
    return value if value.is_pinned() else value.pin_memory()


def onto_device(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a value on a device; copies to a GPU are asynchronous.

    Only pinned memory is copied so: any other copy ends after all earlier work of the GPU.
    """
    return (pinned(value) if device.type == "cuda" else value).to(device, non_blocking=True)


@dataclass(frozen=True)
class _Mistake:
    """A user's error in a loader process; torch would return it with a traceback in its message."""

    sentence: str


def _report_unsent(queue: Any, error: Exception, item: Any) -> None:
    """Send what went wrong in place of a minibatch; `item` is its number and the minibatch, as torch has them."""
    queue.put((item[0], _Mistake(_advice(error) or reason(error))))


def _advice(error: BaseException | None) -> str | None:
    """Return what to do where processes can't share, be it that another error came of that; None of other errors."""
    if error is None:
        return None
    return next((advice for words, advice in _ADVICE.items() if words in str(error)), None) or _advice(error.__cause__)


@dataclass
class _Order:
    """The tasks of the segment at hand, where torch's loader asks for an order of samples."""

    tasks: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tasks)


class _Tasks(data.Dataset[Any]):
    """A data set for torch's loader, whose index is a whole task."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    def __getitem__(self, task: tuple[str, Sequence[str], list[int], int]) -> Any:
        """Fetch."""
        split, fields, indices, draw = task
        try:
            return self._dataset.fetch(split, indices, fields, draw)
        except BaseException as error:  # one that is no Exception would end the process without a word
            if advice := _advice(error):
                return _Mistake(advice)
            theirs = as_users(error)
            if theirs is None:
                raise
            return _Mistake(str(theirs))
