"""Replays the virtual clock of a stored training result without its arithmetic, on which the clock doesn't depend.

Epochs and accuracy take hours of training on one kind of processor; seconds follow from them and the simulator alone.
So when the simulator changes, stored results get its times without being trained again. With asynchronous pushes the
arithmetic depends on the clock, which decides their order: if that has changed, the replay is refused.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from pipebench.engine.engine import OnLoss, OnUnit
from pipebench.engine.feed import Feed
from pipebench.engine.setup import Setup
from pipebench.engine.virtual import VirtualEngine
from pipebench.extensions.asynchronous.server import InProcessServer
from pipebench.recipe.load import LoadedRecipe
from pipebench.run.identity import made_on
from pipebench.schedule.operations import Op
from pipebench.schedule.syncs import ASYNCHRONOUS
from pipebench.show.progress import Silent
from pipebench.simulate.meter import Meter
from pipebench.simulate.network import Network
from pipebench.simulate.simulation import TimelineEvent
from pipebench.train.loop import TrainingLoop
from pipebench.train.prepare import prepare
from pipebench.train.result import DIVERGED, INTERRUPTED, Point, RunResult

_ROUNDING = 1e-9  # relative
# Beginnings of the names of metrics that a replay can't give: those of the arithmetic and of the host that trained.
_KEPT = ("peak_memory_bytes", "host_peak_bytes", "weight_versions", "wall_time_s", "start_time_s")
# Names of metrics that a replay replaces. All others have to be equal.
_OF_CLOCK = re.compile(r".*(_s|_fraction)")


class ClockEngine(VirtualEngine):
    """Executes a run's timeline without computing; evaluations return the metrics of `points`, one after another."""

    def __init__(self, points: Iterator[Point], setup: Setup, on_loss: OnLoss, on_unit: OnUnit) -> None:
        meter = Meter(setup.pipeline)
        network = Network(setup.cluster, setup.devices, meter.transfer, copies=setup.copies)
        super().__init__(setup, network, on_loss=on_loss, on_unit=on_unit, meter=meter)
        self._points = points
        self._held: dict[int, int] = {}  # with asynchronous pushes: the version that a worker computes with, by worker

    def train(self, first_minibatch: int, num_minibatches: int) -> int:
        """Replay a segment; its loss is 0."""
        self._held.clear()
        trained = super().train(first_minibatch, num_minibatches)
        self._on_loss(torch.zeros(()), 0, 1.0, self.now_s)
        return trained

    def evaluate(self) -> dict[str, float]:
        """Replay an evaluation; return the metrics of the next point.

        Raises:
            RuntimeError: there is no further point.
        """
        before_s, setup = self.clock_s, self.setup
        self.meter.evaluating = True
        feed = Feed(setup, "eval", 0, setup.held_out.minibatches_per_epoch, self.loaders)
        self._run_evaluation(feed)
        feed.close()
        self.meter.evaluating = False
        self._not_training_s += self.clock_s - before_s
        if (point := next(self._points, None)) is None:
            raise RuntimeError("evaluates more often than what is kept")
        return dict(point.metrics)

    def facts(self) -> dict[str, Any]:
        """Return the facts of `VirtualEngine`, with the bytes that the network counts: no tensors are sent here."""
        self.num_bytes = Counter(self.network.num_bytes)
        return super().facts()

    def _execute(self, event: TimelineEvent) -> None:
        """Compute nothing, but record the order of pushes: after its push, a worker pulls the newest weights."""
        if event.instruction.op is Op.PUSH:
            server = self.extensions[ASYNCHRONOUS]
            assert isinstance(server, InProcessServer)
            assert server.here.current is not None
            server.here.current.add(event.instruction.number, self._held.get(event.worker, 0))
            self._held[event.worker] = server.here.applied


def played_again(loaded: LoadedRecipe, was: RunResult) -> RunResult | None:
    """Return a stored result with the times of today's simulator; None if it has these already, up to rounding.

    Args:
        loaded: the recipe that was trained.
        was: its stored result.

    Raises:
        RuntimeError: the run has changed in more than times: its plan, its order of pushes, when it evaluates or the
            bytes it sends; or it diverged or was interrupted, so that its clock can't be replayed to the end.
    """
    if was.outcome in (DIVERGED, INTERRUPTED):
        raise RuntimeError(f"{was.name}: {was.outcome}, and a clock ends at the last evaluation")
    job = prepare(loaded.recipe, loaded.cluster)
    now, _ = TrainingLoop(job, partial(ClockEngine, iter(was.points), job.setup), Silent(), lambda point: None).run()
    common = {name: now.metrics[name] for name in was.metrics if name in now.metrics and not name.startswith(_KEPT)}
    found = {"plan": now.plan, "evaluated after samples": [point.samples for point in now.points], **common}
    kept = {"plan": was.plan, "evaluated after samples": [point.samples for point in was.points], **was.metrics}
    for name in (name for name in found if not _OF_CLOCK.fullmatch(name)):
        if found[name] != kept[name]:
            raise RuntimeError(f"{was.name}: {name} {found[name]}, kept is {kept[name]}")
    times = {name: value for name, value in common.items() if _OF_CLOCK.fullmatch(name)}
    if all(math.isclose(value, was.metrics[name], rel_tol=_ROUNDING) for name, value in times.items()):
        return None
    points = [replace(point, clock_s=each.clock_s) for point, each in zip(was.points, now.points, strict=True)]
    return replace(was, metrics={**was.metrics, **times}, points=tuple(points))


def of_today() -> dict[str, str]:
    """Return the provenance of replayed times: the tree whose simulator made them."""
    return {"times of tree": made_on()["tree"]}
