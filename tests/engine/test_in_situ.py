import gc
import itertools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pipebench.engine import in_situ
from pipebench.engine.in_situ import Key, entries, in_use, least_bytes, mean, profile_in_situ, update_costs
from pipebench.engine.setup import Setup
from pipebench.engine.worker import Worker
from pipebench.profile.enough import StopRule
from pipebench.schedule.operations import Op
from tests.engine.test_modes import images
from tests.engine.test_streams import text_setup
from tests.models import ConvNet
from tests.support import Blobs, Mlp, make_setup, unit_profile

MODES: dict[str, tuple[Any, dict[str, Any]]] = {
    "pipedream": (([2, 3], [1, 1, 1]), {}),
    "dp": (([], [3]), {"weights": "one", "depth": 1}),
    "replicated": (([2], [2, 1]), {}),
    "gpipe-recompute": (
        ([2], [1, 1]), {"weights": "one", "order": "all-forwards", "microbatches": 2, "recompute": True}
    ),
    "dp-asp": (([], [2]), {"weights": "newest-pulled", "sync": "asynchronous", "depth": 1}),
    "double-buffer": (([2], [1, 1]), {"weights": "double-buffer", "depth": 2, "accumulate": 2}),
    "interleaved": (([1, 2, 3], [1, 1] * 2), {"weights": "one", "order": "interleaved", "chunks": 2}),
    "zero-bubble": (
        ([2], [1, 1]), {"weights": "one", "order": "zero-bubble", "backward": "split", "microbatches": 2}
    ),
    "clipped": (([2], [1, 1]), {"weights": "one", "microbatches": 4, "clip_norm": 0.1}),
}  # fmt: skip


def ticks() -> Any:
    """Return a clock that advances by one second per call."""
    return itertools.count().__next__


def alone(enough: bool) -> bool:
    """Agree as the only process."""
    return enough


def setup_of(mode: str) -> Setup:
    plan, columns = MODES[mode]
    return make_setup(Mlp(), plan, dataset=Blobs(), **columns)


@pytest.mark.parametrize("mode", MODES)
def test_every_instruction_of_every_stage_is_timed(mode: str) -> None:
    setup = setup_of(mode)
    before = {name: p.detach().clone() for name, p in setup.graph.root.named_parameters()}
    state = torch.get_rng_state()
    found = profile_in_situ(setup, alone, ticks(), StopRule(most=2))
    size, stages = 4 // setup.pipeline.microbatches, range(len(setup.plan.stages))
    parts = [Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT] if setup.pipeline.backward == "split" else [Op.BACKWARD]
    expected = {Key(Op.LOAD_INPUT, 0, size), *(Key(op, s, size) for op in (Op.FORWARD, *parts) for s in stages)}
    expected |= set() if mode == "dp-asp" else {Key(Op.UPDATE, s, 0) for s in stages}
    assert set(found) == expected
    assert set(found.values()) == {1}
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], p) for name, p in setup.graph.root.named_parameters())


class Lengths(Blobs):
    """Samples of many tokens, labels too: the first sample of a unit sets its length."""

    def fetch(
        self, split: str, indices: Sequence[int], fields: Sequence[str], draw: int = 0
    ) -> dict[str, torch.Tensor]:
        found = super().fetch(split, indices, fields, draw)
        return {name: torch.stack([value] * (1 + indices[0] % 5), 1) for name, value in found.items()}

    def loss(self, output: torch.Tensor, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return super().loss(output.flatten(0, 1), {"label": targets["label"].flatten()})


@pytest.mark.parametrize("mode", [*MODES, "two-ways"])
def test_units_of_many_lengths_are_profiled(mode: str) -> None:
    """0.2.0: stand-ins had the length of the first unit, so that runs of wmt16 in processes ended in a traceback."""
    two_ways = ([2, 4, 6], [2] * 4), {"weights": "one", "order": "dualpipe", "backward": "split", "chunks": 2}
    plan, columns = {**MODES, "two-ways": two_ways}[mode]
    setup = make_setup(Mlp(), plan, dataset=Lengths(), **columns)
    found = profile_in_situ(setup, alone, ticks(), StopRule(most=2))
    assert {key.stage for key in found if key.op is Op.FORWARD} == {*range(len(setup.plan.stages))}


def test_models_with_states_and_running_statistics_are_profiled() -> None:
    for setup in (text_setup(([2], [1, 1]), weights="one"), make_setup(ConvNet(), ([2], [1, 1]), dataset=images())):
        before = {name: b.clone() for name, b in setup.graph.root.named_buffers()}
        assert profile_in_situ(setup, alone, rule=StopRule(most=1))
        assert all(torch.equal(before[name], b) for name, b in setup.graph.root.named_buffers())


def test_workers_wait_for_other_processes_every_time() -> None:
    waits: list[bool] = []

    def agree(enough: bool) -> bool:
        """Another process needs a segment more of every worker."""
        waits.append(enough)
        return waits[-2:] == [True, True]

    found = profile_in_situ(setup_of("zero-bubble"), agree, ticks(), StopRule(most=3))
    assert waits == 2 * ([False] * (1 + 3) + [True] * 2)
    assert {(key.stage, key.num_samples) for key in found if key.op is Op.FORWARD} == {(0, 2), (1, 2)}


@pytest.mark.parametrize(("mode", "most"), [("pipedream", [1, 1, 1]), ("interleaved", [2]), ("dp", [1])])
def test_workers_are_made_one_after_the_other_unless_they_wait_for_each_other(
    mode: str, most: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.2.0: every process had all stages at once, their gradients and the optimizer's state: 9 GB with BERT large."""
    made: list[weakref.ref[Worker]] = []
    alive: list[int] = []

    class Counted(Worker):
        def __init__(self, setup: Setup, index: int) -> None:
            super().__init__(setup, index)
            made.append(weakref.ref(self))

    def agree(enough: bool) -> bool:
        if not enough:
            alive.append(sum(each() is not None for each in made))
        return enough

    monkeypatch.setattr(in_situ, "Worker", Counted)
    gc.collect()
    gc.disable()
    try:
        profile_in_situ(setup_of(mode), agree, ticks(), StopRule(most=1))
    finally:
        gc.enable()
    assert alive[::2] == most
    assert not any(each() for each in made)


def test_one_long_segment_is_enough() -> None:
    asked: list[bool] = []

    def agree(enough: bool) -> bool:
        asked.append(enough)
        return enough

    found = profile_in_situ(setup_of("zero-bubble"), agree, ticks(), StopRule(most_s=0.0))
    assert asked == [False, True] * 2
    assert {*found.values()} == {1}


def test_parts_of_a_split_backward_are_timed_separately() -> None:
    setup = setup_of("zero-bubble")
    profile = unit_profile(setup.graph, setup.dataset, [2])
    rows = tuple(replace(row, weight_s=row.backward_s / 4) for row in profile.layers[2])
    parts = {Key(Op.FORWARD, 0, 2): 1.0, Key(Op.BACKWARD_INPUT, 0, 2): 6.0, Key(Op.BACKWARD_WEIGHT, 0, 2): 2.0}
    found = in_use(replace(profile, layers={2: rows}), setup, parts).layers[2][:2]
    assert sum(row.backward_s for row in found) == pytest.approx(8)
    assert sum(row.weight_s for row in found) == pytest.approx(2)


def test_layers_profiled_in_situ_add_up_to_their_stages_times_and_keep_their_shares() -> None:
    setup = make_setup(Mlp(), ([2], [1, 1]), weights="one")
    profile = unit_profile(setup.graph, setup.dataset, range(1, 9))
    rows = [replace(row, forward_s=1.0 + i, backward_s=2.0, weight_s=1.0) for i, row in enumerate(profile.layers[4])]
    profile = replace(profile, layers={**profile.layers, 4: tuple(rows)})
    took = {(Op.FORWARD, 0): 12.0, (Op.FORWARD, 1): 5.0, (Op.BACKWARD, 0): 8.0, (Op.BACKWARD, 1): 9.0}
    found = in_use(profile, setup, {Key(op, stage, 4): seconds for (op, stage), seconds in took.items()})
    parts = found.layers[4][:2], found.layers[4][2:]  # the loss belongs to the last stage
    assert [sum(row.forward_s for row in part) for part in parts] == pytest.approx([12, 5])
    assert [sum(row.backward_s for row in part) for part in parts] == pytest.approx([8, 9])
    assert [row.forward_s for row in parts[0]] == pytest.approx([4, 8])
    assert [row.weight_s for row in parts[0]] == pytest.approx([2, 2])
    # A size that was not measured, nearest to 4: ratios are those of 4.
    assert [row.forward_s for row in found.layers[7][:2]] == pytest.approx([4, 4])
    assert (found.load_s, found.update_floor_s, found.update_s_per_byte) == (profile.load_s, 0, 0)
    assert "x as long while all workers compute" in found.note


def test_loads_count_where_workers_fetch_themselves() -> None:
    setup = make_setup(Mlp(), ([2], [1, 1]), weights="one")
    profile = unit_profile(setup.graph, setup.dataset, [4])
    profiled_in_situ = {Key(Op.FORWARD, 0, 4): 1.0, Key(Op.LOAD_INPUT, 0, 4): 0.25, Key(Op.LOAD_INPUT, 1, 4): 0.01}
    assert in_use(profile, setup, profiled_in_situ).load_s == {4: 0.25}
    setup.dataset.loader_processes = 1
    assert in_use(profile, setup, profiled_in_situ).load_s == {4: 0.0}


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([], (0, 0)),
        ([(100, 3.0)], (0, 0.03)),
        ([(100, 3.0), (300, 4.0)], (2.5, 0.005)),
        ([(0, 2.0), (300, 1.0)], (1.5, 0)),  # larger stages are not faster
        ([(100, 1.0), (200, 3.0)], (0, (100 + 600) / (100**2 + 200**2))),  # nor is anything faster than 0
    ],
)
def test_update_costs_are_a_line_without_negative_terms(
    steps: list[tuple[int, float]], expected: tuple[float, float]
) -> None:
    assert update_costs(steps) == pytest.approx(expected)


def test_update_costs_of_many_stages_are_least_squares() -> None:
    num_bytes = np.array([1e6, 2e6, 5e6, 9e6])
    seconds = 2e-3 + 1e-9 * num_bytes + np.array([1, -2, 2, -1]) * 1e-4
    slope, floor = np.polyfit(num_bytes, seconds, 1)
    found = update_costs([(int(n), float(s)) for n, s in zip(num_bytes, seconds, strict=True)])
    assert found == pytest.approx((floor, slope))


def test_processes_are_averaged_through_json() -> None:
    key, other = Key(Op.FORWARD, 0, 4), Key(Op.UPDATE, 1, 0)
    assert mean([entries({key: 1.0, other: 2.0}), entries({key: 3.0, other: 2.0})]) == {key: 2.0, other: 2.0}


@pytest.mark.parametrize(("mode", "layers"), [("dp", [(0, 7)]), ("pipedream", [(0, 2), (2, 3), (3, 7)])])
def test_the_least_memory_is_that_of_the_largest_stage(mode: str, layers: list[tuple[int, int]]) -> None:
    setup = setup_of(mode)
    setup = replace(setup, profile=replace(setup.profile, state_bytes_per_byte=2))
    rows = setup.profile.rows
    parameters = [sum(row.parameter_bytes for row in rows[start:stop]) for start, stop in layers]
    assert least_bytes(setup) == 3 * max(parameters) > 0
