"""Occupancy over time as an image: the share of time that every worker computes, communicates or is idle."""

from typing import Final

import numpy as np

from pipebench.formats import percent
from pipebench.show.inline import InlineFigure
from pipebench.show.over_time import MOST_ROWS, Map, Stacks, map_figure, stacks_figure
from pipebench.simulate.occupancy import COMMUNICATING, COMPUTING, IDLE, STATES, Occupancy

MADE_BY = "pipebench occupancy"
COLOURS: Final = {COMPUTING: "#56B4E9", COMMUNICATING: "#D55E00", IDLE: "#E8E8E8"}


def occupancy_figure(occupancy: Occupancy) -> InlineFigure:
    """Return a picture of workers' occupancy: a row per worker; for many workers the mean above a map of all."""
    assert tuple(COLOURS) == STATES
    shares, names = occupancy.shares, occupancy.worker_names
    few = len(names) <= MOST_ROWS
    stacks = Stacks(
        worker_names=names if few else [f"mean of {len(names)}"],
        heights=shares if few else shares.mean(axis=0, keepdims=True),
        colours=COLOURS,
        end_s=occupancy.end_s,
        top=1.0,
        unit="share of the time",
        title=f"simulated, all workers: {_said(shares.mean(axis=(0, 2)))}",
        notes=[_said(mean) for mean in shares.mean(axis=2)] if few else [""],
    )
    if few:
        return stacks_figure(stacks, MADE_BY)[0]
    values = Map(names, np.asarray(shares[:, STATES.index(COMPUTING)]), f"share of the time {COMPUTING}", 1.0)
    return map_figure(stacks, values, MADE_BY)[0]


def _said(shares: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]") -> str:
    computing, communicating, idle = (percent(float(share)) for share in shares)
    return f"computes {computing}, waits for bytes {communicating}, for others {idle}"
