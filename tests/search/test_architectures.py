"""An architecture's costs are those of a model built without the other cells."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from pipebench.errors import GraphError
from pipebench.extensions.search.architectures import Architectures
from pipebench.extensions.search.strategy import steps_of
from pipebench.extensions.search.trace_file import ArchitectureChange
from pipebench.model.graph import trace
from pipebench.model.plan import make_plan
from pipebench.profile.analytic import analytic_profile
from pipebench.profile.devices import device_of
from pipebench.profile.model import LayerProfile, Profile
from pipebench.profile.request import ProfileRequest
from pipebench.recipe.schema import OptimizerRecipe
from pipebench.simulate.costs import stage_costs
from tests.model.test_cells import Stack
from tests.support import Blobs, flat_cluster

# Its launches take longer than most kernels of the model, so that times identify the device.
SLOW_HOST = replace(flat_cluster(1), device="V100", launch_s=1e-3, pause_s=1e-4)
ADAM = OptimizerRecipe("adam", 0.1)


@cache
def computed(names: str = "abcd") -> tuple[Any, Profile]:
    graph = trace(Stack(names))
    return graph, analytic_profile(ProfileRequest(graph, Blobs(), (2, 4), ADAM, "stack"), device_of(SLOW_HOST))


def architectures(profile: Profile | None = None) -> Architectures:
    graph, known = computed()
    return Architectures(graph, profile or known, Blobs(), ADAM, SLOW_HOST, ["cells.*"])


def active(profile: Profile, size: int) -> list[LayerProfile]:
    """Return the rows of active layers, numbered and named as those of a model that has no others."""
    rows = profile.layers[size]
    kept = [i for i, row in enumerate(rows) if row.output_bytes or row.name == "loss"]
    place = {old: new for new, old in enumerate(kept)}
    return [
        replace(
            rows[i],
            name="",
            reads=tuple(place[read] for read in rows[i].reads),
            saved_with=tuple((place[other], size) for other, size in rows[i].saved_with),
        )
        for i in kept
    ]


@pytest.mark.parametrize("left_out", ["a", "bc", "abcd", "d", ""])
def test_costs_are_those_of_the_model_built_without_the_cells(left_out: str) -> None:
    there = architectures()
    cells = there.all - {"abcd".index(name) for name in left_out}
    graph, profile = there.form(cells)
    small, expected = computed("".join(name for name in "abcd" if name not in left_out))
    for size in (2, 4):
        assert active(profile, size) == active(expected, size)
    assert there.num_layers(cells) == len(small.layers)
    whole = stage_costs(profile, make_plan(graph, [], [1])), stage_costs(expected, make_plan(small, [], [1]))
    assert whole[0].stages == whole[1].stages


def test_measured_times_are_reused_and_bytes_are_computed() -> None:
    _, known = computed()
    times = {
        size: tuple(replace(row, forward_s=1.0 + i, backward_s=2.0 + i, weight_s=0.5) for i, row in enumerate(rows))
        for size, rows in known.layers.items()
    }
    there = architectures(replace(known, source="measured", layers=times))
    found = there.form(there.all - {1})[1].layers[4]
    bytes_only = architectures().form(there.all - {1})[1].layers[4]
    for index, (row, bare) in enumerate(zip(found, bytes_only, strict=True)):
        is_idle = index in there.cells[1].layers
        forward_s, backward_s, weight_s = (0.0, 0.0, 0.0) if is_idle else (1.0 + index, 2.0 + index, 0.5)
        assert row == replace(bare, forward_s=forward_s, backward_s=backward_s, weight_s=weight_s)


def test_layers_are_activated_by_whole_cells_of_a_stage() -> None:
    there = architectures()
    plan = make_plan(computed()[0], [there.cells[2].layers[0]], [1, 1])
    events = [
        ArchitectureChange(10, delete=8, stage=0), ArchitectureChange(20, add=1, stage=0),
        ArchitectureChange(30, delete=7, stage=1),
        ArchitectureChange(40, cells=["cells.[ab]"]),
    ]  # fmt: skip
    steps = steps_of(events, there, there.all, plan, "t.json")
    assert [step.minibatch for step in steps] == [10, 20, 30, 40]
    assert [{*step.cells} for step in steps] == [{2, 3}, {0, 2, 3}, {0, 3}, {0, 1}]


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (
            ArchitectureChange(1, add=1, stage=0),
            r"t.json: events\[0\]: got 1 layers to add, .* stage 0 that are left out have 0",
        ),
        (
            ArchitectureChange(1, delete=15, stage=0),
            r"got 15 layers to delete, and the cells of stage 0 that are there have 14",
        ),
        (ArchitectureChange(1, delete=1, stage=2), r"events\[0\].stage: got 2, allowed are 0 to 1"),
        (
            ArchitectureChange(1, cells=["cell.a"]),
            r"events\[0\].cells: no cell of the search is called 'cell.a'; did you mean",
        ),
    ],
)
def test_a_trace_that_the_model_can_not_follow_is_refused(event: ArchitectureChange, message: str) -> None:
    there = architectures()
    plan = make_plan(computed()[0], [there.cells[2].layers[0]], [1, 1])
    with pytest.raises(GraphError, match=message):
        steps_of([event], there, there.all, plan, "t.json")


def test_tensors_of_the_whole_model_are_not_copied() -> None:
    there = architectures()
    graph, _ = there.form(frozenset({0}))
    assert isinstance(graph.model, nn.Module)
    assert all(isinstance(parameter, torch.Tensor) for parameter in graph.model.parameters())
    assert there.form(frozenset({0}))[0] is graph, "an architecture that comes back isn't computed again"
