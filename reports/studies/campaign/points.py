"""Named points of a run at which a process waits until the campaign has injected a fault.

The model that the campaign trains imports this module, so every process that trains does. It wraps functions of the
package, which then pass through named points. A process that reaches the point drawn for the next fault writes a file
with its question and waits for the file with the answer; meanwhile it, or another process, may be killed. So a fault
comes at the same place of a run whatever the load of the machine, and a seed always draws the same places.
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

FOLDER = "PIPEBENCH_CAMPAIGN"  # environment variable with the folder of questions and answers
PLAN = "moments.json"  # the moments of all faults, in order
BEGUN = "begun.jsonl"  # a line whenever a process begins to train
_POLL_S, _PATIENCE_S = 0.003, 600.0
# Descriptions of the points by name.
POINTS = {
    "model": "in start-up, the model has been built",
    "restored": "a checkpoint has been loaded",
    "segment": "between two drains",
    "instruction": "within a segment",
    "shards": "while replicas gather weights, or scatter gradients, of which each has a shard",
    "hand over": "while layers move",
    "recut": "at a drain that moves layers",
    "part": "a part of a checkpoint is written, not renamed",
    "part written": "a part of a checkpoint is written",
    "manifest": "the manifest is written, not renamed",
    "committed": "the checkpoint is complete, older ones not removed",
    "pruned": "older checkpoints are removed",
    "evaluation": "before an evaluation",
    "evaluated": "an evaluation is over",
    "result": "training is over, results aren't computed",
    "finish": "before MLflow's record is closed",
    "finished": "MLflow's record is closed",
}


@dataclass(frozen=True)
class Moment:
    """When a process has to wait: the first time that it reaches the point with this progress."""

    point: str  # a name in `POINTS`
    step: int  # fewest minibatches that are done
    rank: int = 0  # of the process
    nth: int = 0  # at `instruction`, fewest instructions of the segment that are done


@dataclass(frozen=True)
class Question:
    """The state of a process that waits at a moment."""

    pid: int  # its process id
    step: int  # minibatches that are done, or those of the checkpoint that is being written
    at_s: float  # since when it waits, seconds since the epoch


def asked(folder: Path, index: int) -> Path:
    """Return the file with the question of the process that waits at moment `index`."""
    return folder / f"asked-{index}.json"


def answered(folder: Path, index: int) -> Path:
    """Return the file that lets the process at moment `index` continue."""
    return folder / f"answered-{index}"


class Watch:
    """Lets this process wait at the moments that were drawn.

    Args:
        folder: of questions and answers.
        rank: this process's.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self._moments = [Moment(**each) for each in json.loads((folder / PLAN).read_text())]
        self._next = 0
        self.step = 0  # of the checkpoint that is being written

    def reached(self, point: str, step: int, nth: int = 0) -> None:
        """Wait if this is the next moment. Moments at which any process has waited already are over."""
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
                raise TimeoutError(f"no answer at moment {index}")
            time.sleep(_POLL_S)

    def note_begun(self, step: int) -> None:
        """Record that this process begins to train, after `step` minibatches."""
        with (self.folder / BEGUN).open("a") as file:
            file.write(json.dumps({"at_s": time.time(), "rank": self.rank, "step": step}) + "\n")


def arm() -> Watch | None:
    """Wrap the functions at points if this process trains in a campaign; return its watch, None elsewhere."""
    folder, rank = os.environ.get(FOLDER), os.environ.get("RANK")
    if folder is None or (rank is None and os.environ.get(f"{FOLDER}_IN_PROCESSES")):
        return None  # there is no campaign, or this is the parent of the processes that train
    watch = Watch(Path(folder), int(rank or 0))
    _wrap_loop(watch)
    _wrap_store(watch)
    _wrap_engines(watch)
    return watch


def _wrap(owner: Any, name: str, around: Callable[..., contextlib.AbstractContextManager[object]]) -> None:
    """Replace a function of `owner` by one that runs inside the context manager that `around` makes of its arguments.

    `around` gets the positional arguments.
    """
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with around(*args):
            return inner(*args, **kwargs)

    setattr(owner, name, wrapped)


def _between(
    watch: Watch, before: str | None, after: str | None, step: Callable[[Any], int]
) -> Callable[..., contextlib.AbstractContextManager[object]]:
    """Return an `around` for `_wrap` with a point before and one after a function.

    `step` returns the step of a point from the function's first argument.
    """

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

    renaming: list[str] = []  # while a checkpoint is written: the point at which its file is renamed

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

    points = dict.fromkeys((*MOVE_OPS, Op.GIVE_UNIT, Op.TAKE_UNIT, Op.FORWARD_AGAIN), "hand over")
    points |= dict.fromkeys((Op.WAIT_GATHER, Op.WAIT_SCATTER), "shards")
    place = [0, 0]  # the segment's first minibatch, and the number of its instructions that are done in this process

    @contextlib.contextmanager
    def beginning(engine: Any, first_minibatch: int, *args: Any) -> Iterator[None]:
        place[:] = first_minibatch, 0
        yield

    @contextlib.contextmanager
    def executing(worker: Any, instruction: Any, *args: Any) -> Iterator[None]:
        first, number = place
        if worker._scores is None:  # in training, not in an evaluation
            watch.reached("instruction", first, number)
            place[1] += 1
            if instruction.op in points:
                watch.reached(points[instruction.op], first)
        yield

    _wrap(Worker, "execute", executing)
    for engine in (VirtualEngine, DistributedEngine):
        _wrap(engine, "train", beginning)
        _wrap(engine, "switch_setup", _between(watch, "recut", None, lambda engine: place[0]))
