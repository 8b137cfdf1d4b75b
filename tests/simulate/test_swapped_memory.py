"""The part of a unit that is on a device while the rest is on the host: by hand, and over time."""

import copy
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.nn import functional

from pipebench.cluster import Cluster, Level
from pipebench.engine.replica import UnitInput
from pipebench.engine.setup import Setup
from pipebench.model.graph import trace
from pipebench.model.plan import StagePlan, as_they_run
from pipebench.profile.model import LayerProfile
from pipebench.profile.walk import walk
from pipebench.schedule.modes import KEEP, RECOMPUTE, SWAP
from pipebench.schedule.programs import most_in_flight
from pipebench.simulate import memory_meter
from pipebench.simulate.costs import stage_costs
from pipebench.simulate.kinds import ACTIVATIONS, KINDS, MASTERS, STATE, WEIGHTS
from pipebench.simulate.memory import kept_bytes, swapped_bytes
from pipebench.simulate.memory_meter import MemoryTimeline
from tests.engine.test_swap import MODELS
from tests.replicas import replicas_of
from tests.simulate.test_memory import FOUR, STRAIGHT, Plan, memories_of, metered, profile_of, setup_of
from tests.support import Mlp


def row(
    saved: int, saved_with: Sequence[tuple[int, int]] = (), output: int = 8, reads: Sequence[int] = ()
) -> LayerProfile:
    return LayerProfile(
        "layer", "Layer", 1.0, 2.0, output, output, tuple(reads), saved_bytes=saved, saved_with=tuple(saved_with)
    )


# The first saves 8; the next four save the same 10, and 3 or 5 besides; the last is the loss.
ROWS = [
    row(8), row(10, reads=[0]), row(3, [(1, 10)], reads=[0]), row(0, [(2, 10)], output=6, reads=[0]),
    row(5, [(3, 10)], reads=[3]), row(2, reads=[4]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("policies", "swapped"),
    [
        ("kkkkk", 0),
        ("sssss", 8 + 10 + 3 + 0 + 5 + 2),  # the loss goes with the last layer
        ("skkkk", 8),
        ("kskkk", 0),  # what layer 1 saves the next ones do, too
        ("kkskk", 3),
        ("kkksk", 0),
        ("kkkks", 5 + 2),
        ("ksssk", 3),  # layer 4 keeps the 10 that all have
        ("kssss", 10 + 3 + 5 + 2),
        ("kkssk", 3),  # layer 1 has the 10
        ("ssskk", 8 + 3),  # layer 3 has them
        ("ksssr", 10 + 3),  # layer 4 reads what layer 3 puts out, and not the 10
    ],
)
def test_swapped_tensors_are_those_that_no_other_layer_of_the_stage_keeps(policies: str, swapped: int) -> None:
    words = {"k": KEEP, "s": SWAP, "r": RECOMPUTE}
    memory = tuple(words[letter] for letter in policies)
    stage = StagePlan(0, 5, 1, (0,), memory)
    assert swapped_bytes(ROWS, stage) == swapped
    keeping = StagePlan(0, 5, 1, (0,), tuple(KEEP if each == SWAP else each for each in memory))
    assert kept_bytes(ROWS, stage, {}) == kept_bytes(ROWS, keeping, {})


def test_both_sides_of_a_cut_swap_their_copy() -> None:
    """The first saves 8 and 10, the second 3, the 10 that was the first's, and what follows."""
    assert swapped_bytes(ROWS, StagePlan(0, 2, 1, (0,), (KEEP, SWAP))) == 10
    assert swapped_bytes(ROWS, StagePlan(2, 5, 1, (1,), (SWAP, SWAP, SWAP))) == 3 + 10 + 5 + 2
    assert swapped_bytes(ROWS, StagePlan(2, 5, 1, (1,), (SWAP, KEEP, KEEP))) == 3


def swapping(plan: Plan, memory: str, pcie: float, **columns: object) -> Setup:
    """Return a setup whose layers swap (s) and keep (k) in turn, with bytes of real tensors."""
    setup = setup_of(Mlp(), plan, columns)
    words = {"k": KEEP, "s": SWAP}
    policies = [words[memory[index % len(memory)]] for index in range(len(setup.graph.layers))]
    stages = [replace(each, memory=tuple(policies[each.start : each.stop])) for each in setup.plan.stages]
    swaps = tuple(index for index, each in enumerate(stages) if SWAP in each.memory)
    chosen = replace(setup.plan, stages=tuple(stages))
    level = Level("server", setup.pipeline.num_workers, 2000.0, 1e-2)
    unit_costs, real = setup.costs, stage_costs(profile_of(setup), chosen)
    costs = replace(
        unit_costs,
        stages=tuple(replace(a, swap_bytes=b.swap_bytes) for a, b in zip(unit_costs.stages, real.stages, strict=True)),
    )
    return replace(
        setup, plan=chosen, pipeline=replace(setup.pipeline, swaps=swaps), costs=costs,
        cluster=Cluster("hosts", "unit", None, (level,), pcie_bytes_per_s=pcie),
    )  # fmt: skip


CASES = [
    pytest.param(STRAIGHT, {"weights": "stash"}, id="pipedream"),
    pytest.param(FOUR, {"weights": "one", "order": "all-forwards", "microbatches": 2}, id="gpipe"),
    pytest.param(
        STRAIGHT, {"weights": "one", "order": "zero-bubble", "backward": "split", "microbatches": 2}, id="split"
    ),
    pytest.param(FOUR, {"weights": "one", "order": "interleaved", "chunks": 2, "microbatches": 2}, id="interleaved"),
    pytest.param(([3, 5], [2, 1, 1]), {"weights": "stash"}, id="replicated"),
]  # fmt: skip


@pytest.mark.sampled(6)
@pytest.mark.parametrize("pcie", [150.0, 1e5])
@pytest.mark.parametrize("memory", ["s", "ssk"])
@pytest.mark.parametrize(("plan", "columns"), CASES)
def test_all_swapped_bytes_come_back_and_none_remain(
    plan: Plan, columns: dict[str, object], memory: str, pcie: float
) -> None:
    setup = swapping(plan, memory, pcie, **columns)
    found, kept = metered(setup, whole=True), metered(unswapped(setup), whole=True)
    leaves = [memories_of(setup)[index].swapped[2] > 0 for index in range(setup.pipeline.num_stages)]
    assert any(leaves)
    left = {number for number, kind in enumerate(KINDS) if kind in (WEIGHTS, MASTERS, STATE)}
    for worker, (curve, peak, host_peak) in enumerate(zip(found.curves, found.peaks, found.host_peaks, strict=True)):
        assert (np.diff(curve.times_s) >= 0).all()
        assert (curve.num_bytes >= 0).all()
        assert (curve.host_bytes >= 0).all()
        assert {*np.flatnonzero(curve.num_bytes[:, -1])} <= left
        assert curve.host_bytes[-1] == 0
        assert host_peak == curve.host_bytes.max()
        assert (host_peak > 0) == any(leaves[stage] for stage in setup.pipeline.stages_of(worker))
        assert peak.num_bytes == curve.num_bytes.sum(axis=0).max()
    assert not any(kept.host_peaks)
    assert most_activations(found)[0] <= most_activations(kept)[0]


def unswapped(setup: Setup) -> Setup:
    stages = tuple(replace(each, memory=(KEEP,) * len(each.memory)) for each in setup.plan.stages)
    return replace(setup, plan=replace(setup.plan, stages=stages), pipeline=replace(setup.pipeline, swaps=()))


def most_activations(found: MemoryTimeline) -> list[int]:
    return [int(curve.num_bytes[KINDS.index(ACTIVATIONS)].max()) for curve in found.curves]


def test_a_stage_that_swaps_all_keeps_at_most_three_units_however_many_are_in_flight() -> None:
    """One runs forward or leaves, one runs backward, one comes in: where copies are quick."""
    for depth in (4, 6, 9):
        setup = swapping(FOUR, "s", 1e5, weights="stash", depth=depth)
        memories, in_flight = memories_of(setup), most_in_flight(setup.pipeline)
        found = metered(setup, whole=True, count=24)
        for worker, most in enumerate(most_activations(found)):
            unit, swapped = memories[worker].unit[4], memories[worker].swapped[4]
            units = in_flight[worker]
            assert most <= units * (unit - swapped) + min(units, 3) * swapped
            assert found.host_peaks[worker] <= units * swapped
        keeps = most_activations(metered(unswapped(setup), whole=True, count=24))
        assert keeps[0] == depth * memories[0].unit[4]
        assert most_activations(found)[0] <= 3 / depth * keeps[0]


def test_a_long_run_keeps_its_first_part_and_all_of_its_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = swapping(FOUR, "s", 300.0, weights="stash")
    whole = metered(setup, whole=True, count=60)
    monkeypatch.setattr(memory_meter, "RECORDED_CHANGES", 100)
    folded = metered(setup, whole=True, count=60)
    assert (folded.peaks, folded.host_peaks) == (whole.peaks, whole.host_peaks)
    assert len(folded.curves[0].times_s) < len(whole.curves[0].times_s)
    for short, long in zip(folded.curves, whole.curves, strict=True):
        count = len(short.times_s)
        assert (short.num_bytes == long.num_bytes[:, :count]).all()
        assert (short.host_bytes == long.host_bytes[:count]).all()


class Labels:
    """Enough of a data set to walk a model."""

    inputs, targets, targets_apart = ("x",), ("label",), True

    def loss(self, output: torch.Tensor, targets: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional.cross_entropy(output, targets["label"])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MODELS)
def test_predicted_bytes_of_any_policies_equal_a_replica_s(name: str) -> None:
    """To the byte, in one stage and in two, whatever is kept, swapped and recomputed, copies of buffers included."""
    make, data = MODELS[name]
    ((x, label),), draw = data(1), random.Random(name)
    graph = trace(make())
    root, count = copy.deepcopy(graph.root).train(), len(graph.layers)
    rows = walk(graph, root, cast("Any", Labels()), {"x": x, "label": label}, lambda work: (work(), lambda: 1.0))
    for trial in range(6):
        starts = [] if trial % 2 or name == "tied" else [draw.randrange(1, count)]
        policies = [draw.choice((KEEP, SWAP, RECOMPUTE)) for _ in range(count)]
        values: dict[int, Any] = {}
        for (start, stop), replica in zip(
            itertools.pairwise([0, *starts, count]), replicas_of(make(), starts, policies), strict=True
        ):
            stage = replica.stage
            received = {layer: values[layer] for layers in stage.receives.values() for layer in layers}
            loss = (lambda output: functional.cross_entropy(output, label)) if stage.is_last else None
            out, _ = replica.forward(UnitInput(0, (0, 0), [x for _ in stage.inputs], received, 0, loss=loss))
            values |= out
            plan = StagePlan(start, stop, 1, (0,), as_they_run(graph.layers, policies)[start:stop])
            kept, swapped = kept_bytes(rows, plan, {}), swapped_bytes(rows, plan)
            assert replica._in_flight[0].num_bytes == kept, (policies, starts)
            assert (replica.swap_out(0) if stage.swapped else 0) == swapped, (policies, starts)
            assert replica._in_flight[0].num_bytes == kept - swapped
