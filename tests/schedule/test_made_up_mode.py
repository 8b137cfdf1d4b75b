"""A new mode that this file defines: it needs only a row and an order of work."""

from collections.abc import Callable, Iterator, Sequence

import pytest

from pipebench.errors import ScheduleError
from pipebench.planner.predict import make_pipeline
from pipebench.schedule import modes, orders
from pipebench.schedule.modes import Mode
from pipebench.schedule.operations import Op
from pipebench.schedule.orders import Order
from pipebench.schedule.passes import Pass
from pipebench.schedule.pipeline import Pipeline
from pipebench.schedule.programs import programs
from tests.engine.test_modes import sequentially
from tests.pictures import draw
from tests.support import Blobs, Mlp, make_engine, make_setup, momentum, parameters_of, unit_profile

PICTURE = """\
stage 0  F0  F1  .   .   .   .   .   .   B0  B0  B1  B1  F2  F3  .   .   .   .   .   .   B2  B2  B3  B3
stage 1  .   F0  F1  .   .   .   B0  B0  B1  B1  .   .   .   F2  F3  .   .   .   B2  B2  B3  B3  .   .
stage 2  .   .   F0  F1  B0  B0  B1  B1  .   .   .   .   .   .   F2  F3  B2  B2  B3  B3  .   .   .   ."""


def in_pairs(p: Pipeline, worker: int, units: Sequence[int]) -> Iterator[Pass]:
    """Two forwards, then two backwards, the first one first."""
    (stage,) = p.stages_of(worker)
    own = p.own_units(stage, worker, units)
    for start in range(0, len(own), 2):
        for op in (Op.FORWARD, Op.BACKWARD):
            yield from (Pass(stage, op, unit) for unit in own[start : start + 2])


@pytest.fixture(autouse=True)
def pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(orders.ORDERS, "in-pairs", Order("two there, two back", in_pairs, needs_flush=True))
    row = Mode("two there, two back", "straight", "in-pairs", flush=True, weights="one", microbatches=True)
    monkeypatch.setitem(modes.MODES, "pairs", row)


def test_the_new_mode_is_drawn_simulated_and_trained_on_the_virtual_engine() -> None:
    model, dataset = Mlp(), Blobs(num_train=32)
    setup = make_setup(
        model, ([2, 4], [1, 1, 1]), order="in-pairs", weights="one", microbatches=4, dataset=dataset,
        make_optimizer=momentum,
    )  # fmt: skip
    rows = unit_profile(setup.graph, dataset, [1, 4]).layers[1]
    pipeline = make_pipeline(setup.plan, rows, modes.MODES["pairs"], microbatches=4)
    assert pipeline == setup.pipeline
    assert draw(pipeline, 1, [1] * 3, [2] * 3) == PICTURE
    engine = make_engine(setup)
    engine.train(0, 8)
    assert engine.clock_s > 0
    assert engine.num_bytes == engine.network.num_bytes
    expected = sequentially(model, dataset, [range(k, k + 1) for k in range(8)], 4, momentum)
    for name, parameter in parameters_of(engine).items():
        assert (parameter - expected[name]).abs().max() < 1e-12


def last_left_out(p: Pipeline, worker: int, units: Sequence[int]) -> Iterator[Pass]:
    """Neither forward nor backward of the last unit."""
    (stage,) = p.stages_of(worker)
    return (each for each in in_pairs(p, worker, units) if each.unit != p.own_units(stage, worker, units)[-1])


def no_last_backward(p: Pipeline, worker: int, units: Sequence[int]) -> Iterator[Pass]:
    yield from [*in_pairs(p, worker, units)][:-1]


def last_backward_twice(p: Pipeline, worker: int, units: Sequence[int]) -> Iterator[Pass]:
    passes = [*in_pairs(p, worker, units)]
    yield from [*passes, passes[-1]]


def first_unit_twice(p: Pipeline, worker: int, units: Sequence[int]) -> Iterator[Pass]:
    (stage,) = p.stages_of(worker)
    yield from (Pass(stage, op, units[0]) for op in (Op.FORWARD, Op.BACKWARD))
    yield from in_pairs(p, worker, units)


@pytest.mark.parametrize("flush", [True, False])
@pytest.mark.parametrize(
    ("order", "message"),
    [
        (last_left_out, "leaves out 1 of its units"),
        (no_last_backward, "runs 3 forward, and not backward"),
        (last_backward_twice, "runs 3 backward before its forward, or twice"),
        (first_unit_twice, "runs 1 units twice"),
    ],
)
def test_an_order_that_leaves_out_a_pass_or_repeats_one_is_refused(
    order: Callable[[Pipeline, int, Sequence[int]], Iterator[Pass]],
    message: str,
    flush: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once a microbatch without its backward was simulated, and trained on without its gradient."""
    monkeypatch.setitem(orders.ORDERS, "in-pairs", Order("wrong", order, needs_flush=flush))
    weights = "one" if flush else "stash"
    setup = make_setup(
        Mlp(), ([2, 4], [1, 1, 1]), order="in-pairs", weights=weights, accumulate=4 if flush else 1,
        dataset=Blobs(num_train=32), make_optimizer=momentum,
    )  # fmt: skip
    with pytest.raises(ScheduleError, match=f"order in-pairs: stage . replica 0 {message}"):
        [[*each] for each in programs(setup.pipeline, 4)]
