"""Gradients of replicas are reduced in buckets, in one order, while the backward runs; no process is needed."""

import itertools
import random
from typing import Any

import pytest
import torch
from torch import nn

from pipebench.distributed import reducer as reducer_module
from pipebench.distributed.instruction_times import HostTimer
from pipebench.distributed.reducer import Reducer, Summing
from pipebench.engine.replica import Replica, UnitInput
from pipebench.model.graph import trace
from pipebench.model.plan import make_plan
from pipebench.model.stage import cut_stage
from tests.support import Mlp

SHAPES = [(3, 2), (), (4,), (2, 2), (5,)]
BUCKETS = [[4, 3], [2], [1, 0]]  # the last parameter's gradient is there first


class Wire:
    """Stands in for `torch.distributed`: records what is sent, and doubles it, as two equal replicas would."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.pending: list[torch.Tensor] = []

    def all_reduce(self, tensor: torch.Tensor, group: Any, async_op: bool) -> "Wire":
        assert async_op
        self.sent.append(tensor.numel())
        self.pending.append(tensor)
        return self

    def wait(self) -> None:
        self.pending.pop(0).mul_(2)


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    found = Wire()
    monkeypatch.setattr(reducer_module, "dist", found)
    return found


def parameters() -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]


def gradients(seed: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(shape, dtype=torch.float64) for shape in SHAPES]


def make(like: list[torch.Tensor] | None = None, buckets: list[list[int]] = BUCKETS) -> Reducer:
    clock = itertools.count()
    timer = HostTimer(0, lambda: float(next(clock)), print)
    return Reducer(buckets, like or parameters(), Summing(None, host_copy=False), timer)


def test_buckets_are_sent_in_one_order_for_any_order_of_gradients(wire: Wire) -> None:
    """Replicas whose backwards finish in different orders would exchange one bucket's numbers for another's."""
    sizes = [sum(parameters()[i].numel() for i in bucket) for bucket in BUCKETS]
    reducer, drawn = make(), random.Random(1)
    for _ in range(20):
        given = gradients(drawn.randrange(99))
        order = drawn.sample(range(len(SHAPES)), len(SHAPES))
        for index in order:
            reducer.add(index, given[index])
        times: list[tuple[int, float, float]] = []
        found = reducer.wait(lambda num_bytes, start, end: times.append((num_bytes, start.s, end.s)))  # noqa: B023
        assert wire.sent == sizes
        wire.sent.clear()
        assert [num_bytes for num_bytes, *_ in times] == [8 * size for size in sizes]
        starts_s, ends_s = ([each[column] for each in times] for column in (1, 2))
        assert [*starts_s, *ends_s] == sorted([*starts_s, *ends_s])
        for mine, gradient in zip(found, given, strict=True):
            assert mine is not None
            assert torch.equal(mine, 2 * gradient)


def test_a_bucket_is_sent_as_soon_as_it_and_those_before_are_full(wire: Wire) -> None:
    reducer, given = make(), gradients()
    ready: list[int] = []
    for index in (2, 4, 3, 0, 1):
        reducer.add(index, given[index])
        ready.append(len(wire.sent))
    assert ready == [0, 0, 2, 2, 3]


def test_what_the_backward_did_not_reach_is_the_sum_of_earlier_units_or_zero(wire: Wire) -> None:
    """Otherwise a replica without a unit in a short round, or with an unused parameter, leaves the others waiting.

    Zeros travel then; a parameter without a gradient on any replica must have none for the optimizer either.
    """
    reducer, given = make(), gradients()
    reducer.add(3, given[3])
    reducer.finish([None, given[1], None, torch.full(SHAPES[3], 7.0), None])
    found = reducer.wait(lambda *_: None)
    assert len(wire.sent) == len(BUCKETS)
    assert [gradient is None for gradient in found] == [True, False, True, False, True]
    for index in (1, 3):
        mine = found[index]
        assert mine is not None
        assert torch.equal(mine, 2 * given[index])
    reducer.finish([None] * len(SHAPES))  # nothing of the round before is left
    assert not any(gradient is not None and gradient.any() for gradient in reducer.wait(lambda *_: None))


def test_a_replica_without_a_unit_has_zero_gradients_as_the_others_do(wire: Wire) -> None:
    """Else weight decay and momentum moved the parameters on all replicas but this one."""
    reducer, given = make(), gradients()
    reducer.finish([None, *given[1:]])
    assert [gradient is None for gradient in reducer.wait(lambda *_: None)] == [True, *[False] * 4]
    for _ in range(2):
        reducer.finish([None] * len(SHAPES))  # and others have zeros
        assert [gradient is None for gradient in reducer.wait(lambda *_: None)] == [True, *[False] * 4]


def test_a_gradient_of_another_replica_alone_is_taken(wire: Wire) -> None:
    """An idle replica brings zeros, and gets what the others have."""
    reducer = make(buckets=[[0]])
    reducer.finish([None] * len(SHAPES))
    reducer._buckets[0].data.add_(3.0)  # as the all-reduce would
    (first, *_) = reducer.wait(lambda *_: None)
    assert first is not None
    assert first.all()


def test_a_parameter_in_no_bucket_has_no_gradient(wire: Wire) -> None:
    reducer = make(buckets=[[0, 2]])
    reducer.finish(gradients())
    assert [g is None for g in reducer.wait(lambda *_: None)] == [False, True, False, True, True]


def mlp_replica() -> Replica:
    graph = trace(Mlp())
    stage = cut_stage(graph, make_plan(graph, [], [1]), 0)
    return Replica(stage, lambda p: torch.optim.SGD(p, 0.1), device=torch.device("cpu"), seed=0)


@pytest.mark.parametrize("num_units", [1, 2, 3, 5])
def test_sums_during_the_backward_have_the_bits_of_sums_after_it(wire: Wire, num_units: int) -> None:
    """The virtual engine adds all after the backward; here the last unit's are added while it runs."""
    torch.manual_seed(1)
    inputs = [torch.randn(4, 6, dtype=torch.float64) for _ in range(num_units)]
    found = []
    for overlaps in (False, True):
        replica = mlp_replica()
        reducer = make(replica.weights.newest.parameters, [[7, 6, 5], [4, 3, 2, 1, 0]])
        for unit, x in enumerate(inputs):
            replica.forward(UnitInput(unit, (unit, 0), [x], {}, 0, loss=lambda output: output.square().sum()))
            last = overlaps and unit == num_units - 1
            replica.backward(unit, {}, reducer.add if last else None)
        reducer.finish(replica.gradients)
        found.append([g.clone() for g in reducer.wait(lambda *_: None) if g is not None])
    assert len(found[0]) == 8
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_buckets_leave_while_the_backward_still_runs(wire: Wire) -> None:
    """All but the last are on their way before the first layer's backward is done: that is the overlap."""
    replica = mlp_replica()
    first = replica.module.get_submodule("body.0")
    assert isinstance(first, nn.Linear)
    sent_before_the_end: list[int] = []
    reducer = make(replica.weights.newest.parameters, [[7, 6], [5, 4], [3, 2], [1, 0]])
    x = torch.zeros(2, 6, dtype=torch.float64)

    def note(_module: nn.Module, _arguments: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda gradient: sent_before_the_end.append(len(wire.sent)))  # type: ignore[no-untyped-call]

    first.register_forward_hook(note)
    replica.forward(UnitInput(0, (0, 0), [x], {}, 0, loss=lambda output: output.square().sum()))
    replica.backward(0, {}, reducer.add)
    assert sent_before_the_end == [3]
    assert len(wire.sent) == 4
