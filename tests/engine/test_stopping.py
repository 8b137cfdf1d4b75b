"""A run on the virtual clock that is asked to stop at any point ends drained, after a whole round."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pipebench.engine.admission import EvaluationStoppedError, StopRequest
from pipebench.engine.setup import Setup
from pipebench.engine.virtual import VirtualEngine
from pipebench.simulate.network import Network
from tests.checkpoint.support import captured, restored
from tests.checkpoint.test_round_trips import OPTIMIZERS, bits
from tests.engine.test_streams import text_setup
from tests.support import Blobs, Mlp, make_engine, make_setup

COUNT = 12
SETUPS: dict[str, Callable[[], Setup]] = {
    "pipedream": lambda: make_setup(Mlp(), ([2, 4], [1, 1, 1]), make_optimizer=OPTIMIZERS["fused-momentum"]),
    "replicated": lambda: make_setup(Mlp(), ([4], [3, 1]), make_optimizer=OPTIMIZERS["fused-momentum"]),
    "vertical-sync": lambda: make_setup(Mlp(), ([2, 4], [2, 1, 1]), weights="stash-vertical-sync"),
    "data-parallel": lambda: make_setup(Mlp(), ([], [3]), weights="one", depth=1),
    "asynchronous": lambda: make_setup(Mlp(), ([], [3]), weights="newest-pulled", sync="asynchronous", depth=1),
    "gpipe": lambda: make_setup(
        Mlp(), ([3], [1, 1]), weights="one", order="all-forwards", microbatches=2, accumulate=2
    ),
    "flush-replicated": lambda: make_setup(Mlp(), ([3], [2, 1]), weights="one", microbatches=2, clip_norm=1.0),
    "streams": lambda: text_setup(([2], [2, 1])),
}  # fmt: skip


def stopped(setup: Setup, after: int, count: int = COUNT) -> tuple[VirtualEngine, int]:
    """Train until a stop is asked for after some events; return the engine and the minibatches trained on."""
    stop, events = StopRequest(), []

    def observe(event: Any) -> None:
        events.append(event)
        if len(events) >= after:
            stop.reason = "interrupted"

    engine = VirtualEngine(setup, Network(setup.cluster), observe, stop=stop)
    if after == 0:
        stop.reason = "interrupted"
    done = engine.train(0, count)
    assert engine.stop_reason == ("interrupted" if stop.reason else None)
    return engine, done


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", SETUPS)
def test_a_stop_at_any_event_equals_a_planned_drain(kind: str) -> None:
    make, count = SETUPS[kind], 8
    size = make().pipeline.period
    ended: dict[int, Any] = {}
    for after in range(0, 400, 13):
        engine, done = stopped(make(), after, count)
        assert done == count or done % size == 0
        if done not in ended:
            planned = make_engine(make())
            if done:
                planned.train(0, done)
            ended[done] = bits(captured(planned)), planned.clock_s, planned.num_bytes
        assert (bits(captured(engine)), engine.clock_s, engine.num_bytes) == ended[done]
        if done == count:
            break
    assert len(ended) > 2
    assert 0 in ended
    assert count in ended


def test_nothing_is_trained_after_a_stop() -> None:
    engine, done = stopped(SETUPS["pipedream"](), 20)
    before = bits(captured(engine)), engine.clock_s
    assert engine.train(done, COUNT) == 0
    assert (bits(captured(engine)), engine.clock_s) == before
    assert torch.tensor(engine.peak_bytes).min() > 0


@pytest.mark.parametrize("cuts", [([2, 4], [1, 1, 1]), ([4], [3, 1]), ([], [3])], ids=["straight", "3-1", "dp"])
def test_a_stopped_evaluation_takes_no_time_and_counts_no_bytes(cuts: tuple[list[int], list[int]]) -> None:
    """On the virtual clock; a run that goes on from here repeats it."""
    setup = make_setup(Mlp(), cuts, weights="one", microbatches=2, dataset=Blobs(num_eval=80))
    stop, seen = StopRequest(), [0, 10**9]  # events, and after how many of them to stop

    def observe(event: Any) -> None:
        seen[0] += 1
        if seen[0] >= seen[1]:
            stop.reason = "interrupted"

    engine = VirtualEngine(setup, Network(setup.cluster), observe, stop=stop)
    engine.train(0, setup.pipeline.period)
    seen[0] = 0
    expected, num_events = engine.evaluate(), seen[0]
    before = captured(engine), engine.clock_s, engine.num_bytes.copy(), engine.network.num_bytes.copy()
    seen[:] = 0, 5
    with pytest.raises(EvaluationStoppedError):
        engine.evaluate()
    assert 5 <= seen[0] < num_events / 2
    assert (engine.clock_s, engine.num_bytes, engine.network.num_bytes) == before[1:]
    assert bits(captured(engine)) == bits(before[0])
    assert restored(setup, before[0]).evaluate() == expected


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", SETUPS)
def test_only_a_stop_of_a_flushing_run_changes_no_weights(kind: str) -> None:
    """Without a flush the stop adds a drain, as docs/distributed.md says."""
    make = SETUPS[kind]
    whole = make_engine(make())
    whole.train(0, COUNT)
    engine, done = stopped(make(), 24)
    assert 0 < done < COUNT
    again = restored(make(), captured(engine))
    again.train(done, COUNT - done)
    same = bits(captured(again)) == bits(captured(whole))
    assert same is make().pipeline.flushes
