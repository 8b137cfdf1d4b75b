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
from pipebench.engine.virtual import VirtualEngine
from pipebench.schedule.modes import KEEP, RECOMPUTE, SWAP
from pipebench.schedule.moves import Layout, Move, layout_problems
from pipebench.simulate.network import Network
from tests.simulate.test_memory import profile_of
from tests.support import Blobs, Mlp, flat_cluster, make_setup

COUNT = 40


def setup_of(starts: Sequence[int], memory: Sequence[str] | None, **columns: Any) -> Setup:
    """Return a setup whose profile knows what real layers save."""
    p = len(starts) + 1
    cluster = replace(flat_cluster(p), pcie_bytes_per_s=1e6)
    setup = make_setup(
        Mlp(), (starts, [1] * p), memory=memory, cluster=cluster, dataset=Blobs(num_train=4 * COUNT),
        make_optimizer=lambda q: torch.optim.SGD(q, 0.1, 0.9), **columns,
    )  # fmt: skip
    profile = replace(profile_of(setup), state_bytes_per_byte=1)
    return replace(setup, profile=profile, repartitions=True).under(setup.plan)


def compared(setup: Setup, moves: Sequence[Move]) -> list[tuple[int, int]]:
    """Return what every worker is foretold to hold at most between two instructions, and what it has held."""
    engine = VirtualEngine(setup, Network(setup.cluster, setup.devices, copies=True))
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


@pytest.mark.parametrize("seed", range(3))
def test_what_moves_with_other_policies_hold_is_told_before_they_are_made(seed: int) -> None:
    """Likewise, where other layers are computed again from each move on."""
    draw = random.Random(seed)
    starts, moves = drawn(draw)
    moves = [replace(move, memory=tuple(draw.choice((KEEP, RECOMPUTE)) for _ in range(7))) for move in moves]
    for found, held in compared(setup_of(starts, [KEEP] * 7), moves):
        assert found == held


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
