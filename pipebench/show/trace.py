"""A timeline as a trace file that opens in Perfetto (ui.perfetto.dev) and chrome://tracing.

The format is the Trace Event Format's JSON object form: complete events (`X`) with `ts` and `dur` in microseconds,
metadata events (`M`) that name processes and threads, flow events (`s`, `f`) that draw arrows, counters (`C`).
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipebench.schedule.operations import SEND, SWAP_IN, SWAP_OUT, WAIT
from pipebench.simulate.kinds import KINDS
from pipebench.simulate.memory_meter import MemoryTimeline
from pipebench.simulate.timeline import SWAP_KINDS, Span, Timeline, Transfer

Event = dict[str, Any]
_Work = dict[tuple[int, str], list[Span]]
_COMPUTE_THREAD = 1
_NETWORK_THREAD = 2  # the first of as many as the sends that overlap
_COPY_THREADS = {SWAP_OUT: 1001, SWAP_IN: 1002}
_US_PER_S = 1e6


def write_trace(timeline: Timeline, path: str | os.PathLike[str], *, memory: MemoryTimeline | None = None) -> None:
    """Write a trace.

    Every worker is a process with a thread for its work, threads for its sends, and two for copies to and from the
    host.

    Args:
        timeline: of all workers.
        path: of the JSON file.
        memory: by the same clock; adds a counter per worker, with a series per kind of memory.
    """
    events = [*trace_events(timeline), *(counter_events(timeline, memory) if memory is not None else ())]
    document = {"traceEvents": events, "displayTimeUnit": "ms"}
    Path(path).write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")


def trace_events(timeline: Timeline) -> Iterable[Event]:
    """Yield the events of the trace, metadata first."""
    sends = _lanes(timeline)
    copies = [(index, each) for index, each in enumerate(timeline.transfers) if each.kind in SWAP_KINDS]
    work: _Work = {}
    for span in timeline.spans:
        if span.kind not in (SEND, WAIT):
            work.setdefault((span.worker, span.label), []).append(span)
    for worker, name in enumerate(timeline.worker_names):
        yield _metadata("process_name", worker, 0, {"name": f"{worker}: {name}"})
        yield _metadata("process_sort_index", worker, 0, {"sort_index": worker})
        lanes = {lane for sender, lane, _, _ in sends if sender == worker}
        ways = {_COPY_THREADS[each.kind] for _, each in copies if each.senders == (worker,)}
        for thread in (_COMPUTE_THREAD, *(_NETWORK_THREAD + lane for lane in sorted(lanes)), *sorted(ways)):
            yield _metadata("thread_name", worker, thread, {"name": _thread_name(thread)})
            yield _metadata("thread_sort_index", worker, thread, {"sort_index": thread})
    for span in timeline.spans:
        args = {"minibatch": span.minibatch} if span.minibatch >= 0 else {}
        yield _complete(span.label, span.worker, _COMPUTE_THREAD, span, args)
    for sender, lane, index, transfer in sends:
        yield _send(sender, _NETWORK_THREAD + lane, transfer)
        yield from _arrows(work, sender, _NETWORK_THREAD + lane, index, transfer)
    for index, copy in copies:
        (worker,), thread = copy.senders, _COPY_THREADS[copy.kind]
        yield _send(worker, thread, copy)
        yield from _arrows(work, worker, thread, index, copy) if copy.kind == SWAP_IN else ()


def counter_events(timeline: Timeline, memory: MemoryTimeline) -> Iterable[Event]:
    """Yield a counter event for every change of a worker's memory, until the timeline ends."""
    end_s = max((span.end_s for span in timeline.spans), default=0.0)
    for worker, curve in enumerate(memory.curves):
        kinds = [kind for kind, row in zip(KINDS, curve.num_bytes, strict=True) if row.any()]
        rows = [KINDS.index(kind) for kind in kinds]
        for index, time_s in enumerate(curve.times_s):
            is_last = index + 1 == len(curve.times_s) or curve.times_s[index + 1] > time_s
            if is_last and time_s <= end_s:
                held = (int(num_bytes) for num_bytes in curve.num_bytes[rows, index])
                counter = {"name": "memory [bytes]", "cat": "memory", "ph": "C", "pid": worker}
                yield {**counter, "ts": _us(float(time_s)), "args": dict(zip(kinds, held, strict=True))}
                if curve.host_bytes.any():
                    host = {"name": "on the host [bytes]", "cat": "memory", "ph": "C", "pid": worker}
                    yield {**host, "ts": _us(float(time_s)), "args": {"swapped": int(curve.host_bytes[index])}}


def _lanes(timeline: Timeline) -> list[tuple[int, int, int, Transfer]]:
    """Return every send as (sender, lane, index, transfer).

    The sends of one lane don't overlap, as a thread of the trace can't show events that do.
    """
    free_s: dict[int, list[float]] = {}
    sends: list[tuple[int, int, int, Transfer]] = []
    sent = ((index, each) for index, each in enumerate(timeline.transfers) if each.kind not in SWAP_KINDS)
    # In order of their start, every send takes the first lane that is free: no other assignment needs fewer lanes.
    for index, transfer in sorted(sent, key=lambda pair: pair[1].start_s):
        for sender in transfer.senders:
            ends_s = free_s.setdefault(sender, [])
            lane = next((i for i, end_s in enumerate(ends_s) if end_s <= transfer.start_s), len(ends_s))
            if lane == len(ends_s):
                ends_s.append(0.0)
            ends_s[lane] = transfer.end_s
            sends.append((sender, lane, index, transfer))
    return sends


def _thread_name(thread: int) -> str:
    for kind, own in _COPY_THREADS.items():
        if thread == own:
            return f"copies, {kind}"
    if thread == _COMPUTE_THREAD:
        return "compute"
    lane = thread - _NETWORK_THREAD
    return f"network {lane + 1}" if lane else "network"


def _send(sender: int, thread: int, transfer: Transfer) -> Event:
    args = {"bytes": transfer.num_bytes, "level": transfer.level, "receivers": list(transfer.receivers)}
    return _complete(f"{transfer.kind} {transfer.label}", sender, thread, transfer, args)


def _arrows(work: _Work, sender: int, thread: int, index: int, transfer: Transfer) -> Iterable[Event]:
    """Yield the two ends of an arrow from a send to the work that needed it, if the timeline has that work."""
    if len(transfer.senders) > 1:
        return
    for receiver in transfer.receivers:
        # Labels repeat after a drain, so the first work with the label since the send is the one.
        later = (span for span in work.get((receiver, transfer.label), []) if span.start_s >= transfer.start_s)
        span = next(later, None)
        if span is not None:
            arrow = {"name": transfer.kind, "cat": "flow", "id": f"{index}.{receiver}"}
            yield {**arrow, "ph": "s", "pid": sender, "tid": thread, "ts": _us(transfer.start_s)}
            end = {"pid": receiver, "tid": _COMPUTE_THREAD, "ts": _us(span.start_s)}
            yield {**arrow, "ph": "f", "bp": "e", **end}


def _complete(name: str, worker: int, thread: int, work: Span | Transfer, args: Event) -> Event:
    start_us = _us(work.start_s)
    event = {"name": name, "cat": work.kind, "ph": "X", "pid": worker, "tid": thread, "ts": start_us}
    return {**event, "dur": round(_us(work.end_s) - start_us, 3), "args": args}


def _metadata(name: str, worker: int, thread: int, args: Event) -> Event:
    return {"name": name, "ph": "M", "pid": worker, "tid": thread, "ts": 0, "args": args}


def _us(moment_s: float) -> float:
    return round(moment_s * _US_PER_S, 3)
