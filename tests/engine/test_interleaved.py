"""Several stages per worker: the same training as one worker's, whatever the order and the number of microbatches."""

import itertools
from functools import partial

import pytest
import torch

from pipebench.schedule.operations import Op
from pipebench.schedule.orders import ORDERS
from pipebench.schedule.pipeline import Pipeline, chain
from pipebench.schedule.programs import most_in_flight, programs
from pipebench.simulate.drawing import draw_cells
from tests.engine.test_modes import sequentially
from tests.models import SkipNet
from tests.support import Blobs, Mlp, make_engine, make_setup, momentum, parameters_of


@pytest.mark.sampled(24)
@pytest.mark.parametrize("order", ["interleaved", "all-forwards", "zbv", "dualpipev", "dualpipe"])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("starts", "replicas", "chunks"),
    [([2, 4, 6], [1, 1, 1, 1], 2), ([1, 2, 4, 5, 6], [1] * 6, 3), ([2, 4, 6], [2, 2, 2, 2], 2), ([4], [1, 1], 2)],
    ids=["2x2", "2x3", "2x2, 2 replicas", "1x2"],
)
@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_interleaved_equals_sequential_training(
    starts: list[int], replicas: list[int], chunks: int, microbatches: int, order: str, clip_norm: float | None
) -> None:
    work, dataset, model = ORDERS[order], Blobs(num_train=46), Mlp()
    if work.chunks not in (None, chunks):
        pytest.skip("of two stages per worker")
    setup = make_setup(
        model, (starts, replicas), weights="one", order=order, chunks=chunks, microbatches=microbatches,
        accumulate=2, backward="split" if work.splits else "whole", dataset=dataset,
        make_optimizer=momentum, clip_norm=clip_norm,
    )  # fmt: skip
    engine = make_engine(setup)
    engine.train(0, 23)
    size = 2 * replicas[0]
    groups = [range(k, min(k + size, 23)) for k in range(0, 23, size)]
    expected = sequentially(model, dataset, groups, 4, momentum, clip_norm)
    tolerance = 1e-11 if clip_norm is None else 1e-6  # the shared norm travels in single precision
    for name, parameter in parameters_of(engine).items():
        torch.testing.assert_close(parameter, expected[name], rtol=tolerance, atol=tolerance)
    assert max(replica.weights.most_alive for replica in engine.replicas) == 1


def test_messages_between_stages_of_one_worker_are_not_counted() -> None:
    """SkipNet's skip edges return to the same worker: those bytes don't travel, nor does the prediction count them."""
    make = partial(make_setup, SkipNet(), ([2, 4, 6], [1, 1, 1, 1]), weights="one", microbatches=2)
    engines = [make_engine(make(depth=4)), make_engine(make(order="interleaved", chunks=2))]
    for engine in engines:
        engine.train(0, 4)
        assert engine.num_bytes == engine.network.num_bytes
    apart, together = (sum(engine.num_bytes.values()) for engine in engines)
    local = [e for e in engines[1].setup.pipeline.edges if (e.source - e.target) % 2 == 0]
    assert local
    assert together < apart
    torch.testing.assert_close(*map(parameters_of, engines), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("positions", [1, 2, 4])
@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_the_bubble_is_divided_by_the_chunks(positions: int, chunks: int, groups: int) -> None:
    """Narayanan et al. (SC'21) section 2.2: (p - 1) / (v m) of the ideal time; a chunk takes 1/v of a stage's time."""
    stages, microbatches = positions * chunks, groups * positions
    pipeline = Pipeline(
        (1,) * stages, chain(stages), "interleaved", True, positions, microbatches, chunks=chunks
    )  # fmt: skip
    rows = draw_cells(pipeline, 1, [1] * stages, [2] * stages)
    ideal = 3 * chunks * microbatches
    assert len(rows[0]) - ideal == 3 * (positions - 1)
    for row in rows:
        assert sum(map(bool, row)) == ideal


def test_units_in_flight() -> None:
    """As many as the warm-up and one more, over a worker's stages."""
    pipeline = Pipeline((1,) * 8, chain(8), "interleaved", True, 4, 16, chunks=2)
    for position, program in enumerate(programs(pipeline, 1)):
        in_flight = itertools.accumulate((op is Op.FORWARD) - (op is Op.BACKWARD) for op, *_ in program)
        assert max(in_flight) == 2 * (4 - position - 1) + 4 + 1
    assert most_in_flight(pipeline)[7] == 1
