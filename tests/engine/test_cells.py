"""Cells deactivated and reactivated at drains: the state of idle cells is unchanged, active ones are trained."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from pipebench.checkpoint.state import ModelState
from pipebench.engine.setup import Setup
from pipebench.engine.virtual import VirtualEngine
from pipebench.extensions.search.architectures import find_cells, without
from pipebench.model.graph import trace
from pipebench.model.plan import recut
from pipebench.profile.shapes import output_forms
from tests.checkpoint.support import captured
from tests.checkpoint.test_round_trips import OPTIMIZERS, bits
from tests.model.test_cells import Stack
from tests.support import Blobs, make_engine, make_setup, unit_profile

SGD = OPTIMIZERS["fused-momentum"]
NAMES = "abcd"


def whole(names: str = NAMES, cuts: Sequence[str] = ("cells_b_up", "cells_c_drop"), **given: Any) -> Setup:
    """Return a setup of all cells, cut before the layers of these names."""
    torch.default_generator.manual_seed(5)
    graph = trace(Stack(names, plain=given.pop("plain", False)))
    starts = [graph.index_of(cut) for cut in cuts]
    replicas = given.pop("replicas", [1] * (len(starts) + 1))
    settings: dict[str, Any] = {"make_optimizer": SGD, "sizes": (2, 4), **given}
    return make_setup(graph.model, (starts, replicas), graph=graph, repartitions=True, **settings)


def leaving_out(setup: Setup, names: str) -> Setup:
    """Return a setup without some cells; `setup` has all of them."""
    cells = find_cells(setup.graph, ["cells.*"], output_forms(setup.graph, setup.dataset, 4))
    graph = without(setup.graph, [cell for cell in cells if cell.name[-1] in names])
    starts = [stage.start for stage in setup.plan.stages[1:]]
    return replace(setup, graph=graph, profile=idle_rows(setup, graph)).under(recut(graph, setup.plan, starts))


def idle_rows(setup: Setup, graph: Any) -> Any:
    """Return the setup's unit profile without the costs of idle layers."""
    nothing: dict[str, Any] = {
        "forward_s": 0.0, "backward_s": 0.0, "output_bytes": 0, "gradient_bytes": 0, "parameter_sizes": {},
        "buffer_sizes": {},
    }  # fmt: skip
    layers = {
        size: (
            *(
                replace(row, reads=layer.reads, inputs=layer.inputs, **(nothing if layer.idle else {}))
                for row, layer in zip(rows, graph.layers, strict=False)
            ),
            rows[-1],
        )
        for size, rows in setup.profile.layers.items()
    }
    return replace(setup.profile, layers=layers)


def of_cells(state: ModelState, names: str) -> dict[str, bytes]:
    """Return the bits of a state's tensors of some cells: weights, buffers and the optimizer's state."""
    chosen = tuple(f"cells.{name}." for name in names)
    return {key: value for key, value in bits(state).items() if any(name in str(key) for name in chosen)}


CASES: dict[str, Callable[[], Setup]] = {
    "stash": whole,
    "adam": partial(whole, make_optimizer=OPTIMIZERS["adam"]),
    "a flush": partial(whole, weights="one", microbatches=2),
    "replicas": partial(whole, replicas=[2, 1, 2]),
    "recomputed": partial(whole, recompute=True),
    "two buffers": partial(whole, weights="double-buffer", accumulate=3),
    "the mean change": partial(whole, weights="correct"),
    "one worker": partial(whole, cuts=(), weights="one"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_idle_cells_keep_their_bits_and_train_again_once_active(case: str) -> None:
    setup = CASES[case]()
    engine = make_engine(setup)
    engine.train(0, 6)
    before = captured(engine)
    engine.switch_setup(leaving_out(setup, "bc"))
    assert bits(captured(engine)) == bits(before)
    engine.train(6, 6)
    during = captured(engine)
    assert of_cells(during, "bc") == of_cells(before, "bc") != {}
    for name in "ad":
        assert all(of_cells(during, name)[key] != value for key, value in of_cells(before, name).items() if "up" in key)
    engine.switch_setup(setup)
    assert bits(captured(engine)) == bits(during)
    engine.train(12, 6)
    assert of_cells(captured(engine), "bc") != of_cells(before, "bc")


def test_cells_that_begin_idle_keep_their_initial_weights() -> None:
    setup = whole()
    engine = make_engine(leaving_out(setup, "ad"))
    initial = captured(make_engine(setup))
    engine.train(0, 6)
    assert of_cells(captured(engine), "ad") == of_cells(initial, "ad")
    engine.switch_setup(setup)
    engine.train(6, 6)
    assert of_cells(captured(engine), "ad") != of_cells(initial, "ad")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("left_out", ["b", "ad", "abcd", "c"])
@pytest.mark.parametrize("weights", ["one", "stash"])
def test_training_without_cells_equals_a_model_built_without_them(left_out: str, weights: str) -> None:
    setup = whole(cuts=("cells_b_norm",), weights=weights)
    engine = make_engine(leaving_out(setup, left_out))
    rest = "".join(name for name in NAMES if name not in left_out)
    second = next((name for name in rest if name >= "b"), None)
    small = whole(rest, cuts=(f"cells_{second}_norm" if second else "relu",), weights=weights)
    weights_of_whole = setup.graph.model.state_dict()
    small.graph.model.load_state_dict({name: weights_of_whole[name] for name in small.graph.model.state_dict()})
    other = make_engine(small)
    for each in (engine, other):
        each.train(0, 11)
    found = bits(captured(engine))
    assert bits(captured(other)).items() <= found.items()
    assert engine.evaluate() == other.evaluate()
    assert engine.clock_s == other.clock_s
    assert engine.num_bytes == other.num_bytes
    assert engine.peak_bytes == other.peak_bytes


def test_cuts_move_with_idle_cells_and_keep_all_state() -> None:
    setup = whole()
    engine, other = make_engine(setup), make_engine(setup)
    for each in (engine, other):
        each.train(0, 6)
        each.switch_setup(leaving_out(setup, "bc"))
        each.train(6, 6)
    graph = engine.setup.graph
    starts = [graph.index_of("cells_a_up"), graph.index_of("cells_b_drop")]
    before = captured(engine)
    engine.replan(recut(graph, engine.setup.plan, starts))
    assert bits(captured(engine)) == bits(before)
    engine.train(12, 6)
    again = leaving_out(setup, "").under(recut(setup.graph, setup.plan, starts))
    engine.switch_setup(again)
    assert of_cells(captured(engine), "bc") == of_cells(before, "bc")
    engine.train(18, 6)


def test_messages_skip_a_stage_of_idle_layers() -> None:
    setup = whole(cuts=("cells_b_norm", "cells_c_norm"))
    engine = make_engine(leaving_out(setup, "b"))
    assert engine.setup.plan.stages[1].stop - engine.setup.plan.stages[1].start == 7
    assert [*engine.setup.plan.crossings] == [(0, 2)]
    engine.train(0, 9)
    rest = make_engine(whole("acd", cuts=("cells_c_norm",)))
    assert isinstance(engine, VirtualEngine)
    assert engine.evaluate().keys() == rest.evaluate().keys()


def test_the_unit_profiles_equal_those_of_the_model_without_the_cells() -> None:
    setup = leaving_out(whole(), "bc")
    small = trace(Stack("ad"))
    expected = unit_profile(small, Blobs(), [4]).layers[4]
    found = [row for row in setup.profile.layers[4] if row.forward_s or row.name == "loss"]
    assert [replace(row, name="", reads=()) for row in found] == [replace(r, name="", reads=()) for r in expected]


def test_cells_without_momentum_step_beside_others_that_have_some() -> None:
    """Torch 2.14's fused SGD raises a TypeError if only some parameters have a momentum buffer."""
    setup = whole(cuts=(), weights="one", make_optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True))
    engine = make_engine(leaving_out(setup, "b"))
    engine.train(0, 3)
    engine.switch_setup(setup)
    before = captured(engine)
    engine.train(3, 1)
    after = captured(engine)
    for name, parameter in before.parameters.items():
        moved = parameter - after.parameters[name]
        velocity = after.optimizer[name]["momentum_buffer"]
        assert torch.allclose(moved, 0.1 * velocity, rtol=1e-9, atol=1e-15), name
    assert all((name in before.optimizer) == (".b." not in name) for name in before.parameters)
