"""The trace file, against the fields that the Trace Event Format documents."""

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipebench.schedule.operations import ACTIVATION, SWAP_IN, SWAP_OUT
from pipebench.schedule.syncs import ALL_REDUCE
from pipebench.show.trace import write_trace
from pipebench.simulate.kinds import ACTIVATIONS, KINDS, WEIGHTS
from pipebench.simulate.memory_meter import Curve, MemoryTimeline
from pipebench.simulate.timeline import Span, Timeline, Transfer

TIMELINE = Timeline(
    worker_names=("stage 0", "stage 1"),
    spans=(
        Span(0, "forward", "F0", 0.0, 0.001, 0),
        Span(1, "wait", "wait for activation", 0.0, 0.0015, 0),
        Span(1, "forward", "F0", 0.0015, 0.0025, 0),
        Span(0, "update", "U0", 0.0025, 0.003, -1),
        Span(1, "forward", "F0", 0.01, 0.011, 0),
    ),
    transfers=(
        Transfer(ACTIVATION, "F0", (0,), (1,), "server", 4096, 0.001, 0.0015),
        Transfer(ALL_REDUCE, "R0", (0, 1), (0, 1), "cluster", 100, 0.0012, 0.002),
        Transfer(ACTIVATION, "F0", (0,), (1,), "server", 4096, 0.009, 0.01),
        Transfer(ACTIVATION, "F9", (0,), (1,), "server", 4096, 0.012, 0.013),
    ),
    truncated=True,
)


@pytest.fixture
def events(tmp_path: Path) -> list[dict[str, Any]]:
    write_trace(TIMELINE, tmp_path / "trace.json")
    document = json.loads((tmp_path / "trace.json").read_text())
    assert document["displayTimeUnit"] in ("ms", "ns")
    return document["traceEvents"]


def test_every_event_has_the_documented_fields(events: list[dict[str, Any]]) -> None:
    required = {"X": {"cat", "ts", "dur"}, "M": {"args"}, "s": {"cat", "id", "ts"}, "f": {"cat", "id", "ts", "bp"}}
    for event in events:
        assert {"name", "ph", "pid", "tid"} | required[event["ph"]] <= event.keys()
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)


def test_a_process_per_worker_with_named_threads(events: list[dict[str, Any]]) -> None:
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"].endswith("_name")}
    assert names["process_name", 0, 0] == "0: stage 0"
    assert names["process_name", 1, 0] == "1: stage 1"
    assert names["thread_name", 0, 1] == names["thread_name", 1, 1] == "compute"
    assert names["thread_name", 0, 2] == names["thread_name", 1, 2] == "network"
    assert names["thread_name", 0, 3] == "network 2"


def test_spans_are_in_microseconds(events: list[dict[str, Any]]) -> None:
    compute = [(e["pid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == 1]
    assert compute == [
        (0, "F0", 0.0, 1000.0),
        (1, "wait for activation", 0.0, 1500.0),
        (1, "F0", 1500.0, 1000.0),
        (0, "U0", 2500.0, 500.0),
        (1, "F0", 10000.0, 1000.0),
    ]


def test_memory_is_a_counter_per_worker_with_a_series_per_kind(tmp_path: Path) -> None:
    """Of changes at one moment the last counts; kinds that a worker never keeps and later moments are left out."""
    num_bytes = np.zeros((len(KINDS), 4), dtype=np.int64)
    num_bytes[KINDS.index(WEIGHTS)] = 100
    num_bytes[KINDS.index(ACTIVATIONS)] = [0, 5, 7, 9]
    curves = tuple(Curve(np.array([0.0, 0.001, 0.001, late_s]), num_bytes, num_bytes[0] * 0) for late_s in (0.002, 1.0))
    write_trace(TIMELINE, tmp_path / "trace.json", memory=MemoryTimeline(("a", "b"), curves, (), (), None, None, 1.0))
    found = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    counters = [event for event in found if event["ph"] == "C"]
    assert {event["name"] for event in counters} == {"memory [bytes]"}
    values = [(event["pid"], event["ts"], event["args"]) for event in counters]
    assert values[:3] == [
        (0, 0.0, {"weights": 100, "activations": 0}),
        (0, 1000.0, {"weights": 100, "activations": 7}),
        (0, 2000.0, {"weights": 100, "activations": 9}),
    ]
    assert [(worker, time_us) for worker, time_us, _ in values[3:]] == [(1, 0.0), (1, 1000.0)]


def test_slices_of_a_thread_never_overlap(events: list[dict[str, Any]]) -> None:
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in threads.values():
        slices.sort()
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(slices))


def test_sends_carry_bytes_and_level(events: list[dict[str, Any]]) -> None:
    sends = [event for event in events if event["ph"] == "X" and event["tid"] > 1]
    assert sends[0]["args"] == {"bytes": 4096, "level": "server", "receivers": [1]}
    assert len([event for event in sends if event["cat"] == ALL_REDUCE]) == 2


def test_arrows_go_from_a_send_to_the_work_that_needed_it(events: list[dict[str, Any]]) -> None:
    starts = [(e["pid"], e["tid"], e["ts"]) for e in events if e["ph"] == "s"]
    ends = [(e["pid"], e["tid"], e["ts"]) for e in events if e["ph"] == "f"]
    assert starts == [(0, 2, 1000.0), (0, 2, 9000.0)]
    assert ends == [(1, 1, 1500.0), (1, 1, 10000.0)]
    ids = [event["id"] for event in events if event["ph"] == "s"]
    assert len(set(ids)) == 2
    assert ids == [event["id"] for event in events if event["ph"] == "f"]


def test_copies_have_separate_threads_and_arrows_to_their_backwards(tmp_path: Path) -> None:
    spans = (Span(0, "forward", "F0", 0.0, 0.001, 0), Span(0, "backward", "B0", 0.004, 0.005, 0))
    transfers = (
        Transfer(SWAP_OUT, "0", (0,), (0,), "pcie", 4096, 0.001, 0.002),
        Transfer(ACTIVATION, "F0", (0,), (1,), "server", 4096, 0.001, 0.002),
        Transfer(SWAP_IN, "B0", (0,), (0,), "pcie", 4096, 0.003, 0.004),
    )
    nothing = np.zeros((len(KINDS), 2), dtype=np.int64)
    curves = tuple(Curve(np.array([0.001, 0.004]), nothing, np.array(host)) for host in ([4096, 0], [0, 0]))
    memory = MemoryTimeline(("a", "b"), curves, (), (4096, 0), None, None, 1.0)
    write_trace(Timeline(("a", "b"), spans, transfers, truncated=False), tmp_path / "trace.json", memory=memory)
    found = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    threads = {e["args"]["name"]: e["tid"] for e in found if e["name"] == "thread_name" and e["pid"] == 0}
    assert {*threads} == {"compute", "network", "copies, swap-out", "copies, swap-in"}
    shown = {e["name"]: (e["tid"], e["ts"], e["dur"]) for e in found if e["ph"] == "X"}
    assert shown["swap-out 0"] == (threads["copies, swap-out"], 1000.0, 1000.0)
    assert shown["swap-in B0"] == (threads["copies, swap-in"], 3000.0, 1000.0)
    (start,), (end,) = ([e for e in found if e["ph"] == which and e["name"] == SWAP_IN] for which in "sf")
    assert (start["tid"], end["tid"], end["ts"]) == (threads["copies, swap-in"], threads["compute"], 4000.0)
    counters = [(e["pid"], e["ts"], e["args"]) for e in found if e["name"] == "on the host [bytes]"]
    assert counters == [(0, 1000.0, {"swapped": 4096}), (0, 4000.0, {"swapped": 0})]
