"""Stops that all workers agree on, wherever each of them is."""

import math
import queue
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore  # type: ignore[attr-defined] # torch lists them nowhere

from pipebench.distributed.control import STOP_KEY, Control
from pipebench.engine.admission import AdmissionControl, Position, admitted_program, evaluation_program
from pipebench.schedule.instructions import Instruction
from pipebench.schedule.operations import Op
from pipebench.schedule.pipeline import Edge, Pipeline, chain, noam
from pipebench.schedule.programs import forward_programs, programs
from tests.distributed.waiting import straight
from tests.patience import PATIENCE_S, wait_for

_RECEIVE_TO_SEND = Op.SEND_ACTIVATION - Op.RECEIVE_ACTIVATION


@st.composite
def pipelines(draw: st.DrawFn, most_stages: int = 4, most_replicas: int = 4) -> Pipeline:
    replicas = tuple(draw(st.lists(st.integers(1, most_replicas), min_size=1, max_size=most_stages)))
    n = len(replicas)
    skips = [Edge(a, b, draw(st.booleans())) for a in range(n) for b in range(a + 2, n) if draw(st.booleans())]
    flushes = draw(st.booleans())
    if n == 1 and not flushes and draw(st.booleans()):
        return Pipeline(replicas, (), "1f1b", False, 1, weights="newest-pulled", sync="asynchronous")
    return Pipeline(
        replicas,
        tuple(sorted([*chain(n), *skips], key=lambda e: (e.source, e.target))),
        draw(st.sampled_from(["1f1b", "all-forwards"])) if flushes else "1f1b",
        flushes,
        draw(st.one_of(st.just(noam(replicas)), st.integers(1, 4))),
        draw(st.integers(1, 3)) if flushes else 1,
        draw(st.integers(1, 2)) if flushes else 1,
        loads=(0, n - 1) if n > 1 else (0,),
        shares_norm=flushes and draw(st.booleans()),
    )


class _Agreed(AdmissionControl):
    """A stop that is agreed on from the beginning."""

    def __init__(self, limit: int) -> None:
        super().__init__(1)
        self.begin(0, limit)
        self.asked: list[int] = []

    def admit(self, minibatch: int) -> bool:
        self.asked.append(minibatch)
        return super().admit(minibatch)


@settings(deadline=None, max_examples=150)
@given(pipelines(), st.integers(1, 24), st.data())
def test_a_program_switches_to_the_shorter_one(pipeline: Pipeline, num_minibatches: int, data: st.DataObject) -> None:
    size = pipeline.period
    cuts = [*range(0, num_minibatches, size), num_minibatches]
    cut = data.draw(st.sampled_from(cuts))
    for worker in range(pipeline.num_workers):
        agreed = _Agreed(cut)
        steps = list(admitted_program(pipeline, worker, num_minibatches, agreed))
        assert steps == list(programs(pipeline, cut)[worker])
        # Every worker asks for the last grain, or for the first one it is refused.
        assert max(agreed.asked) // size == (cut // size if cut < num_minibatches else (num_minibatches - 1) // size)


@settings(deadline=None, max_examples=100)
@given(pipelines(), st.integers(1, 24))
def test_instructions_before_the_stop_are_a_prefix_of_the_shorter_program(pipeline: Pipeline, count: int) -> None:
    """Whatever the cut, the instructions before the first one asked for beyond it are in both lists."""
    for cut in range(0, count, pipeline.period):
        for worker, program in enumerate(programs(pipeline, cut)):
            shorter, ran = list(program), 0
            agreed = _Agreed(cut)
            for _ in admitted_program(pipeline, worker, count, agreed):
                if any(minibatch >= cut for minibatch in agreed.asked):
                    break
                ran += 1
            assert list(programs(pipeline, count)[worker])[:ran] == shorter[:ran]


def test_admission_control_admits_only_begun_minibatches_until_the_stop_is_known() -> None:
    admission = AdmissionControl(2)
    admission.begin(3, 9)
    assert admission.admit(2)
    assert admission.stop_admitting() == Position(3, 4)
    assert admission.admit(3)
    assert admission.stop_admitting() == Position(3, 4)
    assert [admission.is_undecided(minibatch) for minibatch in (3, 4, 8)] == [False, True, True]
    admission.settle(Position(3, 6))
    assert admission.limit == 6
    assert [admission.admit(minibatch) for minibatch in (4, 5, 6)] == [True, True, False]


def test_the_stop_is_in_the_segment_of_the_furthest_worker() -> None:
    for cut, limits in ((Position(1, 5), (5, 0)), (Position(2, 2), (5, 2)), (Position(2, 0), (5, 0))):
        admission = AdmissionControl(2)
        admission.begin(1, 5)
        assert admission.admit(4)
        assert admission.stop_admitting() == Position(1, 5)
        admission.settle(cut)
        assert admission.limit == limits[0]
        admission.begin(2, 5)
        assert admission.limit == limits[1]
        assert admission.admit(0) == (limits[1] > 0)
        admission.begin(3, 5)
        assert not admission.admit(0)


def test_a_closed_admission_control_delays_the_next_segment() -> None:
    admission = AdmissionControl(1)
    assert admission.stop_admitting() == Position(-1, 0)
    admission.begin(0, 4)
    assert admission.is_undecided(0)
    admission.settle(Position(0, 2))
    assert admission.admit(1)
    assert not admission.admit(2)


class _Job:
    """Workers as threads that execute programs, with queues for messages and counted meetings for the rest."""

    def __init__(self, pipeline: Pipeline, lengths: list[int], seed: int, pause_s: float, multiple_of: int = 1) -> None:
        self.pipeline, self.lengths, self.seed, self.pause_s = pipeline, lengths, seed, pause_s
        self.mail: dict[tuple[int, ...], queue.Queue[None]] = defaultdict(queue.Queue)
        self.lock = threading.Lock()
        self.meetings: dict[tuple[int, ...], threading.Barrier] = {}
        self.ran: list[list[list[Instruction]]] = [[] for _ in range(pipeline.num_workers)]
        self.limits: list[list[int]] = [[] for _ in range(pipeline.num_workers)]
        self.reasons: list[set[str | None]] = [set() for _ in lengths]
        store = HashStore()
        self.controls = [
            Control(
                store, worker, pipeline.num_workers, pipeline,
                stall_limit_s=PATIENCE_S, on_stall=self.fail, heartbeat_s=0.01, multiple_of=multiple_of,
            )
            for worker in range(pipeline.num_workers)
        ]  # fmt: skip
        self.failures: list[str] = []

    def fail(self, report: str) -> None:
        self.failures.append(report)

    def box(self, *key: int) -> "queue.Queue[None]":
        with self.lock:
            return self.mail[key]

    def meet(self, parties: int, *key: int) -> None:
        with self.lock:
            barrier = self.meetings.setdefault(key, threading.Barrier(parties))
        barrier.wait(PATIENCE_S)

    def execute(self, worker: int, segment: int, instruction: Instruction) -> None:
        op, stage, number, peer, *_ = instruction
        if op in (Op.SEND_ACTIVATION, Op.SEND_GRADIENT):
            self.box(segment, op, number, stage, peer).put(None)
        elif op in (Op.RECEIVE_ACTIVATION, Op.RECEIVE_GRADIENT):
            self.box(segment, op + _RECEIVE_TO_SEND, number, peer, stage).get(timeout=PATIENCE_S)
        elif op == Op.WAIT_ALL_REDUCE:
            self.meet(self.pipeline.replicas[stage], segment, stage, number)
        elif op == Op.WAIT_NORM:
            self.meet(self.pipeline.num_workers, segment, -1, number)

    def work(self, worker: int) -> None:
        control, chance = self.controls[worker], random.Random(self.seed + worker)
        for segment, length in enumerate(self.lengths):
            control.begin(segment, length)
            self.ran[worker].append([])
            for instruction in self.program(worker, length):
                control.at(instruction)
                if chance.random() < 0.3:
                    time.sleep(self.pause_s * chance.random())
                self.execute(worker, segment, instruction)
                self.ran[worker][-1].append(instruction)
            control.at(None, "exchange")
            self.limits[worker].append(control.limit)
            self.reasons[segment].add(control.stop_reason)
            self.meet(self.pipeline.num_workers, segment, -2)

    def program(self, worker: int, length: int) -> Iterator[Instruction]:
        """Return a worker's program of a segment."""
        return admitted_program(self.pipeline, worker, length, self.controls[worker])

    def run(self, meanwhile: Callable[[], None]) -> None:
        threads = [threading.Thread(target=self.work, args=(w,), daemon=True) for w in range(len(self.controls))]
        for control in self.controls:
            control.start()
        for thread in threads:
            thread.start()
        meanwhile()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert not any(thread.is_alive() for thread in threads), "a worker hangs"
        for control in self.controls:
            control.close()
        assert self.failures == []


@settings(deadline=None, max_examples=12)
@given(
    pipelines(most_stages=3, most_replicas=3),
    st.lists(st.integers(1, 20), min_size=1, max_size=3),
    st.integers(0, 10**6),
    st.lists(st.tuples(st.floats(0, 0.15), st.integers(0, 2)), min_size=1, max_size=3),
    st.sampled_from([1, 6]),
)
def test_all_workers_stop_at_the_same_minibatch(
    pipeline: Pipeline, lengths: list[int], seed: int, requests: list[tuple[float, int]], multiple_of: int
) -> None:
    job = _Job(pipeline, lengths, seed, 0.01, multiple_of)

    def ask() -> None:
        for number, (pause_s, asker) in enumerate(requests):
            time.sleep(pause_s)
            job.controls[asker % pipeline.num_workers].request_stop(f"reason {number}")

    job.run(ask)
    for segment, length in enumerate(lengths):
        limits = {limits[segment] for limits in job.limits}
        assert len(limits) == 1
        limit = limits.pop()
        assert limit == length or limit % math.lcm(pipeline.period, multiple_of) == 0
        for worker, program in enumerate(programs(pipeline, limit)):
            assert job.ran[worker][segment] == list(program)
    lengths_run = job.limits[0]
    cuts = [segment for segment, length in enumerate(lengths) if lengths_run[segment] < length]
    assert not cuts or all(limit == 0 for limit in lengths_run[cuts[0] + 1 :])  # once stopped, stopped
    assert all(len(reasons - {None}) <= 1 for reasons in job.reasons)


class _Evaluating(_Job):
    """A job whose segments are evaluations."""

    def program(self, worker: int, length: int) -> Iterator[Instruction]:
        """Return a worker's program of a segment."""
        listed = forward_programs(self.pipeline, length)[worker]
        return evaluation_program(self.pipeline, listed, length, self.controls[worker])


@settings(deadline=None, max_examples=12)
@given(
    pipelines(most_stages=3, most_replicas=3),
    st.lists(st.integers(1, 40), min_size=1, max_size=3),
    st.integers(0, 10**6),
    st.floats(0, 0.15),
    st.integers(0, 2),
)
def test_all_workers_leave_out_the_same_minibatches_of_an_evaluation(
    pipeline: Pipeline, lengths: list[int], seed: int, pause_s: float, asker: int
) -> None:
    pipeline = replace(pipeline, microbatches=1)
    job = _Evaluating(pipeline, lengths, seed, 0.01)

    def ask() -> None:
        time.sleep(pause_s)
        job.controls[asker % pipeline.num_workers].request_stop("enough")

    job.run(ask)
    for segment, length in enumerate(lengths):
        (limit,) = {limits[segment] for limits in job.limits}
        for worker, program in enumerate(forward_programs(pipeline, length)):
            assert job.ran[worker][segment] == [it for it in program if pipeline.minibatch(it.number)[0] < limit]


def test_a_stop_shortens_a_long_segment_and_all_workers_know_the_reason() -> None:
    job = _Job(Pipeline((2, 1), chain(2), "1f1b", False, 2), [100_000, 10], 0, pause_s=0.001)

    def ask() -> None:
        time.sleep(0.1)
        job.controls[2].request_stop("diverged: the loss is nan")
        job.controls[2].request_stop("too late")
        wait_for(lambda: job.controls[0].stop_reason)
        job.controls[0].request_stop("much too late")

    job.run(ask)
    assert 0 < job.limits[0][0] < 100_000
    assert job.limits == [[job.limits[0][0], 0]] * 3
    assert job.reasons == [{"diverged: the loss is nan"}] * 2


@pytest.mark.parametrize(
    ("pipeline", "multiple_of", "limit"),
    [
        (straight(), 1, 8),
        (straight(), 6, 12),
        (Pipeline((4, 1), chain(2), "1f1b", False, 1), 1, 8),
        (Pipeline((4, 1), chain(2), "1f1b", False, 1), 6, 12),
        (Pipeline((4, 1), chain(2), "1f1b", False, 1), 9, 36),
        (straight(), 60, 50),
    ],
)
def test_a_segment_ends_early_at_a_multiple(pipeline: Pipeline, multiple_of: int, limit: int) -> None:
    store, workers = HashStore(), range(pipeline.num_workers)
    controls = [
        Control(
            store, w, len(workers), pipeline, stall_limit_s=PATIENCE_S, multiple_of=multiple_of, heartbeat_s=0.01
        )
        for w in workers
    ]  # fmt: skip
    for control in controls:
        control.begin(0, 50)
        assert control.admit(0)
        control.start()
    assert controls[0].admit(7)
    controls[-1].request_stop("interrupted")
    wait_for(lambda: all(control.stop_reason for control in controls))
    assert [control.limit for control in controls] == [limit] * len(workers)
    for control in controls:
        assert control.admit(limit - 1)
        assert not control.admit(limit)
        control.close()


def test_a_stop_from_the_launcher_before_the_first_segment_leaves_nothing_to_train() -> None:
    store = HashStore()
    store.set(STOP_KEY, "interrupted")
    controls = [Control(store, w, 2, straight(), stall_limit_s=60, heartbeat_s=0.01) for w in range(2)]
    for control in controls:
        control.start()
    wait_for(lambda: all(control.stop_reason for control in controls))
    for control in controls:
        control.begin(0, 8)
        assert not control.admit(0)
        assert (control.limit, control.stop_reason) == (0, "interrupted")
        control.close()
