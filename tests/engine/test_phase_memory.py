"""What workers are foretold to hold while layers move, against live tensors of the virtual engine."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from pipebench.engine.setup import Setup
from pipebench.engine.simulated_moves import SimulatedEngine
from pipebench.schedule.modes import KEEP, RECOMPUTE, SWAP
from pipebench.schedule.moves import Layout, Move, layout_problems
from tests.simulate.test_memory import profile_of
from tests.support import Blobs, Mlp, flat_cluster, make_engine, make_setup

COUNT = 40


def setup_of(starts: Sequence[int], memory: Sequence[str] | None, rate: float = 1e6, **columns: Any) -> Setup:
    """Return a setup whose profile knows what real layers save; copies to hosts go at a rate in bytes/s."""
    p = len(starts) + 1
    cluster = replace(flat_cluster(p), pcie_bytes_per_s=rate)
    setup = make_setup(
        Mlp(), (starts, [1] * p), memory=memory, cluster=cluster, dataset=Blobs(num_train=4 * COUNT),
        make_optimizer=lambda q: torch.optim.SGD(q, 0.1, 0.9), **columns,
    )  # fmt: skip
    profile = replace(profile_of(setup), state_bytes_per_byte=1)
    return replace(setup, profile=profile, repartitions=True).under(setup.plan)


def compared(setup: Setup, moves: Sequence[Move]) -> list[tuple[int, int]]:
    """Return what every worker is foretold to hold at most between two instructions, and what it has held."""
    engine = make_engine(setup)
    for move in moves:
        engine.announce(move)
    engine.train(0, COUNT)
    simulated = SimulatedEngine(
        setup, inputs={size: {"x": setup.dataset.example(size)["x"].nbytes} for size in range(1, 5)}
    )
    for move in moves:
        simulated.announce(move)
    simulated.train(0, COUNT)
    assert all(held <= peak for held, peak in zip(simulated.held, simulated.peaks, strict=True))
    return [*zip(simulated.held, engine.peak_bytes, strict=True)]


@pytest.mark.parametrize("policies", ["k", "r", "s", "krs"])
@pytest.mark.parametrize("seed", range(4))
def test_what_a_move_holds_is_foretold(policies: str, seed: int) -> None:
    """To the byte, both ways, in two to four stages, whatever is kept, swapped and computed again."""
    draw = random.Random(f"{policies} {seed}")
    starts, moves = drawn(draw)
    words = {"k": KEEP, "r": RECOMPUTE, "s": SWAP}
    for found, held in compared(setup_of(starts, [words[draw.choice(policies)] for _ in range(7)]), moves):
        assert found == held


@pytest.mark.parametrize("seed", range(12))
def test_what_moves_with_other_policies_hold_is_told_before_they_are_made(seed: int) -> None:
    """Likewise, where layers do something else from each move on, and copies are slow enough to pile up, or aren't."""
    draw = random.Random(seed)
    (starts, moves), words = drawn(draw), draw.choice(((KEEP, SWAP), (KEEP, RECOMPUTE), (KEEP, RECOMPUTE, SWAP)))
    moves = [replace(move, memory=tuple(draw.choices(words, k=7))) for move in moves]
    moves += [Move(34, moves[-1].starts if moves else tuple(starts), tuple(draw.choices(words, k=7)))]
    setup = setup_of(starts, draw.choice(([KEEP] * 7, draw.choices(words, k=7))), rate=10 ** draw.uniform(3, 8))
    for found, held in compared(setup, moves):
        assert found == held


def test_copies_that_begin_with_a_move_give_way_to_messages_in_what_is_foretold_too() -> None:
    """The order in which copies out and copies in end decides here how much is held between them."""
    k, r, s = KEEP, RECOMPUTE, SWAP
    setup = setup_of([1, 3, 4], [k, r, r, k, k, k, k], rate=905_361.0)
    moves = [Move(12, (2, 3, 6), (s, k, k, k, r, s, r))]
    assert compared(setup, moves) == [(3432, 3432), (3232, 3232), (2168, 2168), (2240, 2240)]


def drawn(draw: random.Random) -> tuple[list[int], list[Move]]:
    """Return cuts of seven layers, and moves from there."""
    p = draw.randint(2, 4)
    starts = sorted(draw.sample(range(1, 7), p - 1))
    moves, now = list[Move](), tuple(starts)
    for at in (12, 24):
        layout, places = Layout(now, ("keep",) * 7), itertools.combinations(range(1, 7), p - 1)
        options = [after for after in places if not [*layout_problems(layout, Move(0, after))]]
        if options:
            now = draw.choice(options)
            moves.append(Move(at, now))
    return starts, moves
