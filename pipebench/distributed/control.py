"""The threads beside a worker's training: they detect stalls, report them to the others, and agree on where to stop.

The training thread only notes its current instruction. One thread talks to the store. The other watches the training
thread and waits for no answer, so that a stalled worker is reported even if the launcher hangs.
"""

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import NamedTuple, NoReturn

from torch.distributed import Store  # type: ignore[attr-defined] # torch lists it nowhere

from pipebench.distributed.heartbeat import beat_period_s
from pipebench.distributed.launch_worker import fail_stalled
from pipebench.distributed.stall import ADMIT, BARRIER, EXCHANGE, NOTHING, Activity, describe, stall_report
from pipebench.engine.admission import AdmissionControl, Position
from pipebench.schedule.instructions import Instruction
from pipebench.schedule.pipeline import Pipeline

STOP_KEY = "pipebench/stop"  # set to a reason, also by the launcher
_HEARTBEAT_KEY, _POSITION_KEY = "pipebench/heartbeat", "pipebench/position"
_LOG = logging.getLogger("pipebench.distributed.control")
_AGREEING_S = 0.02  # between two looks at the others' answers; short, since all workers may wait for the agreement
# A worker is silent after so many missing heartbeats, and so many seconds, since a loaded host may be slow.
_SILENT_HEARTBEATS, _SILENT_S = 4, 2.0
_WATCHDOG_S = 0.5  # between two looks at the training thread
LONGEST_WORK = 10  # limit of work other than instructions, as a multiple of an instruction's limit
_FAILED = 3  # exit code


def end_quietly() -> NoReturn:
    """End this process now: its launcher was killed, so nothing can be reported."""
    os._exit(_FAILED)


class _CurrentWork(NamedTuple):
    """The training thread's current work; see `Control.at`."""

    instruction: Instruction | None
    name: str
    since_s: float  # by `time.monotonic`


class Control(AdmissionControl):
    """One worker's admission control and its control threads.

    Workers agree on a stop as `pipebench/engine/admission.py` says. The key `pipebench/stop` has the reason; the first
    one counts. Every worker answers with its position, under a key of its own, and all positions together determine the
    cut. A stop is final: segments after it have no minibatches.

    Args:
        store: shared by all workers, new in every attempt; cloned here, so that its connection isn't shared.
        process: index of this process: `slices` times its worker's index, plus its own among the worker's processes.
        num_processes: number of processes.
        pipeline: the pipeline.
        stall_limit_s: the job ends if a worker is at one instruction for longer, in seconds; for other named work the
            limit is `LONGEST_WORK` times as long.
        multiple_of: segments that end early have a multiple of this number of minibatches. It is a text's number of
            streams: their states would be on other replicas than the next minibatches if it weren't.
        slices: number of processes per worker.
        on_stall: called in a control thread with the report; ends the process.
        on_orphan: ends the process when the store is gone, i.e. the launcher was killed.
        heartbeat_s: seconds between two looks for a request to stop, and between two reports of a worker's current
            work; with many workers, reports are rarer.
    """

    def __init__(
        self,
        store: Store,
        process: int,
        num_processes: int,
        pipeline: Pipeline,
        *,
        stall_limit_s: float,
        multiple_of: int = 1,
        slices: int = 1,
        on_stall: Callable[[str], None] = fail_stalled,
        on_orphan: Callable[[], None] = end_quietly,
        heartbeat_s: float = 0.5,
    ) -> None:
        super().__init__(math.lcm(pipeline.period, multiple_of))
        self._store = store.clone()
        # A suspended launcher (Ctrl-Z) is not gone: only a broken connection means that.
        self._store.set_timeout(timedelta(days=365))
        self._own, self._slices, self._pipeline = process, slices, pipeline
        self._stall_limit_s, self._look_s = stall_limit_s, heartbeat_s
        self._beat_s = beat_period_s(heartbeat_s, num_processes)
        self._on_stall, self._on_orphan = on_stall, on_orphan
        self._work = _CurrentWork(None, "", time.monotonic())
        self._heard: dict[int, tuple[bytes, float]] = {}  # each process's last heartbeat, and when it arrived here
        self._started_s = self._listened_s = time.monotonic()  # of the threads; when the store answered last
        self._num_heartbeats = 0
        self._heartbeat_keys = [f"{_HEARTBEAT_KEY}/{peer}" for peer in range(num_processes)]
        self._position_keys = [f"{_POSITION_KEY}/{peer}" for peer in range(num_processes)]
        self._request: str | None = None  # reason for which this worker requests a stop
        self._answered = False  # whether this worker has set its position
        self.stop_reason: str | None = None  # once agreed; workers learn it at slightly different times
        self._closed, self._wake = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=function, name=f"pipebench-{name}-{process}", daemon=True)
            for name, function in (("control", self._talk), ("watchdog", self._watchdog))
        ]

    def start(self) -> None:
        """Start the threads."""
        self._started_s = self._listened_s = time.monotonic()
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads, waiting briefly for one that talks to the store.

        If the store ends with a worker, all close before a last barrier, or the others would count as orphans.
        """
        self._closed.set()
        self._wake.set()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(timeout=2.0)

    def at(self, instruction: Instruction | None, work: str = "") -> None:
        """Note the training thread's current work; costs well under a microsecond.

        Args:
            instruction: None for other work.
            work: the name of other work, of which `EXCHANGE` and `BARRIER` wait for all workers; or of what an
                instruction belongs to that isn't training. Without an instruction, "" is nothing to watch.
        """
        self._work = _CurrentWork(instruction, work, time.monotonic())

    def admit(self, minibatch: int) -> bool:
        """Return whether a minibatch, numbered since the drain, may begin on this worker; False ends the segment.

        `admitted_program` calls it before the minibatch's first instruction on this worker. It also does before a
        replica joins a segment's last round in which it has no unit. Waits while workers agree on a stop.
        """
        if self.is_undecided(minibatch):
            before = self._work
            self.at(None, ADMIT)
            try:
                return super().admit(minibatch)
            finally:
                self.at(before.instruction, before.name)
        return super().admit(minibatch)

    def request_stop(self, reason: str) -> None:
        """Request all workers to stop at the same minibatch; from any thread. The first reason in the store counts."""
        # A signal handler may interrupt this very method: no lock.
        if self._request is None:
            self._request = reason
            self._wake.set()

    def _talk(self) -> None:
        try:
            beat_s = 0.0
            while not self._closed.is_set():
                self._wake.clear()
                if time.monotonic() >= beat_s:
                    beat_s = time.monotonic() + self._beat_s
                    self._beat()
                    self._listen()
                self._agree()
                agreeing = self._answered and self.stop_reason is None
                self._wake.wait(min(_AGREEING_S, self._look_s) if agreeing else self._look_s)
        except RuntimeError as error:
            if not self._closed.is_set():
                _LOG.debug("the store is gone: %s", error)
                self._on_orphan()

    def _beat(self) -> None:
        self._num_heartbeats += 1
        beat = {"count": self._num_heartbeats, **asdict(self._activity())}
        self._store.set(self._heartbeat_keys[self._own], json.dumps(beat))

    def _listen(self) -> None:
        if len(self._heard) < len(self._heartbeat_keys):
            peers = [peer for peer, key in enumerate(self._heartbeat_keys) if self._store.check([key])]
        else:
            peers = list(self._heard)
        beats = self._store.multi_get([self._heartbeat_keys[peer] for peer in peers])
        self._listened_s = time.monotonic()
        for peer, beat in zip(peers, beats, strict=True):
            if peer not in self._heard or self._heard[peer][0] != beat:
                self._heard[peer] = (beat, self._listened_s)

    def _agree(self) -> None:
        """Advance the agreement by one step, without waiting."""
        if self.stop_reason is not None:
            return
        if self._request is not None and not self._answered:
            self._store.compare_set(STOP_KEY, "", self._request)
        if not self._answered and self._store.check([STOP_KEY]):
            reason = self._store.get(STOP_KEY).decode()
            self._store.set(self._position_keys[self._own], json.dumps([*self.stop_admitting(), reason]))
            self._answered = True
        if self._answered and self._store.check(self._position_keys):
            answers = [json.loads(answer) for answer in self._store.multi_get(self._position_keys)]
            # The launcher's `set` may replace a worker's reason after some have read it: all use worker 0's.
            self.stop_reason = answers[0][2]
            self.settle(max(Position(segment, bound) for segment, bound, _ in answers))

    def _watchdog(self) -> None:
        """Measure how long the training thread is at its current work, and report it if that is too long.

        Time in which this process was suspended doesn't count: the time between two looks counts as four periods at
        most.
        """
        period_s = min(_WATCHDOG_S, self._stall_limit_s / 10)
        work, elapsed_s, before_s = self._work, 0.0, time.monotonic()
        while not self._closed.wait(period_s):
            now_s = time.monotonic()
            if self._work is not work:
                work = self._work
                elapsed_s = min(now_s - work.since_s, 4 * period_s)
            else:
                elapsed_s += min(now_s - before_s, 4 * period_s)
            before_s = now_s
            is_watched = work.instruction is not None or work.name
            if is_watched and elapsed_s > self._limit_s(work) and not self._waits_for_others_work(work):
                self._on_stall(self._report())
                return

    def _limit_s(self, work: _CurrentWork) -> float:
        """Return the time limit of some work: checkpoints and searches take longer than instructions."""
        is_own = work.instruction is None and work.name not in (ADMIT, EXCHANGE, BARRIER)
        return self._stall_limit_s * (LONGEST_WORK if is_own else 1)

    def _waits_for_others_work(self, work: _CurrentWork) -> bool:
        """Return whether this worker waits for all, and another one is at its own work, which is watched there."""
        if work.instruction is not None or work.name not in (EXCHANGE, BARRIER):
            return False
        now_s = time.monotonic()
        recent_s = max(_SILENT_S, _SILENT_HEARTBEATS * self._beat_s)
        recent = [json.loads(beat) for beat, heard_s in self._heard.copy().values() if now_s - heard_s < recent_s]
        return any(beat["text"] != NOTHING and not beat["waits"] for beat in recent)

    def _activity(self) -> Activity:
        instruction, name, since_s = self._work
        worker, elapsed_s = self._own // self._slices, time.monotonic() - since_s
        return describe(self._pipeline, worker, instruction, name, self.num_minibatches, elapsed_s)

    def _report(self) -> str:
        """Return the stall report. Durations end when this worker last heard from the store."""
        now_s, listened_s = time.monotonic(), self._listened_s
        overdue_s = max(_SILENT_HEARTBEATS * self._beat_s, min(_SILENT_S, self._stall_limit_s / 2))
        own = self._own // self._slices
        activities, silent_s = {own: self._activity()}, dict[int, float]()
        heard = dict(self._heard)
        for peer in range(len(self._heartbeat_keys)):
            beat, heard_s = heard.get(peer, (None, self._started_s))
            worker = peer // self._slices
            if peer == self._own:
                continue
            if beat is not None:
                said = json.loads(beat)
                del said["count"]
                found = Activity(**said | {"since_s": said["since_s"] + listened_s - heard_s})
                # A worker's activity is the one, of all its processes, that has lasted longest.
                activities[worker] = max(found, activities.get(worker, found), key=lambda each: each.since_s)
            if listened_s - heard_s > overdue_s:
                silent_s[worker] = max(listened_s - heard_s, silent_s.get(worker, 0.0))
        notes = [f"the launcher's store has not answered for {now_s - listened_s:.0f} s"]
        return stall_report(
            self._pipeline, activities, silent_s, self._stall_limit_s, segment=self.segment,
            notes=notes if now_s - listened_s > overdue_s else (),
        )  # fmt: skip
