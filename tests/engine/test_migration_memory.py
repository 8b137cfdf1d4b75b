"""Predicted memory of workers while layers move, compared with the virtual engine's live tensors."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pipebench.engine.setup import Setup
from pipebench.extensions.moves.engine import moves_of, moving
from pipebench.extensions.moves.repartition_plan import CutLayout, Repartition, layout_problems
from pipebench.extensions.moves.segment import MovingSegment
from pipebench.extensions.moves.simulated_engine import SimulatedEngine
from pipebench.extensions.moves.simulated_segment import SimulatedSegment
from pipebench.model.plan import recut
from pipebench.schedule.modes import KEEP, RECOMPUTE, SWAP
from pipebench.simulate.kinds import ACTIVATIONS, AGAIN, KINDS, RECEIVED, SENT
from pipebench.simulate.memory_meter import Curve
from tests.simulate.test_memory import profile_of
from tests.support import Blobs, HalfTrained, Mlp, flat_cluster, make_engine, make_setup

COUNT = 40


def setup_of(
    starts: Sequence[int], memory: Sequence[str] | None, rate: float = 1e6, model: type[nn.Module] = Mlp, **columns: Any
) -> Setup:
    """Return a setup whose profile has what the layers save; copies to hosts have a rate in bytes/s."""
    p = len(starts) + 1
    cluster = replace(flat_cluster(p), pcie_bytes_per_s=rate)
    setup = make_setup(
        model(), (starts, [1] * p), memory=memory, cluster=cluster, dataset=Blobs(num_train=4 * COUNT),
        make_optimizer=lambda q: torch.optim.SGD(q, 0.1, 0.9), **columns,
    )  # fmt: skip
    profile = replace(profile_of(setup), state_bytes_per_byte=1)
    return moving(replace(setup, profile=profile)).under(setup.plan)


def compared(setup: Setup, moves: Sequence[Repartition]) -> list[tuple[int, int]]:
    """Return every worker's predicted and measured peak of bytes as engines count them."""
    engine = make_engine(setup)
    for move in moves:
        moves_of(engine).announce(move)
    engine.train(0, COUNT)
    simulated = SimulatedEngine(
        setup, inputs={size: {"x": setup.dataset.example(size)["x"].nbytes} for size in range(1, 5)}
    )
    for move in moves:
        moves_of(simulated).announce(move)
    simulated.train(0, COUNT)
    assert all(held <= peak.num_bytes for held, peak in zip(simulated.held, simulated.peaks, strict=True))
    return [*zip(simulated.held, engine.peak_bytes, strict=True)]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("model", [Mlp, HalfTrained])
@pytest.mark.parametrize("policies", ["k", "r", "s", "krs"])
@pytest.mark.parametrize("seed", range(4))
def test_the_memory_of_a_move_is_predicted(policies: str, seed: int, model: type[nn.Module]) -> None:
    """To the byte, in both directions, in two to four stages, with all policies."""
    draw = random.Random(f"{policies} {seed}")
    starts, moves = drawn(draw)
    words = {"k": KEEP, "r": RECOMPUTE, "s": SWAP}
    for found, held in compared(setup_of(starts, [words[draw.choice(policies)] for _ in range(7)], model=model), moves):
        assert found == held


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(12))
def test_the_memory_of_moves_with_other_policies_is_predicted(seed: int) -> None:
    """The same if policies change with each move, with copies that are slow enough to queue, or fast."""
    draw = random.Random(seed)
    (starts, moves), words = drawn(draw), draw.choice(((KEEP, SWAP), (KEEP, RECOMPUTE), (KEEP, RECOMPUTE, SWAP)))
    moves = [replace(move, memory=tuple(draw.choices(words, k=7))) for move in moves]
    moves += [Repartition(34, moves[-1].starts if moves else tuple(starts), tuple(draw.choices(words, k=7)))]
    setup = setup_of(starts, draw.choice(([KEEP] * 7, draw.choices(words, k=7))), rate=10 ** draw.uniform(0.5, 4))
    for found, held in compared(setup, moves):
        assert found == held


@pytest.mark.parametrize("at", [COUNT - 1, COUNT, COUNT + 9])
def test_the_memory_of_a_move_made_at_its_segment_s_end_is_predicted(at: int) -> None:
    """If the segment ended before the move, the prediction had only the memory before and afterwards."""
    for found, held in compared(setup_of([2, 4], None), [Repartition(at, (1, 5))]):
        assert found == held


@pytest.mark.parametrize("model", [Mlp, HalfTrained])
@pytest.mark.parametrize(("plan", "after"), [(([5, 6], [1, 1, 1]), (1, 2)), (([6], [2, 1]), (1,))])
def test_a_move_at_a_drain_holds_the_old_and_the_new_stages(
    plan: tuple[list[int], list[int]], after: tuple[int, ...], model: type[nn.Module]
) -> None:
    """The prediction had only the memory before and afterwards; stages with few units in flight hold more."""
    setup = make_setup(
        model(), plan, dataset=Blobs(num_train=4 * COUNT), make_optimizer=lambda q: torch.optim.SGD(q, 0.1, 0.9)
    )  # fmt: skip
    setup = moving(replace(setup, profile=replace(profile_of(setup), state_bytes_per_byte=1)), live=False)
    trained, simulated = make_engine(setup), SimulatedEngine(setup)
    before: list[int] = []
    for engine in (trained, simulated):
        engine.train(0, COUNT)
        before = before or trained.peak_bytes
        engine.replan(recut(setup.graph, setup.plan, after))
    wanted = [max(now, peak.num_bytes) for now, peak in zip(before, simulated.peaks, strict=True)]
    assert trained.peak_bytes == wanted != before


def test_copies_that_begin_with_a_move_give_way_to_messages_in_predictions_too() -> None:
    """The order in which copies out and in end determines the memory held between them."""
    k, r, s = KEEP, RECOMPUTE, SWAP
    setup = setup_of([1, 3, 4], [k, r, r, k, k, k, k], rate=905_361.0)
    moves = [Repartition(12, (2, 3, 6), (s, k, k, k, r, s, r))]
    assert compared(setup, moves) == [(n, n) for n in (3856, 3968, 2528, 2792)]


def test_messages_that_wait_count_in_memory() -> None:
    """One layer, a Linear of 64 doubles with momentum, moves from stage 1 to stage 0, from minibatch 6 on.

    Before that, 4 rows of 7 doubles cross, afterwards 4 rows of 8. Unit 5 runs forward before and backward after the
    move: the layer's parameters and its input of that unit wait on stage 1, and are sent.
    """
    setup = setup_of([2], [KEEP] * 7)
    phases = MovingSegment(setup)
    phases.announce(Repartition(6, (3,)))
    segment = SimulatedSegment(setup, phases, 0, 9)
    segment.played()
    assert segment.memory is not None
    few, many, unit, block = 4 * 7 * 8, 4 * 8 * 8, 64 * 8 + 4 * 7 * 8, 2 * 64 * 8
    curves, rows = segment.memory.timeline().curves, [KINDS.index(kind) for kind in (SENT, RECEIVED)]
    (sent_0, received_0), (sent_1, received_1) = ([steps(curve, row) for row in rows] for curve in curves)
    assert sent_0 == 6 * [few, -few] + 3 * [many, -many]
    # The block is waited for by the forward of unit 6, after which unit 5 runs forward again and then backward.
    assert received_0 == 5 * [few, -few] + [unit, block, -block, -few, few - unit] + 4 * [many, -many]
    assert received_1 == [few, -few, few, -few] + 4 * [few, -few] + 3 * [many, -many]
    # Set aside by the forward that unit 5 was set out with, and given right after; the block follows.
    assert sent_1 == 4 * [few, -few] + [few, unit, -few, -unit, unit, block, -unit, -block] + 4 * [many, -many]
    last = [int(curve.num_bytes[row, -1]) for curve in curves for row in rows]
    assert last == [0, 0, 0, 0]


@pytest.mark.parametrize("seed", range(8))
def test_predicted_memory_is_never_negative_and_no_message_remains(seed: int) -> None:
    """Per kind of memory, for random moves, policies and rates of copies."""
    draw = random.Random(f"kinds {seed}")
    starts, moves = drawn(draw)
    words = (KEEP, RECOMPUTE, SWAP)
    setup = setup_of(starts, draw.choices(words, k=7), rate=10 ** draw.uniform(0.5, 4))
    phases = MovingSegment(setup)
    for move in moves:
        phases.announce(replace(move, memory=tuple(draw.choices(words, k=7))))
    segment = SimulatedSegment(setup, phases, 0, COUNT)
    segment.played()
    assert segment.memory is not None
    for curve in segment.memory.timeline().curves:
        assert curve.num_bytes.min() == 0 <= curve.host_bytes.min()
        assert curve.num_bytes[[KINDS.index(kind) for kind in (SENT, RECEIVED, AGAIN, ACTIVATIONS)], -1].max() == 0
        assert curve.host_bytes[-1] == 0


def steps(curve: Curve, row: int) -> list[int]:
    """Return the changes of one kind's bytes, in order of time."""
    return [int(step) for step in np.diff(curve.num_bytes[row], prepend=0) if step]


def drawn(draw: random.Random) -> tuple[list[int], list[Repartition]]:
    """Return cuts of seven layers, and moves from there."""
    p = draw.randint(2, 4)
    starts = sorted(draw.sample(range(1, 7), p - 1))
    moves, now = list[Repartition](), tuple(starts)
    for at in (12, 24):
        layout, places = CutLayout(now, ("keep",) * 7), itertools.combinations(range(1, 7), p - 1)
        options = [after for after in places if not [*layout_problems(layout, Repartition(0, after))]]
        if options:
            now = draw.choice(options)
            moves.append(Repartition(at, now))
    return starts, moves
