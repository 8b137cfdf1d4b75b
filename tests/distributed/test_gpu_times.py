"""Times of transfers that the engine measures equal those of emulated GPUs, see `gpus`.

The engine, its transport, its collectives and its meter are the real ones.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch

from pipebench.distributed import channel, collectives, message, reducer, shard_exchange, transport
from pipebench.distributed import engine as distributed
from pipebench.distributed.engine import DistributedEngine
from pipebench.distributed.instruction_times import _READ_EVERY, DeviceTimer, Moment, Pace
from pipebench.engine.worker import Worker
from pipebench.schedule.instructions import Instruction
from pipebench.schedule.operations import Op
from pipebench.schedule.orders import ALL_FORWARDS
from pipebench.simulate import costs
from pipebench.simulate.meter import WORKERS_IDLE, RunMeasurements
from tests.distributed.cases import Case, small_setup
from tests.distributed.gpus import Event, Gpus, Stream, world_of
from tests.unwatched import unwatched

SHARDED = {"shard": "parameters", "sums": "ordered"}
SECONDS = {Op.FORWARD: 10.0, Op.BACKWARD: 20.0, Op.BACKWARD_INPUT: 10.0, Op.BACKWARD_WEIGHT: 10.0, Op.UPDATE: 5.0}

Interval = tuple[float, float]


def covered_s(intervals: Iterable[Interval], without: Iterable[Interval] = ()) -> float:
    """Return the seconds of at least one of the intervals and of none of the others."""
    signed = [(end_s, change) for each in intervals for end_s, change in zip(each, (1, -1), strict=True)]
    signed += [(end_s, change) for each in without for end_s, change in zip(each, (-1000, 1000), strict=True)]
    total_s = level = 0.0
    before_s = 0.0
    for at_s, change in sorted(signed):
        total_s += (at_s - before_s) * (level > 0)
        level, before_s = level + change, at_s
    return total_s


class Truth:
    """The times of a rank's GPU."""

    def __init__(self, gpus: Gpus, rank: int) -> None:
        own = gpus.ranks[rank]
        self.computed_s = sum(own.computed_s.values())
        # A drain waits for what was sent.
        waiting = [wait for wait in own.waits if wait.operation.kind == "sum" or rank not in wait.operation.given]
        self.waited_s = sum(wait.end_s - wait.since_s for wait in waiting)
        sums = [each for each in gpus.operations_of(rank) if each.kind == "sum"]
        messages = [each for each in gpus.operations_of(rank) if each.kind == "message"]
        comes = [each for each in messages if rank not in each.given]
        waits = {id(wait.operation): (wait.since_s, wait.end_s) for wait in waiting}
        ways = [((next(iter(each.ready[k].s for k in each.given))), each.end_s) for each in comes]
        within = [covered_s([way], [waits[id(each)]]) for way, each in zip(ways, comes, strict=True)]
        self.messages_s = sum(end_s - start_s for start_s, end_s in ways)
        summing = [(each.ready[rank].s, each.end_s) for each in sums]
        waited = [(wait.since_s, wait.end_s) for wait in waiting if wait.operation.kind == "sum"]
        self.summed_s = covered_s(summing)
        self.overlapped_s = sum(within) + covered_s(summing, waited)
        self.stall_s = self.messages_s - sum(within) + sum(end_s - since_s for since_s, end_s in waited)


@pytest.fixture(autouse=True)
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace torch's GPUs by emulated ones, on which instructions take the given times."""
    for module in (channel, transport, reducer, collectives, shard_exchange):
        monkeypatch.setattr(module, "dist", _Present())
    monkeypatch.setattr(distributed, "time", SimpleNamespace(perf_counter=lambda: Gpus.present.here.host_s))
    monkeypatch.setattr(distributed, "runs_ahead", lambda device: True)
    for module in (transport, collectives):
        monkeypatch.setattr(module, "leave", lambda groups: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: Gpus.present.stream(stream))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Gpus.present.here.stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: Gpus.present.synchronize())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    execute = Worker.execute

    def timed(worker: Worker, it: Instruction, *others: Any) -> Any:
        if worker.is_training and it.op in SECONDS:
            gpus = Gpus.present
            gpus.compute(it.op.name, gpus.takes_s.get((it.op, it.stage), SECONDS[it.op]))
        return execute(worker, it, *others)

    monkeypatch.setattr(Worker, "execute", timed)


class _Present:
    """`torch.distributed` of the present GPUs."""

    def __getattr__(self, name: str) -> Any:
        return getattr(Gpus.present, name)


@dataclass
class Run:
    """The times of the GPUs in training, by worker, and the engine's measurements."""

    truths: list[Truth]
    found: RunMeasurements
    gpus: Gpus
    training_s: float


def run(
    case: Case,
    minibatches: int,
    takes_s: Mapping[tuple[Op, int], float] = MappingProxyType({}),
    *,
    by_nccl: bool = True,
    evaluates: bool = False,
    **speeds: float,
) -> Run:
    """Train a case on emulated GPUs; `takes_s` overrides the seconds of a stage's instruction."""
    size = sum(case.replicas)
    gpus, setups = Gpus(size, **speeds), [small_setup(case) for _ in range(size)]
    gpus.takes_s = takes_s
    truths: dict[int, Truth] = {}
    found: dict[int, tuple[RunMeasurements, float]] = {}
    failures: list[BaseException] = []

    def work(rank: int) -> None:
        gpus.enter(rank)
        try:
            world = world_of(rank, size, direct=by_nccl)
            engine = DistributedEngine(setups[rank], world, unwatched(setups[rank]))
            gpus.synchronize()
            engine.start_clock()
            gpus.begin()
            engine.train(0, minibatches)
            training_s = engine.clock_s
            truths[engine.worker.index] = Truth(gpus, rank)
            if evaluates:
                engine.evaluate()
            found[rank] = engine.measured(training_s), training_s
        except BaseException as error:  # the other hosts end, too
            failures.append(error)
            gpus.give_up()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return Run([truths[worker] for worker in range(size)], found[0][0], gpus, found[0][1])


def check(done: Run, tolerance: float = 1e-6) -> None:
    """Compare measured with true times; events have single precision."""

    def same(found: float, expected: float) -> None:
        assert found == pytest.approx(expected, rel=tolerance, abs=100 * tolerance)

    for row, truth in zip(done.found.workers, done.truths, strict=True):
        same(row["compute_s"], truth.computed_s)
        same(row["waiting_s"], truth.waited_s)
        same(row["stall_s"], truth.stall_s)
        same(row["overlapped_s"], truth.overlapped_s)
        same(row["all_reduce_s"], truth.summed_s)
        # Computing, exposed transfers, waits for unfinished work, and idling at the ends are all there is.
        waiting_for_work_s, idle_s = row["waiting_s"] - row["stall_s"], row["sending_s"] + row["other_s"]
        same(row["compute_s"] + row["stall_s"] + waiting_for_work_s + idle_s, done.training_s)
        same(idle_s, done.training_s - truth.computed_s - truth.waited_s)
    metrics, whole_s = done.found.metrics, len(done.truths) * done.training_s
    messages_s = sum(metrics.get(f"comm_time_{kind}_s", 0.0) for kind in ("activation", "gradient"))
    same(messages_s, sum(truth.messages_s for truth in done.truths))
    same(metrics["comm_stall_fraction"], sum(truth.stall_s for truth in done.truths) / whole_s)
    same(metrics["overlapped_s"], sum(truth.overlapped_s for truth in done.truths))
    assert WORKERS_IDLE not in done.found.notes


STRAIGHT = Case("mlp", (4,), (1, 1), {"weights": "one"})
TWO_UNITS = Case("mlp", (4,), (1, 1), {"weights": "one", "order": ALL_FORWARDS, "microbatches": 2})


def test_one_minibatch_by_hand() -> None:
    """Seconds: forward 10, message 4, forward 10, backward 20, message 4, backward 20, update 5."""
    done = run(STRAIGHT, 1, message_s=4.0)
    first, second = done.found.workers
    assert done.training_s == pytest.approx(73)
    assert (second["waiting_activation_s"], second["stall_s"]) == pytest.approx((14, 4))  # 10 for the first forward
    assert (first["waiting_gradient_s"], first["stall_s"]) == pytest.approx((38, 4))
    assert (first["compute_s"], first["other_s"], second["other_s"]) == pytest.approx((35, 0, 24))
    forth, back = done.found.timeline.transfers
    assert (forth.label, back.label) == ("F0", "B0")
    assert (forth.start_s, forth.end_s, back.start_s, back.end_s) == pytest.approx((10, 14, 44, 48))
    check(done)


@pytest.mark.parametrize(
    ("message_s", "forward_s", "waiting_s", "stall_s", "overlapped_s"),
    [
        pytest.param(4.0, 16.0, 14.0, 4.0, 4.0, id="the second is hidden"),
        pytest.param(4.0, 8.0, 16.0, 6.0, 2.0, id="half hidden"),
        pytest.param(4.0, 6.0, 18.0, 8.0, 0.0, id="exposed"),
        pytest.param(4.0, 2.0, 22.0, 8.0, 0.0, id="exposed, and late"),
        pytest.param(14.0, 8.0, 30.0, 20.0, 12.0, id="behind the first"),
    ],
)
@pytest.mark.parametrize("skew_s", [0.0, 3.0])
def test_two_messages_by_hand(  # a table
    message_s: float, forward_s: float, waiting_s: float, stall_s: float, overlapped_s: float, skew_s: float
) -> None:
    """The first leaves after 10 s and is waited for, the second after 20 s.

    The receiver's clock may have started late, by 3 s: what a GPU waits and how long a message is on its way are each
    of one clock.
    """
    takes_s = {(Op.FORWARD, 1): forward_s}
    done = run(TWO_UNITS, 1, takes_s, message_s=message_s, skew_s=skew_s)
    row = done.found.workers[1]
    found = row["waiting_activation_s"], row["stall_s"], row["overlapped_s"]
    assert found == pytest.approx((waiting_s - skew_s, stall_s, overlapped_s))
    if not skew_s:
        check(done)


@pytest.mark.parametrize(("forward_s", "waiting_s", "stall_s"), [(16.0, 14.0, 4.0), (8.0, 16.0, 6.0), (2.0, 22.0, 8.0)])
def test_two_messages_through_the_hosts_memory(
    monkeypatch: pytest.MonkeyPatch, forward_s: float, waiting_s: float, stall_s: float
) -> None:
    """Several ranks of a GPU use Gloo: copies wait for the GPU, so a message leaves when its values are there.

    0.2.0 in its beginnings: it reported the time at which its host had begun to wait for them.
    """
    for name in ("pack", "layout_in"):
        monkeypatch.setattr(message, name, _after_the_gpu(getattr(message, name)))
    done = run(TWO_UNITS, 1, {(Op.FORWARD, 1): forward_s}, by_nccl=False, wire_s=4.0)
    row = done.found.workers[1]
    assert (row["waiting_activation_s"], row["stall_s"]) == pytest.approx((waiting_s, stall_s))
    assert done.found.metrics["comm_time_activation_s"] >= 8.0
    assert "overlapped_s" not in row
    assert WORKERS_IDLE not in done.found.notes


def _after_the_gpu(copy: Callable[..., Any]) -> Callable[..., Any]:
    def copied(*args: Any) -> Any:
        Gpus.present.synchronize()
        return copy(*args)

    return copied


@pytest.mark.parametrize("message_s", [2.0, 12.0, 60.0])
def test_a_pipeline(message_s: float) -> None:
    check(run(Case("mlp", (4,), (1, 1), {"depth": 4}), 8, message_s=message_s))


def test_a_pipeline_with_replicas() -> None:
    check(run(Case("mlp", (4,), (2, 1), {"depth": 4}), 8, message_s=7.0, sum_s=9.0))


def test_an_evaluation_counts_apart() -> None:
    done = run(STRAIGHT, 2, evaluates=True, message_s=7.0)
    check(done)
    kinds = Counter(transfer.kind for transfer in done.found.timeline.transfers)
    assert kinds == {"activation": 2, "gradient": 2, "evaluation": 3}


@pytest.fixture
def several_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every linear layer have a bucket, and gradients come one after the other."""
    monkeypatch.setattr(costs, "BUCKET_BYTES", 100)
    monkeypatch.setattr(costs, "FIRST_BUCKET_BYTES", 100)
    add = reducer.Reducer.add

    def slowly(of: reducer.Reducer, index: int, gradient: torch.Tensor) -> None:
        Gpus.present.compute(Op.BACKWARD.name, 3.0)
        add(of, index, gradient)

    monkeypatch.setattr(reducer.Reducer, "add", slowly)


@pytest.mark.usefixtures("several_buckets")
@pytest.mark.parametrize(
    ("sum_s", "all_reduce_s", "stall_s"), [(1.0, 4.0, 1.0), (4.0, 16.0, 4.0), (6.0, 24.0, 6.0), (30.0, 120.0, 102.0)]
)
def test_sums_in_a_backward_by_hand(sum_s: float, all_reduce_s: float, stall_s: float) -> None:
    """Four set out, 6 s apart, the last as the backward ends; each goes on when the one before is done."""
    done = run(Case("mlp", (), (2,)), 2, sum_s=sum_s)
    check(done)
    for row in done.found.workers:
        assert row["all_reduce_s"] == pytest.approx(all_reduce_s)
        assert row["waiting_all_reduce_s"] == row["stall_s"] == pytest.approx(stall_s)
        assert row["overlapped_s"] == pytest.approx(all_reduce_s - stall_s)


@pytest.mark.usefixtures("several_buckets")
@pytest.mark.parametrize(
    "columns", [{"sync": "parameter-server"}, {"weights": "one", **SHARDED}], ids=["server", "fsdp"]
)
def test_other_sums(columns: dict[str, Any]) -> None:
    """A server's sum is on its way from its first push to the end of its last pull."""
    check(run(Case("mlp", (), (2,), columns), 4, sum_s=9.0))


def test_events_are_read_and_used_again_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts run two passes ahead of their GPUs, and few events wait to be read."""
    monkeypatch.setattr(distributed, "Pace", lambda device: Pace(torch.device("cuda")))
    most, marks, marked = [0], [0], DeviceTimer.mark

    def counted(timer: DeviceTimer, *, keep: bool = False) -> Moment:
        most[0] = max(most[0], len(timer._waiting))
        marks[0] += 1
        return marked(timer, keep=keep)

    monkeypatch.setattr(DeviceTimer, "mark", counted)
    before = Event.timing
    done = run(Case("mlp", (4,), (1, 1), {"depth": 4}), 60, message_s=7.0, launch_s=1e-4)
    check(done, 1e-3)
    assert marks[0] > 4 * _READ_EVERY
    assert most[0] < 1.5 * _READ_EVERY
    assert Event.timing - before < 2 * 1.5 * _READ_EVERY
