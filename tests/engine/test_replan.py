"""A run that continues with another plan has the bits of one that was stopped and resumed with it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from pipebench.engine.setup import Setup
from pipebench.engine.virtual import VirtualEngine
from pipebench.errors import PlanError
from pipebench.model.plan import recut
from pipebench.schedule.modes import KEEP, RECOMPUTE, SWAP
from pipebench.schedule.operations import MIGRATION, SWAP_IN, SWAP_OUT
from pipebench.simulate.timeline import PCIE
from tests.checkpoint.support import captured, restored
from tests.checkpoint.test_round_trips import OPTIMIZERS, bits
from tests.engine.test_streams import text_setup
from tests.models import ConvNet, SkipNet
from tests.support import Blobs, Mlp, make_engine, make_setup

BEFORE, AFTER = 7, 6
SGD = OPTIMIZERS["fused-momentum"]


def images() -> Blobs:
    return Blobs(shape=(2, 8, 8), dtype=torch.float32)


def mlp(**given: Any) -> Callable[[list[int]], Setup]:
    return lambda starts: make_setup(Mlp(), (starts, [1] * (len(starts) + 1)), make_optimizer=SGD, **given)


def conv(starts: list[int], **given: Any) -> Setup:
    replicas = given.pop("replicas", [1] * (len(starts) + 1))
    model = ConvNet(dropout=0.3)
    return make_setup(model, (starts, replicas), dataset=images(), make_optimizer=SGD, **given)


CASES: dict[str, tuple[Callable[[list[int]], Setup], list[int], list[int]]] = {
    "to the left": (mlp(), [2, 4], [1, 3]),
    "to the right": (mlp(), [2, 4], [4, 6]),
    "two ways at once": (mlp(), [2, 4], [1, 6]),
    "further than a stage": (mlp(), [1, 2], [5, 6]),
    "adam": (lambda starts: make_setup(Mlp(), (starts, [1, 1]), make_optimizer=OPTIMIZERS["adam"]), [2], [5]),
    "running statistics, dropout": (conv, [3, 5], [1, 6]),
    "recomputed": (partial(conv, recompute=True), [3, 5], [1, 6]),
    "a flush": (partial(conv, weights="one", microbatches=2), [3], [5]),
    "replicas": (partial(conv, replicas=[2, 1, 2]), [3, 5], [1, 6]),
    "bf16": (partial(conv, precision="bf16"), [3, 5], [1, 6]),
    "two buffers": (partial(conv, weights="double-buffer", accumulate=3), [3, 5], [1, 6]),
    "the mean change": (mlp(weights="correct"), [2, 4], [1, 3]),
    "values that skip stages": (
        lambda starts: make_setup(SkipNet(), (starts, [1, 1, 1]), make_optimizer=SGD), [2, 5], [4, 9],
    ),
    "states that are carried": (lambda starts: text_setup((starts, [1, 1])), [1], [2]),
}  # fmt: skip


def under(engine: VirtualEngine, starts: list[int]) -> None:
    engine.replan(recut(engine.setup.graph, engine.setup.plan, starts))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES)
def test_a_replanned_run_equals_one_that_was_stopped_and_resumed(case: str) -> None:
    make, starts, later = CASES[case]
    engine = make_engine(make(starts))
    engine.train(0, BEFORE)
    state = captured(engine)
    again = restored(make(later), state)
    under(engine, later)
    assert bits(captured(engine)) == bits(captured(again))
    for each in (engine, again):
        each.train(BEFORE, AFTER)
    assert bits(captured(engine)) == bits(captured(again)) != bits(state)
    assert engine.evaluate() == again.evaluate()


def test_moved_bytes_are_counted_once_and_take_time() -> None:
    engine = make_engine(make_setup(Mlp(), ([2, 4], [1, 1, 1]), make_optimizer=SGD))
    engine.train(0, BEFORE)
    drained_s = engine.clock_s
    under(engine, [4, 4 + 2])  # two linear layers, each to the stage before it
    linear = [torch.nn.Linear(7, 8).double(), torch.nn.Linear(8, 5).double()]
    sizes = [sum(2 * p.nbytes for p in layer.parameters()) for layer in linear]  # with its momentum
    assert sum(n for (kind, _), n in engine.num_bytes.items() if kind == MIGRATION) == sum(sizes)
    level = engine.setup.cluster.levels[0]
    assert engine.clock_s - drained_s == pytest.approx(max(sizes) / level.bandwidth_bytes_per_s + level.latency_s)


def test_replicas_that_already_have_a_layer_are_not_sent_it() -> None:
    engine = make_engine(make_setup(Mlp(), ([2], [2, 2]), make_optimizer=SGD))
    engine.train(0, 8)
    under(engine, [1])
    assert engine.num_bytes[MIGRATION, "server"] == 0, "a tanh has no parameters"
    under(engine, [4])
    size = sum(2 * p.nbytes for p in torch.nn.Linear(7, 8).double().parameters())
    assert engine.num_bytes[MIGRATION, "server"] == 2 * size, "both replicas of the first stage lack it"


def test_memory_policies_change_without_anything_on_the_links() -> None:
    make = partial(make_setup, Mlp(), ([2, 4], [1, 1, 1]), make_optimizer=SGD)
    engine, other = make_engine(make()), make_engine(make())
    for each in (engine, other):
        each.train(0, BEFORE)
    graph, plan = engine.setup.graph, engine.setup.plan
    memory = [RECOMPUTE if index < 4 else KEEP for index in range(len(graph.layers))]
    engine.replan(recut(graph, plan, [2, 4], memory))
    assert engine.clock_s == other.clock_s
    for each in (engine, other):
        each.train(BEFORE, AFTER)
    assert bits(captured(engine)) == bits(captured(other))
    assert engine.clock_s > other.clock_s, "what is computed again takes time"


def test_a_run_begins_to_swap_and_ends_it_at_drains() -> None:
    make = partial(make_setup, Mlp(), ([2, 4], [1, 1, 1]), make_optimizer=SGD)
    engine, other = make_engine(make()), make_engine(make())
    graph, plan = engine.setup.graph, engine.setup.plan
    copied = []
    for first, policy in enumerate((KEEP, SWAP, KEEP)):
        engine.replan(recut(graph, plan, [2, 4], [policy] * len(graph.layers)))
        for each in (engine, other):
            each.train(first * BEFORE, BEFORE)
        copied.append(engine.num_bytes[SWAP_OUT, PCIE])
    assert copied[0] == 0 < copied[1] == copied[2] == engine.num_bytes[SWAP_IN, PCIE]
    assert bits(captured(engine)) == bits(captured(other))


def test_peaks_and_versions_are_those_of_the_whole_run() -> None:
    engine = make_engine(make_setup(Mlp(), ([2, 4], [1, 1, 1]), make_optimizer=SGD))
    engine.train(0, BEFORE)
    before = engine.facts()
    under(engine, [1, 2])
    assert engine.facts()["peak_bytes"] == [
        max(was, worker.peaks.device_bytes) for was, worker in zip(before["peak_bytes"], engine.workers, strict=True)
    ]
    assert engine.facts()["weight_versions_max"] == before["weight_versions_max"] == [3, 2, 1]


def test_other_workers_are_another_run() -> None:
    engine = make_engine(make_setup(Mlp(), ([2, 4], [1, 1, 1]), make_optimizer=SGD))
    other = make_setup(Mlp(), ([3], [2, 1]), make_optimizer=SGD).plan
    with pytest.raises(PlanError, match="keeps replicas, devices, depth and chunks"):
        engine.replan(other)


def test_recomputation_is_metered_by_the_current_cuts() -> None:
    """The meter uses the costs of each segment, not those of the first."""
    engine = make_engine(conv([3, 5]))
    engine.train(0, BEFORE)
    assert engine.facts()["again_s"] == 0
    plan = engine.setup.plan
    again = recut(engine.setup.graph, plan, [3, 5], [RECOMPUTE] * len(engine.setup.graph.layers))
    engine.replan(again)
    engine.train(BEFORE, AFTER)
    per_minibatch_s = sum(max(stage.again_s.values()) for stage in engine.setup.costs.stages)
    assert per_minibatch_s > 0
    assert engine.facts()["again_s"] == pytest.approx(AFTER * per_minibatch_s)
