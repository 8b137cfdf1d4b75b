"""Occupancy over time, for given events and against the fractions of a whole run."""

import numpy as np
import pytest

from pipebench.schedule.pipeline import Pipeline, chain
from pipebench.simulate.meter import Meter, fractions
from pipebench.simulate.occupancy import COMMUNICATING, COMPUTING, IDLE, STATES, OccupancyMeter
from pipebench.simulate.simulation import TimelineEvent
from pipebench.simulate.steady import simulate_all
from tests.instruction_text import parse
from tests.support import Mlp, make_setup


def test_shares_of_given_events() -> None:
    """Worker 0 computes from 1 to 3 and from 4 to 6, and waits from 6 to 8 for what sets out at 7; worker 1 sends."""
    meter = OccupancyMeter(Pipeline((1, 1), chain(2), "1f1b", True, 1))
    meter.event(TimelineEvent(0.0, 1.0, 0, parse("0L0")))
    meter.event(TimelineEvent(1.0, 3.0, 0, parse("0F0@0")))
    meter.event(TimelineEvent(3.0, 3.0, 0, parse("0SA0>1")))
    meter.event(TimelineEvent(4.0, 6.0, 0, parse("0B0@0")))
    meter.event(TimelineEvent(6.0, 8.0, 0, parse("0RG1<1"), 1.0))
    meter.event(TimelineEvent(0.0, 4.0, 1, parse("1SG0>0")))
    found = meter.occupancy(4)
    assert (found.worker_names, found.end_s) == (("stage 0", "stage 1"), 8.0)
    expected = {
        COMPUTING: [[0.5, 0.5, 1.0, 0.0], [0.0] * 4],
        COMMUNICATING: [[0.0, 0.0, 0.0, 0.5], [1.0, 1.0, 0.0, 0.0]],
        IDLE: [[0.5, 0.5, 0.0, 0.5], [0.0, 0.0, 1.0, 1.0]],
    }
    for number, state in enumerate(STATES):
        np.testing.assert_allclose(found.shares[:, number], expected[state], atol=1e-12)


@pytest.mark.parametrize("plan", [([3, 5], [1, 1, 1]), ([3, 5], [2, 1, 1])], ids=str)
def test_shares_add_up_to_the_fractions_of_the_run(plan: tuple[list[int], list[int]]) -> None:
    setup = make_setup(Mlp(), plan)
    occupancy = OccupancyMeter(setup.pipeline)
    totals = simulate_all(setup, 12, Meter(setup.pipeline, occupancy))
    found = occupancy.occupancy(50)
    assert found.end_s == pytest.approx(totals.end_s)
    assert (found.shares >= 0).all()
    np.testing.assert_allclose(found.shares.sum(axis=1), 1.0)
    means = found.shares.mean(axis=(0, 2))
    expected = fractions(totals.busy_s, totals.stall_s, setup.pipeline.num_workers, totals.end_s)
    assert 1 - means[STATES.index(COMPUTING)] == pytest.approx(expected["bubble_fraction"])
    assert means[STATES.index(COMMUNICATING)] == pytest.approx(expected["comm_stall_fraction"])
