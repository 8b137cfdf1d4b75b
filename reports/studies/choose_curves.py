"""Draw `choose.png`, samples per second against workers up to 4,096: `python -m reports.studies.choose_curves`.

Every curve is a mode of one model on one cluster, simulated at every number of workers. `choose_curves.json` has the
curves and the CPU seconds that each took; those it lacks are simulated first.
"""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from reports.studies.choose import CASES, SERVERS, Study, store, stored

CURVES = Path(__file__).with_name("choose_curves.json")
PICTURE = Path(__file__).parents[1] / "choose.png"
TITLE = "GPT 124 M"
WORKERS = (8, 64, 512, 4096)
MODES = {"dp": "#000000", "zero1": "#0072B2", "fsdp": "#D55E00", "pipedream-flush": "#009E73"}


def make() -> dict[str, Any]:
    """Simulate the curves that are missing; return all."""
    curves = stored(CURVES)
    study = Study(next(case for case in CASES if case.title == TITLE))
    for mode in MODES:
        for cluster in SERVERS:
            key = f"{mode} | {cluster}"
            if key in curves:
                continue
            study.fastest(mode, cluster, WORKERS[0])  # makes the profile, which isn't part of the curve's seconds
            began_s = time.process_time()
            found = [study.fastest(mode, cluster, count) for count in WORKERS]
            seconds = round(time.process_time() - began_s, 1)
            curves[key] = {"seconds": seconds, "samples_per_s": [each.samples_per_s * each.fits for each in found]}
            store(curves, CURVES)
            print(f"{key}: {seconds} s", file=sys.stderr, flush=True)
    return curves


def draw(curves: Mapping[str, Any]) -> None:
    """Write the picture: a panel per cluster, samples per second and worker."""
    figure = Figure(figsize=(10.5, 3.2), layout="constrained")
    for panel, cluster in zip(figure.subplots(1, len(SERVERS)), SERVERS, strict=True):
        for mode, colour in MODES.items():
            rates = curves.get(f"{mode} | {cluster}", {"samples_per_s": []})["samples_per_s"]
            points = [(count, rate / count) for count, rate in zip(WORKERS, rates, strict=False) if rate]
            panel.plot(*zip(*points, strict=True), color=colour, marker=".", linewidth=1.4, label=mode)
        panel.set_xscale("log", base=8)
        panel.set_xticks(WORKERS, [f"{count:,}" for count in WORKERS])
        panel.set_ylim(0, None)
        panel.set_title(cluster, fontsize=9)
        panel.set_xlabel("workers", fontsize=8)
        panel.grid(alpha=0.3)
        panel.tick_params(labelsize=8)
    figure.axes[0].set_ylabel(f"{TITLE}: samples/s per worker", fontsize=8)
    figure.axes[0].legend(fontsize=7)
    figure.savefig(PICTURE, dpi=80)


if __name__ == "__main__":
    draw(make())
