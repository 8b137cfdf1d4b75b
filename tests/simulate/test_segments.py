"""Segments that begin anywhere in an epoch with a short last minibatch: they equal a full simulation."""

from dataclasses import replace
from typing import Any

import pytest

from pipebench.cluster import Cluster, Level
from pipebench.model.sampling import Size
from pipebench.simulate import steady
from pipebench.simulate.costs import Crossing
from pipebench.simulate.segments import Segments
from pipebench.simulate.steady import simulate_all, simulate_segment
from tests.simulate.test_averaging import varying_setup
from tests.support import Blobs, Mlp, make_setup


@pytest.mark.parametrize("order", ["1f1b", "all-forwards"])
@pytest.mark.parametrize(("begin", "length"), [(0, 300), (3, 300), (120, 300), (62, 182)])  # the first, last but two
def test_a_short_minibatch_saves_the_time_of_its_position_in_an_update(begin: int, length: int, order: str) -> None:
    """The stages aren't equally fast, so that a short first minibatch shortens the fill, too, and others don't."""
    columns: dict[str, Any] = {"weights": "one", "accumulate": 5, "order": order}
    setup = make_setup(Mlp(), ([6], [1, 1]), dataset=Blobs(4 * 121 - 3, 4), **columns)
    stages = [
        replace(stage, forward_s={size: size * each for size, each in stage.forward_s.items() if isinstance(size, int)})
        for stage in setup.costs.stages
    ]
    setup = replace(setup, costs=replace(setup.costs, stages=tuple(stages)))
    whole, found = simulate_all(setup, length, first=begin), Segments(setup).totals(begin, length)
    assert found.end_s == pytest.approx(whole.end_s, rel=1e-9)
    assert found.busy_s == pytest.approx(whole.busy_s, rel=1e-9)
    assert found.stall_s == pytest.approx(whole.stall_s, rel=1e-9)
    assert found.num_bytes == whole.num_bytes


@pytest.mark.parametrize(("begin", "length"), [(0, 200), (0, 242), (0, 300), (2, 420), (5, 1100)])
def test_a_short_minibatch_saves_the_time_of_its_position_in_the_steady_state(begin: int, length: int) -> None:
    """Two minibatches take turns, since messages take longer than stages; the later one's turn decides the end.

    So what a second short minibatch saves depends on the first; 0.2.0 added what each of them saves alone.
    """
    cluster = Cluster("flat", "unit", None, (Level("server", 2, 1.0, 0.0),))
    setup = make_setup(Mlp(), ([6], [1, 1]), dataset=Blobs(4 * 121 - 3, 4), cluster=cluster)
    by_size: dict[Size, float] = {size: float(size) for size in range(5)}
    stages = [replace(stage, forward_s=by_size, backward_s=by_size) for stage in setup.costs.stages]
    crossing: Crossing = {(0, 1): {size: 2 * size for size in range(5)}}
    costs = replace(setup.costs, stages=tuple(stages), activation_bytes=crossing, gradient_bytes=crossing)
    setup = replace(setup, costs=costs)
    found = Segments(setup).totals(begin, length)
    assert found.end_s == pytest.approx(simulate_all(setup, length, first=begin).end_s, rel=1e-9)


def test_the_error_of_an_estimate_stays_where_a_short_minibatch_is_in_its_middle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(steady, "_BLOCKS", ())
    monkeypatch.setattr(steady, "_PATIENCE", 48)
    setup = make_setup(Mlp(), ([2, 4, 6], [1] * 4), dataset=Blobs(4 * 200 - 3, 4))
    found = Segments(setup).totals(0, 400)
    assert 48 <= found.num_simulated < 200
    assert found.error_s == simulate_segment(setup, 400).error_s > 0


def test_minibatches_of_varying_length_are_not_exchanged() -> None:
    """What a short one is shorter by isn't that between two draws."""
    setup = varying_setup(([2, 4, 6], [1] * 4), 100, short=3)
    assert Segments(setup).totals(0, 300) == simulate_segment(setup, 300)
