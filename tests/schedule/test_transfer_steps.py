"""Instruction lists while layers move: drawn, and executed by rules that share no code with their generator."""

import itertools
from collections import defaultdict
from dataclasses import replace

import pytest

from pipebench.extensions.moves.repartition_plan import CutLayout, Repartition, Starts
from pipebench.schedule.instructions import Instruction
from pipebench.schedule.modes import KEEP
from pipebench.schedule.operations import Op
from pipebench.schedule.pipeline import Edge, Pipeline, chain
from pipebench.schedule.programs import programs
from tests.instruction_text import parse, render
from tests.schedule.moving import Routes, moving_programs

MESSAGES = (Op.LOAD_INPUT, Op.SEND_ACTIVATION, Op.RECEIVE_ACTIVATION, Op.SEND_GRADIENT, Op.RECEIVE_GRADIENT)


def lists(
    before: Starts, moves: list[Repartition], count: int, pipeline: Pipeline | None = None
) -> tuple[Routes, list[list[Instruction]]]:
    p = len(before) + 1
    shape = pipeline or Pipeline((1,) * p, chain(p), "1f1b", False, p)
    routes = Routes(shape, CutLayout(before, (KEEP,) * 20), lambda layout: shape)
    for move in moves:
        routes.announce(move)
    return routes, [list(program) for program in moving_programs(shape, count, routes)]


PICTURES = {
    "left": (
        (3, 6), (4, 6), 6, 8,
        (
            ("0F0@0 0F1@0 0F2@0 0B0@0 0U0@1 0F3@1 0B1@0 0U1@2 0F4@2 0B2@0 0U2@3 0F5@3 0B3@1 0U3@4 0T6<1 0F6@4 "
            "0TU4<1 0FA4<1@3 0B4@2 0U4@5 0F7@5 0TU5<1 0FA5<1@4 0B5@3 0U5@6 0B6@4 0U6@7 0B7@5 0U7@8"),
            ("1F0@0 1F1@0 1B0@0 1U0@1 1F2@1 1B1@0 1U1@2 1F3@2 1RC6>0 1B2@1 1U2@3 1F4@3 1GU4>0 1B3@2 1U3@4 1F5@4 "
            "1GU5>0 1G6>0 1B4@3 1U4@5 1F6@5 1B5@4 1U5@6 1F7@6 1B6@5 1U6@7 1B7@6 1U7@8"),
            ("2F0@0 2B0@0 2U0@1 2F1@1 2B1@1 2U1@2 2F2@2 2B2@2 2U2@3 2F3@3 2B3@3 2U3@4 2F4@4 2B4@4 2U4@5 2F5@5 "
            "2B5@5 2U5@6 2F6@6 2B6@6 2U6@7 2F7@7 2B7@7 2U7@8"),
        ),
    ),
    "right": (
        (3, 6), (2, 6), 6, 8,
        (
            ("0F0@0 0F1@0 0F2@0 0B0@0 0U0@1 0F3@1 0RC6>1 0B1@0 0U1@2 0F4@2 0GU4>1 0B2@0 0U2@3 0F5@3 0GU5>1 0B3@1 "
            "0U3@4 0G6>1 0F6@4 0B4@2 0U4@5 0F7@5 0B5@3 0U5@6 0B6@4 0U6@7 0B7@5 0U7@8"),
            ("1F0@0 1F1@0 1B0@0 1U0@1 1F2@1 1B1@0 1U1@2 1F3@2 1B2@1 1U2@3 1F4@3 1B3@2 1U3@4 1F5@4 1TU4<0 1FA4<0@2 "
            "1B4@3 1T6<0 1U4@5 1F6@5 1TU5<0 1FA5<0@3 1B5@4 1U5@6 1F7@6 1B6@5 1U6@7 1B7@6 1U7@8"),
            ("2F0@0 2B0@0 2U0@1 2F1@1 2B1@1 2U1@2 2F2@2 2B2@2 2U2@3 2F3@3 2B3@3 2U3@4 2F4@4 2B4@4 2U4@5 2F5@5 "
            "2B5@5 2U5@6 2F6@6 2B6@6 2U6@7 2F7@7 2B7@7 2U7@8"),
        ),
    ),
    "in mid-move the segment ends": (
        (3, 6), (4, 5), 6, 5,
        (
            ("0F0@0 0F1@0 0F2@0 0B0@0 0U0@1 0F3@1 0B1@0 0U1@2 0F4@2 0B2@0 0U2@3 0B3@1 0U3@4 0T6<1 0TU4<1 0FA4<1@3 "
            "0B4@2 0U4@5"),
            ("1F0@0 1F1@0 1B0@0 1U0@1 1F2@1 1B1@0 1U1@2 1F3@2 1RC6>0 1B2@1 1U2@3 1F4@3 1GU4>0 1RC6>2 1B3@2 1U3@4 "
            "1G6>0 1B4@3 1U4@5 1G6>2"),
            "2F0@0 2B0@0 2U0@1 2F1@1 2B1@1 2U1@2 2F2@2 2B2@2 2U2@3 2F3@3 2B3@3 2U3@4 2F4@4 2B4@4 2U4@5 2T6<1",
        ),
    ),
    "four stages": (
        (2, 4, 6), (2, 5, 6), 8, 10,
        (
            ("0F0@0 0F1@0 0F2@0 0F3@0 0B0@0 0U0@1 0F4@1 0B1@0 0U1@2 0F5@2 0B2@0 0U2@3 0F6@3 0B3@0 0U3@4 0F7@4 0B4@1 "
            "0U4@5 0F8@5 0B5@2 0U5@6 0F9@6 0B6@3 0U6@7 0B7@4 0U7@8 0B8@5 0U8@9 0B9@6 0U9@10"),
            ("1F0@0 1F1@0 1F2@0 1B0@0 1U0@1 1F3@1 1B1@0 1U1@2 1F4@2 1B2@0 1U2@3 1F5@3 1B3@1 1U3@4 1F6@4 1B4@2 1U4@5 "
            "1F7@5 1B5@3 1U5@6 1T8<2 1F8@6 1TU6<2 1FA6<2@5 1B6@4 1U6@7 1F9@7 1TU7<2 1FA7<2@6 1B7@5 1U7@8 1B8@6 "
            "1U8@9 1B9@7 1U9@10"),
            ("2F0@0 2F1@0 2B0@0 2U0@1 2F2@1 2B1@0 2U1@2 2F3@2 2B2@1 2U2@3 2F4@3 2B3@2 2U3@4 2F5@4 2RC8>1 2B4@3 2U4@5 "
            "2F6@5 2GU6>1 2B5@4 2U5@6 2F7@6 2GU7>1 2G8>1 2B6@5 2U6@7 2F8@7 2B7@6 2U7@8 2F9@8 2B8@7 2U8@9 2B9@8 "
            "2U9@10"),
            ("3F0@0 3B0@0 3U0@1 3F1@1 3B1@1 3U1@2 3F2@2 3B2@2 3U2@3 3F3@3 3B3@3 3U3@4 3F4@4 3B4@4 3U4@5 3F5@5 3B5@5 "
            "3U5@6 3F6@6 3B6@6 3U6@7 3F7@7 3B7@7 3U7@8 3F8@8 3B8@8 3U8@9 3F9@9 3B9@9 3U9@10"),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("before", "after", "at", "count", "pictures"), PICTURES.values(), ids=PICTURES)
def test_pictures(before: Starts, after: Starts, at: int, count: int, pictures: tuple[str, ...]) -> None:
    _, found = lists(before, [Repartition(at, after)], count)
    for program, picture in zip(found, pictures, strict=True):
        assert render(it for it in program if it.op not in MESSAGES) == picture
        assert all(parse(str(it)) == it for it in program)


def test_with_a_flush_layers_leave_after_its_update() -> None:
    pipeline = Pipeline((1, 1), chain(2), "1f1b", True, 2, 2, weights="one")
    _, found = lists((3,), [Repartition(1, (4,)), Repartition(2, (3,))], 3, pipeline)
    shown = [render(it for it in program if it.op not in MESSAGES) for program in found]
    assert shown == [
        "0F0@0 0F1@0 0B0@0 0B1@0 0U0@1 0T1<1 0F2@1 0F3@1 0B2@1 0B3@1 0U1@2 0RC2>1 0G2>1 0F4@2 0F5@2 0B4@2 0B5@2 0U2@3",
        "1F0@0 1B0@0 1F1@0 1B1@0 1U0@1 1RC1>0 1G1>0 1F2@1 1B2@1 1F3@1 1B3@1 1U1@2 1T2<0 1F4@2 1B4@2 1F5@2 1B5@2 1U2@3",
    ]


class Played:
    """Executes lists step by step: messages must have been sent, and all passes of every layer are recorded."""

    def __init__(self, before: Starts, moves: list[Repartition], num_layers: int = 20) -> None:
        self.bounds = [0, *before, num_layers]
        self.moves = {move.at: move.starts for move in moves}
        self.num_layers = num_layers
        self.owner = {layer: stage for stage in range(len(before) + 1) for layer in self.layers(self.bounds, stage)}
        self.forward: dict[int, list[int]] = defaultdict(
            list
        )  # by layer, the minibatches in the order in which they ran
        self.backward: dict[int, list[int]] = defaultdict(list)
        self.updates = dict.fromkeys(self.owner, 0)
        self.read: dict[tuple[int, int], int] = {}  # by layer and minibatch
        self.apart: dict[tuple[int, int, int], range] = {}  # by source, target and K
        self.units: dict[tuple[int, int, int], range] = {}
        self.sent: set[tuple[str, int, int, int]] = set()
        self.guests: dict[tuple[int, int], list[range]] = defaultdict(list)
        self.aside: dict[tuple[int, int], list[range]] = defaultdict(list)

    @staticmethod
    def layers(bounds: list[int], stage: int) -> range:
        return range(bounds[stage], bounds[stage + 1])

    def owned(self, stage: int) -> list[int]:
        return [layer for layer, owner in self.owner.items() if owner == stage]

    def may(self, it: Instruction) -> bool:
        """Return whether the message that an instruction waits for has been sent."""
        waits = {
            Op.RECEIVE_ACTIVATION: "SA", Op.RECEIVE_GRADIENT: "SG", Op.TAKE_UNIT: "GU", Op.TAKE: "G",
        }  # fmt: skip
        return it.op not in waits or (waits[it.op], it.number, it.peer, it.stage) in self.sent

    def block(self, source: int, target: int, at: int) -> range:
        """Return the layers of a stage that a move gives to another."""
        new = self.layers([0, *self.moves[at], self.num_layers], target)
        own = [layer for layer in self.owned(source) if layer in new]
        return range(min(own), max(own) + 1)

    def do(self, it: Instruction) -> None:
        stage, k = it.stage, it.number
        sends = {Op.SEND_ACTIVATION: "SA", Op.SEND_GRADIENT: "SG", Op.GIVE_UNIT: "GU", Op.GIVE: "G"}
        if it.op in sends:
            self.sent.add((sends[it.op], k, stage, it.peer))
        if it.op is Op.RECUT:
            self.apart[stage, it.peer, k] = self.block(stage, it.peer, k)
        elif it.op is Op.FORWARD:
            for layer in self.owned(stage):
                self.forward[layer].append(k)
                self.read[layer, k] = self.updates[layer]
                assert self.updates[layer] == it.version, "a forward reads the newest"
        elif it.op is Op.GIVE_UNIT:
            at = next(at for (a, b, at) in self.apart if (a, b) == (stage, it.peer) and at > k)
            self.units[stage, it.peer, k] = self.apart[stage, it.peer, at]
            self.aside[stage, k].append(self.apart[stage, it.peer, at])
        elif it.op is Op.FORWARD_AGAIN:
            block = self.units[it.peer, stage, k]
            self.guests[stage, k].append(block)
            assert all(self.read[layer, k] == it.version for layer in block), "again with the version of the forward"
        elif it.op is Op.BACKWARD:
            mine = {layer for layer, ran in self.forward.items() if k in ran and self.ran_at(layer, k) == stage}
            away = {layer for block in self.aside[stage, k] for layer in block}
            come = {layer for block in self.guests[stage, k] for layer in block}
            assert not (mine - away) & come
            for layer in (mine - away) | come:
                self.backward[layer].append(k)
        elif it.op is Op.UPDATE:
            for layer in self.owned(stage):
                assert k in self.backward[layer], f"update {k} of layer {layer} has its gradient"
                assert self.updates[layer] == k, "updates are made in order, each once"
                self.updates[layer] += 1
        elif it.op is Op.TAKE:
            for layer in self.apart[it.peer, stage, k]:
                assert self.owner[layer] == -1, "a layer is given before it is taken"
                self.owner[layer] = stage
        if it.op is Op.GIVE:
            for layer in self.apart[stage, it.peer, k]:
                self.owner[layer] = -1

    def ran_at(self, layer: int, k: int) -> int:
        """Return the stage that runs a layer's forward, by the moves alone."""
        bounds = self.bounds
        for at in sorted(self.moves):
            if at <= k:
                bounds = [0, *self.moves[at], self.num_layers]
        return next(s for s in range(len(bounds) - 1) if layer in self.layers(bounds, s))


def play(before: Starts, moves: list[Repartition], count: int) -> Played:
    """Execute all lists to their ends, in any order that messages allow, and check the passes of each layer."""
    _, found = lists(before, moves, count)
    state, at = Played(before, moves), [0] * len(found)
    went = True
    while went:
        went = False
        for worker, program in enumerate(found):
            while at[worker] < len(program) and state.may(program[at[worker]]):
                state.do(program[at[worker]])
                at[worker] += 1
                went = True
    assert all(i == len(program) for i, program in zip(at, found, strict=True)), "nobody waits for ever"
    p = len(before) + 1
    for layer in range(20):
        assert state.forward[layer] == list(range(count)), "each once, in order"
        assert sorted(state.backward[layer]) == list(range(count)), "each once; two owners' may overlap"
        assert state.updates[layer] == count
        for k in range(count):
            assert state.read[layer, k] == max(0, k - (p - state.ran_at(layer, k)) + 1), "eq. 4"
    return state


def cuts(p: int) -> list[tuple[Starts, Starts]]:
    """Return cuts before and after that move every boundary to the left, to the right, or not at all."""
    before = tuple(range(5, 5 * p, 5))
    ways = itertools.product((-2, 0, 2), repeat=p - 1)
    found = [tuple(cut + by for cut, by in zip(before, way, strict=True)) for way in ways]
    return [(before, after) for after in found if after != before]


@pytest.mark.parametrize("p", [2, 3, 4])
def test_lists_with_any_moves_have_all_passes_and_no_deadlock(p: int) -> None:
    for before, after in cuts(p):
        for at in range(2 * p, 2 * p + 3):
            state = play(before, [Repartition(at, after), Repartition(at + 2 * p, before)], at + 3 * p)
            ends = [0, *before, 20]
            assert all(state.owner[layer] == s for s in range(p) for layer in state.layers(ends, s))


@pytest.mark.parametrize("p", [2, 3, 4])
def test_a_segment_may_end_anywhere(p: int) -> None:
    for before, after in cuts(p):
        for count in range(p, 3 * p + 2):
            state = play(before, [Repartition(2 * p, after)], count)
            ends = [0, *after, 20]
            assert all(state.owner[layer] == s for s in range(p) for layer in state.layers(ends, s))


@pytest.mark.parametrize("p", [2, 3, 4])
def test_passes_and_updates_keep_their_order(p: int) -> None:
    """Without transfers of layers, a list is that of a pipeline whose layers don't move."""
    stayed = programs(Pipeline((1,) * p, chain(p), "1f1b", False, p), 20)
    extra = (Op.RECUT, Op.GIVE_UNIT, Op.GIVE, Op.TAKE_UNIT, Op.FORWARD_AGAIN, Op.TAKE)
    for (before, after), usual in zip(cuts(p), itertools.repeat([list(each) for each in stayed]), strict=False):
        _, found = lists(before, [Repartition(2 * p + 1, after)], 20)
        assert [[it for it in program if it.op not in extra] for program in found] == usual


def test_edges_follow_the_owners_unit_by_unit() -> None:
    """A value read two stages on is sent to the next stage once its reader has moved there; so is its gradient."""
    near = Pipeline((1,) * 3, chain(3), "1f1b", False, 3)
    skipping = Pipeline((1,) * 3, (Edge(0, 1), Edge(0, 2), Edge(1, 2)), "1f1b", False, 3)
    shapes: dict[Starts, Pipeline] = {(4, 8): skipping, (4, 10): near}
    routes = Routes(skipping, CutLayout((4, 8), (KEEP,) * 20), lambda layout: shapes[layout.starts])
    routes.announce(Repartition(7, (4, 10)))
    found = [list(program) for program in moving_programs(skipping, 12, routes)]
    forward = [it.number for it in found[0] if it.op is Op.SEND_ACTIVATION and it.peer == 2]
    back = [it.number for it in found[0] if it.op is Op.RECEIVE_GRADIENT and it.peer == 2]
    assert forward == list(range(7))
    assert back == list(range(6))  # boundary 1, of depth 2, turns over at B = 6
    assert [it.number for it in found[2] if it.op is Op.SEND_GRADIENT and it.peer == 0] == back


def test_a_stage_that_takes_no_layer_is_recut_before_the_first_forward_with_other_policies() -> None:
    """Stage 0 gives a layer, and recomputes others from then on; stage 1 takes it; stage 2 stays as it was."""
    memory = ("recompute",) * 4 + (KEEP,) * 16
    _, found = lists((6, 12), [Repartition(6, (5, 12), memory), Repartition(12, (5, 12), memory[::-1])], 16)
    assert " 0B3@1 0U3@4 0G6>1 0RC6 0F6@4 " in render(it for it in found[0] if it.op not in MESSAGES)
    assert [[it for it in program if it.op is Op.RECUT and it.peer < 0] for program in found] == [
        [parse("0RC6"), parse("0RC12")], [], [parse("2RC12")]
    ]  # fmt: skip


def test_swapped_layers_are_copied_unit_by_unit() -> None:
    """From the move's minibatch on; units before it keep their policies."""
    p = 3
    shape = Pipeline((1,) * p, chain(p), "1f1b", False, p)
    swapping = replace(shape, swaps=(0,))
    layout, memory = CutLayout((6, 12), (KEEP,) * 20), ("swap",) * 3 + (KEEP,) * 17
    routes = Routes(shape, layout, lambda under: swapping if "swap" in under.memory else shape)
    routes.announce(Repartition(6, (6, 12), memory))
    routes.announce(Repartition(12, (6, 12), layout.memory))
    program, *others = [list(each) for each in moving_programs(shape, 16, routes)]
    for op in (Op.SWAP_OUT, Op.SWAP_IN):
        assert [it.number for it in program if it.op is op] == [*range(6, 12)]
    assert not any(it.op in (Op.SWAP_OUT, Op.SWAP_IN) for each in others for it in each)
