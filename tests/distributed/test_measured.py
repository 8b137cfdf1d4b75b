"""Workers' measurements on the wall clock, and how they are merged, from events whose sums are known."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipebench.checkpoint.progress import MeterState
from pipebench.distributed.meter import MeasuredMeter, merge
from pipebench.schedule.instructions import COPIES, Instruction
from pipebench.schedule.operations import ACTIVATION, SEND, UPDATE, WAIT, Op
from pipebench.schedule.pipeline import Pipeline, chain
from pipebench.schedule.syncs import ALL_REDUCE
from pipebench.show.pictures import text_picture, timeline_figure
from pipebench.show.trace import write_trace
from pipebench.simulate.meter import RECORDED_SPANS, RunMeasurements
from pipebench.simulate.simulation import TimelineEvent
from pipebench.simulate.timeline import EVALUATE, Transfer
from pipebench.typed_json import read
from tests.instruction_text import parse

SINGLE = Pipeline((1,), (), "1f1b", flushes=False, depth=1)
STRAIGHT = Pipeline((1, 1), chain(2), "1f1b", flushes=False, depth=2)
REPLICATED = Pipeline((2, 1), chain(2), "1f1b", flushes=False, depth=2)


def play(meter: MeasuredMeter, worker: int, text: str, start_s: float = 0.0, stall_s: float = 0.0) -> float:
    """Report instructions of stage 0, each `instruction:seconds`, to a meter; return when the last ended."""
    for word in text.split():
        instruction, duration = word.split(":")
        end_s = start_s + float(duration)
        meter.event(TimelineEvent(start_s, end_s, worker, parse(f"0{instruction}")))
        meter.stalled(stall_s)
        start_s = end_s
    return start_s


def message(sender: int, receiver: int, start_s: float, end_s: float, num_bytes: int = 100) -> Transfer:
    return Transfer(ACTIVATION, "F0", (sender,), (receiver,), "server", num_bytes, start_s, end_s)


def bucket(start_s: float, end_s: float, num_bytes: int = 101, level: str = "cluster") -> Transfer:
    return Transfer(ALL_REDUCE, "R0", (0, 1), (0, 1), level, num_bytes, start_s, end_s)


@pytest.fixture
def two() -> RunMeasurements:
    """Two stages, 10 s of training: 6 s and 5 s of work; evaluation doesn't count."""
    first, second = MeasuredMeter(STRAIGHT, 0, rank=1), MeasuredMeter(STRAIGHT, 1, rank=0)
    play(first, 0, "L0:0.5 F0:1 SA0>1:0.25 RG0<1:3 B0:4 U0:1")
    play(second, 1, "RA0<0:2 F0:1 B0:3 SG0>0:0.5 U0:1 N0:0.25", stall_s=0.125)
    second.transfer(message(0, 1, 1.5, 2.0))
    first.transfer(Transfer("gradient", "B0", (1,), (0,), "server", 60, 6.0, 6.5))
    for meter, worker in ((first, 0), (second, 1)):
        meter.evaluating = True
        play(meter, worker, "F0:8", start_s=10.0)
        meter.transfer(message(0, 1, 11.0, 12.0))
    return merge([json.loads(json.dumps(meter.share())) for meter in (second, first)], STRAIGHT, 10.0)


def test_every_second_of_a_worker_is_in_its_row(two: RunMeasurements) -> None:
    row = two.workers[0]
    assert (row["worker"], row["rank"], row["stage"], row["replica"]) == (0, 1, 0, 0)
    assert (row["forward_s"], row["backward_s"], row["update_s"], row["compute_s"]) == (1, 4, 1, 6)
    assert (row["waiting_load_s"], row["waiting_gradient_s"], row["waiting_s"]) == (0.5, 3, 3.5)
    assert (row["sending_s"], row["other_s"], row["evaluation_compute_s"]) == (0.25, 0.25, 8)
    assert row["bubble_fraction"] == pytest.approx(0.4)
    assert row["compute_s"] + row["waiting_s"] + row["sending_s"] + row["other_s"] == 10.0
    other = two.workers[1]
    assert (other["waiting_activation_s"], other["waiting_norm_s"], other["stall_s"]) == (2, 0.25, 6 * 0.125)


@pytest.mark.parametrize("evaluating", [False, True])
@pytest.mark.parametrize("op", [op for op in Op if op not in COPIES], ids=lambda op: op.name)
def test_every_instruction_that_takes_time_is_in_the_timeline(op: Op, evaluating: bool) -> None:
    """Some instructions take time on the wall clock only: sharded runs failed at their end, since gathers did."""
    meter = MeasuredMeter(SINGLE, 0, rank=0)
    meter.evaluating = evaluating
    meter.event(TimelineEvent(1.0, 3.0, 0, Instruction(op, 0, 0)))
    (span,) = merge([meter.share()], SINGLE, 10.0).timeline.spans
    assert (span.worker, span.start_s, span.end_s) == (0, 1.0, 3.0)
    assert span.label


def test_copies_are_in_the_row_where_a_stage_swaps(two: RunMeasurements) -> None:
    meter = MeasuredMeter(replace(SINGLE, swaps=(0,)), 0, rank=0)
    play(meter, 0, "F0:1 SO0:0.25 SI0:0.5 B0:4 U0:1")
    found = merge([json.loads(json.dumps(meter.share()))], replace(SINGLE, swaps=(0,)), 7.0)
    (row,) = found.workers
    assert (row["swapping_s"], row["other_s"], found.metrics["swapping_s"]) == (0.75, 0.25, 0.75)
    assert "swapping_s" not in two.workers[0]
    assert "swapping_s" not in two.metrics


def test_the_run_has_the_sums_and_fractions_of_training(two: RunMeasurements) -> None:
    metrics = two.metrics
    assert (two.busy_s, two.stall_s) == (11.0, 0.75)
    assert metrics["bubble_fraction"] == pytest.approx(1 - 11 / 20)
    assert metrics["comm_stall_fraction"] == pytest.approx(0.75 / 20)
    assert (metrics["compute_s"], metrics["waiting_s"], metrics["sending_s"]) == (11, 5.75, 0.75)
    assert metrics["waiting_activation_s"] == 2
    assert (metrics["comm_time_activation_s"], metrics["comm_time_gradient_s"]) == (0.5, 0.5)
    assert (metrics["comm_time_level_server_s"], metrics["comm_transfers_activation"]) == (1.0, 1)
    assert two.num_bytes == {(ACTIVATION, "server"): 100, ("gradient", "server"): 60}


def test_the_timeline_has_all_workers_work_waits_and_sends(two: RunMeasurements) -> None:
    timeline = two.timeline
    assert timeline.worker_names == ("stage 0", "stage 1")
    spans = [(span.worker, span.kind, span.label, span.start_s) for span in timeline.spans]
    assert spans == sorted(spans, key=lambda span: (span[3], span[0]))
    assert (0, SEND, "send F0", 1.5) in spans
    assert (1, WAIT, "wait for activation", 0.0) in spans
    assert (0, UPDATE, "U0", 8.75) in spans
    assert (1, EVALUATE, "F0", 10.0) in spans
    assert len(timeline.transfers) == 4
    assert not timeline.truncated


def test_pictures_and_traces_are_made_of_the_timeline(two: RunMeasurements, tmp_path: Path) -> None:
    timeline_figure(two.timeline).write(tmp_path / "timeline.png")
    write_trace(two.timeline, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event["name"] for event in events if event.get("cat") == "send"] == ["send F0", "send B0"]
    arrows = [(event["pid"], event["ts"]) for event in events if event.get("ph") == "f"]
    assert (1, 2e6) in arrows  # the activation's arrow ends at the forward, not at a send
    assert "send" not in text_picture(two.timeline)


def test_an_all_reduce_counts_once_however_many_take_part() -> None:
    meters = [MeasuredMeter(REPLICATED, worker, rank=worker) for worker in range(3)]
    for meter, end_s in zip(meters[:2], (2.0, 4.0), strict=True):
        meter.transfer(bucket(0.0, end_s))
        meter.transfer(bucket(1.0, end_s, num_bytes=8))
    measured = merge([meter.share() for meter in meters], REPLICATED, 10.0)
    assert measured.num_bytes == {(ALL_REDUCE, "cluster"): 109}
    assert measured.metrics["comm_transfers_all_reduce"] == 2
    assert measured.metrics["comm_time_all_reduce_s"] == (2 + 4) / 2 + (1 + 3) / 2
    assert [row["all_reduce_s"] for row in measured.workers] == [2.0, 4.0, 0.0]  # overlapping buckets count once
    assert [transfer.senders for transfer in measured.timeline.transfers] == [(0,), (1,), (0,), (1,)]


def test_a_message_received_before_its_send_time_takes_no_time() -> None:
    meter = MeasuredMeter(SINGLE, 0, rank=0)
    meter.transfer(message(0, 0, 2.0, 1.9))
    measured = merge([meter.share()], SINGLE, 10.0)
    assert measured.metrics["comm_time_activation_s"] == 0
    assert [(t.start_s, t.end_s) for t in measured.timeline.transfers] == [(2.0, 2.0)]


def test_totals_go_on_after_a_checkpoint() -> None:
    before, whole = MeasuredMeter(SINGLE, 0, rank=0), MeasuredMeter(SINGLE, 0, rank=0)
    for meter in (before, whole):
        play(meter, 0, "F0:1 B0:2 U0:0.5")
        meter.transfer(bucket_of_one(0.0, 1.0))
    after = MeasuredMeter(SINGLE, 0, rank=0)
    after.restore(read(MeterState, before.state()))
    after.begin(3.5)
    for meter in (after, whole):
        play(meter, 0, "F1:1 B1:2 U1:0.5", start_s=3.5)
        meter.transfer(bucket_of_one(4.0, 5.0))
    assert after.state() == whole.state()
    assert after.busy_s == 7.0
    spans = merge([after.share()], SINGLE, 7.0).timeline.spans
    assert [(span.label, span.start_s) for span in spans] == [("F1", 0.0), ("B1", 1.0), ("U1", 3.0)]


def bucket_of_one(start_s: float, end_s: float) -> Transfer:
    return Transfer(ALL_REDUCE, "R0", (0,), (0,), "server", 8, start_s, end_s)


def test_a_long_timeline_ends_where_the_first_worker_ran_out_of_room() -> None:
    room = RECORDED_SPANS // 2
    slow, fast = MeasuredMeter(STRAIGHT, 0, rank=0), MeasuredMeter(STRAIGHT, 1, rank=1)
    for i in range(room + 10):
        play(slow, 0, f"F{i}:4", start_s=4.0 * i)
        play(fast, 1, f"F{i}:1", start_s=float(i))
        fast.transfer(message(0, 1, float(i), i + 0.5))
    timeline = merge([slow.share(), fast.share()], STRAIGHT, 1.0).timeline
    assert timeline.truncated
    assert max(span.start_s for span in timeline.spans) < room
    assert sum(span.worker == 1 for span in timeline.spans) == room
    assert sum(span.worker == 0 for span in timeline.spans) == room // 4
    assert all(transfer.start_s < room for transfer in timeline.transfers)


def test_a_worker_s_missing_measurements_are_an_error() -> None:
    share = MeasuredMeter(STRAIGHT, 1, rank=1).share()
    with pytest.raises(ValueError, match="shares of workers 1 don't make 2 workers"):
        merge([share], STRAIGHT, 1.0)


def test_an_event_costs_little() -> None:
    meter = MeasuredMeter(STRAIGHT, 0, rank=0)
    event: Any = TimelineEvent(0.0, 1.0, 0, parse("0F0"))
    begin_s = time.thread_time()  # of the processor, which others may be using
    for _ in range(20_000):
        meter.event(event)
    assert (time.thread_time() - begin_s) / 20_000 < 2e-5  # about 0.5 us on an idle machine


def untimed(worker: int) -> MeterState:
    """Return the totals of a GPU's worker from before events timed its transfers."""
    meter = MeasuredMeter(STRAIGHT, worker, rank=worker)
    play(meter, worker, "RA0<0:2 F0:1 B0:3", stall_s=0.125)
    meter.transfer(message(0, 1, 1.5, 2.0))
    meter.transfer(bucket(0.0, 2.0))
    state = {**meter.state(), "times_transfers": False}
    for totals in (state["training"], state["evaluation"]):
        del totals["overlapped_s"]
    return read(MeterState, state)


def test_a_run_of_which_gpus_timed_only_a_part_has_no_times_of_transfers() -> None:
    meters = [MeasuredMeter(STRAIGHT, worker, rank=worker, measures_overlap=True) for worker in range(2)]
    for worker, meter in enumerate(meters):
        meter.restore(untimed(worker))
        meter.transfer(message(0, 1, 3.0, 4.0), 3.5)
    measured = merge([json.loads(json.dumps(meter.share())) for meter in meters], STRAIGHT, 10.0)
    assert {name for name in measured.metrics if name.startswith("comm_")} == {
        "comm_transfers_activation", "comm_transfers_all_reduce",
    }  # fmt: skip
    assert measured.metrics["comm_transfers_activation"] == 4
    assert measured.metrics["bubble_fraction"] == pytest.approx(1 - 8 / 20)
    assert measured.metrics["waiting_activation_s"] == 4
    assert measured.num_bytes == {(ACTIVATION, "server"): 400, (ALL_REDUCE, "cluster"): 101}
    assert not {"stall_s", "all_reduce_s", "overlapped_s", "comm_stall_fraction"} & measured.workers[0].keys()
    assert "a part of the run didn't time them" in measured.notes["workers idle"]


def test_the_part_of_a_transfer_beside_computing_is_overlapped() -> None:
    meter = MeasuredMeter(REPLICATED, 0, rank=0, measures_overlap=True)
    meter.transfer(message(1, 0, 1.0, 3.0), 2.5)  # half a second is waited for
    meter.transfer(message(1, 0, 4.0, 5.0), 9.0)  # nothing is
    meter.transfer(message(1, 0, 6.0, 7.0), 5.0)  # all of it is
    meter.transfer(message(1, 0, 6.0, 7.0))  # nobody computes
    meter.transfer(bucket(10.0, 12.0), 13.0)
    meter.transfer(bucket(11.0, 14.0), 13.0)  # its first second counts already
    others = [MeasuredMeter(REPLICATED, worker, rank=worker, measures_overlap=True) for worker in (1, 2)]
    measured = merge([each.share() for each in (meter, *others)], REPLICATED, 20.0)
    assert measured.workers[0]["overlapped_s"] == 1.5 + 1.0 + 2.0 + 1.0
    assert measured.metrics["overlapped_s"] == 5.5


def test_transfers_reported_at_a_drain_are_in_a_full_timeline() -> None:
    meter = MeasuredMeter(SINGLE, 0, rank=0)
    for i in range(RECORDED_SPANS + 10):
        play(meter, 0, f"F{i}:1", start_s=float(i))
    meter.transfer(message(0, 0, 2.0, 2.5))
    meter.transfer(message(0, 0, RECORDED_SPANS + 5.0, RECORDED_SPANS + 6.0))
    timeline = merge([meter.share()], SINGLE, 1.0).timeline
    assert [transfer.start_s for transfer in timeline.transfers] == [2.0]


def test_cpu_runs_have_times_of_all_transfers(two: RunMeasurements) -> None:
    assert two.notes == {}
    assert two.workers[0]["all_reduce_s"] == 0
    assert "overlapped_s" not in two.workers[0]
