"""Named points of a run: where a process of it stops until the campaign has disturbed it, and then goes on.

The model that the campaign trains imports this, so it is in every process that trains. There, functions of the package
are wrapped, each at a point with a name. When a process comes to the point that the drawing has chosen, it says so in
a file and waits for an answer: by then it, or whatever else was chosen, may have been killed. So a disturbance comes at
the same place in a run on a machine of any load, and a seed stands for the same places every time.
"""

import contextlib
import functools
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FOLDER = "PIPEBENCH_CAMPAIGN"  # the environment variable with the folder of questions and answers
PLAN, BEGUN = "moments.json", "begun.jsonl"
_POLL_S, _PATIENCE_S = 0.003, 600.0
# Where a process can be stopped, by name, and what is going on there.
POINTS = {
    "model": "in start-up, the model has been made",
    "restored": "a checkpoint has been taken up",
    "segment": "between two drains",
    "instruction": "in the midst of a segment",
    "hand over": "while layers move",
    "recut": "at a drain that moves layers",
    "part": "a part of a checkpoint is written, not renamed",
    "part written": "a part of a checkpoint is written",
    "manifest": "the manifest is written, not renamed",
    "committed": "the checkpoint is whole, older ones not removed",
    "pruned": "older checkpoints are removed",
    "evaluation": "before an evaluation",
    "evaluated": "an evaluation is over",
    "result": "all is trained, nothing summed up",
    "finish": "before the record is closed",
    "finished": "the record is closed",
}


@dataclass(frozen=True)
class Moment:
    """When a process is to stop."""

    point: str  # a name in `POINTS`
    step: int  # at the first time that so many minibatches are done, or more
    rank: int = 0  # of the process; in one process 0
    nth: int = 0  # how many instructions of that segment pass before; of other points none do


@dataclass(frozen=True)
class Question:
    """A process that waits at a moment."""

    pid: int  # its process id
    step: int  # minibatches done, or those of the checkpoint that is written
    at_s: float  # when it came there, seconds since the epoch


def asked(folder: Path, index: int) -> Path:
    """Return where the process that comes to a moment says so."""
    return folder / f"asked-{index}.json"


def answered(folder: Path, index: int) -> Path:
    """Return what lets it go on."""
    return folder / f"answered-{index}"


class Watch:
    """What a process is to stop at.

    Args:
        folder: where questions and answers are.
        rank: this process's.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self._moments = [Moment(**each) for each in json.loads((folder / PLAN).read_text())]
        self._next = 0
        self.step = 0  # of the checkpoint that is being written

    def reached(self, point: str, step: int, nth: int = 0) -> None:
        """Stop here if the next moment is this; moments that came to other processes are over."""
        if not any(each.point == point for each in self._moments[self._next :]):
            return
        while self._next < len(self._moments) and asked(self.folder, self._next).exists():
            self._next += 1
        if self._next == len(self._moments):
            return
        moment = self._moments[self._next]
        if moment.point == point and moment.rank == self.rank and step >= moment.step and nth >= moment.nth:
            self._ask(self._next, Question(os.getpid(), step, time.time()))

    def _ask(self, index: int, question: Question) -> None:
        beside = self.folder / f".asked-{index}-{os.getpid()}"
        beside.write_text(json.dumps(asdict(question)))
        beside.rename(asked(self.folder, index))
        until_s = time.monotonic() + _PATIENCE_S
        while not answered(self.folder, index).exists():
            if time.monotonic() > until_s:
                raise TimeoutError(f"nobody has answered at moment {index}")
            time.sleep(_POLL_S)

    def note_begun(self, step: int) -> None:
        """Note that this process trains from here on."""
        with (self.folder / BEGUN).open("a") as file:
            file.write(json.dumps({"at_s": time.time(), "rank": self.rank, "step": step}) + "\n")


def arm() -> Watch | None:
    """Wrap what has points, in a process that trains under the campaign; return what watches it, None elsewhere."""
    folder, rank = os.environ.get(FOLDER), os.environ.get("RANK")
    if folder is None or (rank is None and os.environ.get(f"{FOLDER}_IN_PROCESSES")):
        return None  # nobody asked, or this is the parent of the processes
    watch = Watch(Path(folder), int(rank or 0))
    _wrap_loop(watch)
    _wrap_store(watch)
    _wrap_engines(watch)
    return watch


def _wrap(owner: Any, name: str, around: Callable[..., contextlib.AbstractContextManager[object]]) -> None:
    """Let a function run inside what `around` makes of its arguments."""
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with around(*args):
            return inner(*args, **kwargs)

    setattr(owner, name, wrapped)


def _between(
    watch: Watch, before: str | None, after: str | None, step: Callable[[Any], int]
) -> Callable[..., contextlib.AbstractContextManager[object]]:
    """Return what stops before and after a function; `step` is told its first argument."""

    @contextlib.contextmanager
    def around(first: Any, *args: Any) -> Iterator[None]:
        if before is not None:
            watch.reached(before, step(first))
        yield
        if after is not None:
            watch.reached(after, step(first))

    return around


def _wrap_loop(watch: Watch) -> None:
    from pipebench.tracking.run_log import RunLog
    from pipebench.train.loop import TrainingLoop

    def done(loop: Any) -> int:
        return int(loop._done)

    @contextlib.contextmanager
    def begun(loop: Any) -> Iterator[None]:
        watch.note_begun(loop._done)
        yield

    @contextlib.contextmanager
    def segment(loop: Any, *args: Any) -> Iterator[None]:
        watch.reached("segment", loop._done)
        yield

    _wrap(TrainingLoop, "_train_to_target", begun)
    _wrap(TrainingLoop, "_restore", _between(watch, None, "restored", done))
    _wrap(TrainingLoop, "_train", segment)
    _wrap(TrainingLoop, "_evaluate", _between(watch, "evaluation", "evaluated", done))
    _wrap(TrainingLoop, "_result", _between(watch, "result", None, done))
    _wrap(RunLog, "finish", _between(watch, "finish", "finished", lambda log: 1 << 30))


def _wrap_store(watch: Watch) -> None:
    from pipebench import files
    from pipebench.checkpoint.store import Checkpoints

    renaming: list[str] = []  # the point that a rename is, while a checkpoint is written

    def writing(point: str, after: str) -> Callable[..., contextlib.AbstractContextManager[object]]:
        @contextlib.contextmanager
        def around(store: Any, step: int, *args: Any) -> Iterator[None]:
            watch.step = step
            renaming.append(point)
            try:
                yield
            finally:
                renaming.pop()
            watch.reached(after, step)

        return around

    @contextlib.contextmanager
    def rename(*args: Any) -> Iterator[None]:
        if renaming:
            watch.reached(renaming[-1], watch.step)
        yield

    _wrap(files, "rename", rename)
    _wrap(Checkpoints, "write_part", writing("part", "part written"))
    _wrap(Checkpoints, "_prune", _between(watch, "committed", None, lambda store: watch.step))
    _wrap(Checkpoints, "commit", writing("manifest", "pruned"))


def _wrap_engines(watch: Watch) -> None:
    from pipebench.distributed.engine import DistributedEngine
    from pipebench.engine.virtual import VirtualEngine
    from pipebench.engine.worker import Worker
    from pipebench.schedule.instructions import MOVE_OPS
    from pipebench.schedule.operations import Op

    transfers = {*MOVE_OPS, Op.GIVE_UNIT, Op.TAKE_UNIT, Op.FORWARD_AGAIN}
    place = [0, 0]  # the segment's first minibatch, and how many instructions of it are over here

    @contextlib.contextmanager
    def beginning(engine: Any, first_minibatch: int, *args: Any) -> Iterator[None]:
        place[:] = first_minibatch, 0
        yield

    @contextlib.contextmanager
    def executing(worker: Any, instruction: Any, *args: Any) -> Iterator[None]:
        first, number = place
        if worker._scores is None:  # in training
            watch.reached("instruction", first, number)
            place[1] += 1
            if instruction.op in transfers:
                watch.reached("hand over", first)
        yield

    _wrap(Worker, "execute", executing)
    for engine in (VirtualEngine, DistributedEngine):
        _wrap(engine, "train", beginning)
        _wrap(engine, "switch_setup", _between(watch, "recut", None, lambda engine: place[0]))
