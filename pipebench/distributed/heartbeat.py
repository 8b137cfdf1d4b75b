"""Heartbeats between workers of several hosts, from the time all have joined until the run has ended.

A killed process's connections close, and its peers notice at once. A host that loses power or network sends nothing,
and TCP retries for a quarter of an hour. So every worker writes a heartbeat into the store once a second.
"""

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Self

from torch.distributed import Store  # type: ignore[attr-defined] # torch lists it nowhere

from pipebench.distributed.launch_join import HostLostError, HostSlot, lost

_LOG = logging.getLogger("pipebench.distributed.heartbeat")
_BEAT_S = 1.0
_LONGEST_PERIOD_S = 0.5  # between two checks of the others' heartbeats
_JOINING_S = 2.0  # for a thread to end
_DONE = "done"  # in place of a heartbeat's number: this worker has left and sends no more
# With so many processes, heartbeats twice a second that all of them read take a tenth of a core of the store's server.
_NUM_UNTHROTTLED = 128
_LAST_BEATS = 2  # periods in which the last heartbeats of a lost worker may still arrive
_BEATS = 4  # periods in which a living worker sends as many heartbeats, or one less


def beat_period_s(shortest_s: float, num_processes: int) -> float:
    """Return the seconds between a process's heartbeats: longer with many processes, since every process reads all."""
    return shortest_s * max(1.0, num_processes / _NUM_UNTHROTTLED)


class Heartbeat:
    """One worker's heartbeat and monitor of the others' heartbeats, as a context manager.

    Args:
        store: shared by all workers, new in every attempt; cloned here, so that its connection isn't shared.
        place: this worker's place.
        limit_s: silence that ends the run, seconds.
        on_silence: called once, in its own thread, with a sentence and whether the store still answers; ends the
            process.
        beat_s: seconds between heartbeats.
    """

    def __init__(
        self,
        store: Store,
        place: HostSlot,
        *,
        limit_s: float,
        on_silence: Callable[[str, bool], None],
        beat_s: float = _BEAT_S,
    ) -> None:
        self._store = store.clone()
        # A store that vanished without closing never answers; the watching thread notices that.
        self._store.set_timeout(timedelta(days=365))
        self._place, self._limit_s, self._beat_s = place, limit_s, beat_period_s(beat_s, place.size)
        self._on_silence = on_silence
        self._keys = [f"heartbeat/{rank}" for rank in range(place.size)]
        self._heard: dict[int, bytes] = {}  # latest heartbeat, by rank
        self._num_answers = 0  # of the store
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=function, name=f"pipebench-{name}", daemon=True)
            for name, function in (("heartbeat", self._beat), ("monitor", self._listen))
        ]

    def __enter__(self) -> Self:
        """Start."""
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Mark this worker as done, so that the others don't expect its heartbeats.

        Raises:
            HostLostError: this worker lost a peer whose heartbeats have ended; names it.
        """
        gone = self._gone() if error is not None and lost(error) else ""
        self._closed.set()
        for thread in self._threads:
            thread.join(_JOINING_S)
        if gone:
            raise HostLostError(f"{gone}: {error}") from error

    def _gone(self) -> str:
        """Wait for a few heartbeats; return which workers send none or what the store does, "" if all do."""
        self._closed.wait(_LAST_BEATS * self._beat_s)
        num_answers, before = self._num_answers, dict(self._heard)
        self._closed.wait(_BEATS * self._beat_s)
        if self._closed.is_set():
            return f"{store_text(self._place)} has closed the connection"
        if self._num_answers < num_answers + _BEATS - 1:
            return f"{store_text(self._place)} doesn't answer"
        silent = [rank for rank, beat in self._heard.items() if before.get(rank) == beat and not _is_done(beat)]
        return f"{_named(silent, self._heard)} {'is' if len(silent) == 1 else 'are'} gone" if silent else ""

    def _beat(self) -> None:
        """Send heartbeats and collect the others'."""
        own, count = self._keys[self._place.rank], 0
        try:
            while not self._closed.wait(self._beat_s if count else 0.0):
                count += 1
                self._store.set(own, json.dumps([count, socket.gethostname()]))
                known = [rank for rank, key in enumerate(self._keys) if rank in self._heard or self._store.check([key])]
                beats = self._store.multi_get([self._keys[rank] for rank in known])
                self._heard = dict(zip(known, beats, strict=True))
                self._num_answers += 1
            self._store.set(own, json.dumps([_DONE, socket.gethostname()]))
        except RuntimeError as error:  # the training thread sees the broken connection, too
            _LOG.debug("the store is gone: %s", error)
            self._closed.set()

    def _listen(self) -> None:
        """Check the collected heartbeats, without time in which this process was suspended."""
        period_s = min(_LONGEST_PERIOD_S, self._limit_s / 10)
        monitor, before_s = SilenceMonitor(self._place, self._limit_s), time.monotonic()
        while not self._closed.wait(period_s):
            now_s = time.monotonic()
            sentence = monitor.listen(min(now_s - before_s, 4 * period_s), self._num_answers, self._heard)
            before_s = now_s
            if sentence:
                self._on_silence(sentence, monitor.store_s < self._limit_s)
                return


class SilenceMonitor:
    """Measures the silence of workers and of the store, and reports one that lasts for `limit_s` seconds."""

    def __init__(self, place: HostSlot, limit_s: float) -> None:
        self._place, self._limit_s = place, limit_s
        self._num_answers = -1
        self._latest: dict[int, bytes | None] = {}  # heartbeat, by rank
        # Seconds since the latest heartbeat, of every other rank.
        self._silent_s = dict.fromkeys((rank for rank in range(place.size) if rank != place.rank), 0.0)
        self.store_s = 0.0  # since the store answered

    def listen(self, passed_s: float, num_answers: int, heard: Mapping[int, bytes]) -> str:
        """Note the latest heartbeats; return what to report, "" for nothing.

        Args:
            passed_s: seconds since the last call.
            num_answers: answers of the store so far.
            heard: the latest heartbeat, by rank.
        """
        self.store_s = 0.0 if num_answers != self._num_answers else self.store_s + passed_s
        self._num_answers = num_answers
        for rank in self._silent_s:
            beat = heard.get(rank)
            lives = beat != self._latest.get(rank) or _is_done(beat)
            self._silent_s[rank] = 0.0 if lives else self._silent_s[rank] + passed_s
            self._latest[rank] = beat
        limit = f"{self._limit_s:g} s (engine.silence_limit_s)"
        if self.store_s >= self._limit_s:
            return (
                f"{store_text(self._place)} has not answered for {limit}: that host, or the network between it "
                "and this one, hangs or is gone"
            )
        # While the store is silent no heartbeat can arrive, which is no evidence against the workers.
        silent = [rank for rank, silent_s in self._silent_s.items() if silent_s >= self._limit_s > 2 * self.store_s]
        what = "has not been heard of" if len(silent) == 1 else "have not been heard of"
        why = "the host, its network or the process hangs or is gone"
        return f"{_named(silent, heard)} {what} for {limit}: {why}" if silent else ""


def store_text(place: HostSlot) -> str:
    """Return the store's name, to begin a sentence."""
    return f"the store at {place.address}:{place.port}, by which all hosts find each other,"


def _named(ranks: Sequence[int], heard: Mapping[int, bytes]) -> str:
    hosts = [json.loads(heard[rank])[1] if rank in heard else "a host never heard of" for rank in ranks]
    return ", ".join(f"rank {rank} on {host}" for rank, host in zip(ranks, hosts, strict=True))


def _is_done(beat: bytes | None) -> bool:
    return beat is not None and json.loads(beat)[0] == _DONE
