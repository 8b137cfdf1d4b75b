"""Evaluated reports made by hand, with every element that a page can have, for tests of rendering."""

import math
from dataclasses import replace
from pathlib import Path

from pipebench.report.definition import (
    Calibration,
    Column,
    Constant,
    Measure,
    Picture,
    Published,
    PublishedClaim,
    Report,
    Row,
)
from pipebench.report.evaluated import (
    ALL,
    KEPT,
    NO,
    NOT_BY_CONSTRUCTION,
    UNTESTABLE,
    YES,
    Evaluated,
    Origin,
    Score,
    TableCell,
    Verdict,
)
from pipebench.train.result import MISSED, Point, RunResult
from tests.results import DP

PLAN = Measure("plan", "configuration", plan_of="chosen")
SPEEDUP = Measure("speedup", "epoch-time speed-up", "x", better="higher")
MEMORY = Measure("memory", "peak memory", "bytes", better="lower")
IDEAL, CALIBRATED = Column("ideal", "ideal hardware"), Column("calibrated", "clusters of 2019")
# Row, title, published plan and speed-up; plan and speed-up in both columns.
_GIVEN = (
    ("vgg", "VGG-16, 4x4 (A)", "15-1", 5.28, ("15-1", 2.66), ("15-1", 5.22)),
    ("gnmt", "GNMT-16 | 4x4 (A)", "straight", 2.34, ("2-1-1", 3.88), ("straight", 2.62)),
    ("resnet", "ResNet-50, 4x4 (A)", "16", 1.0, ("16", 1.0), ("16", 1.0)),
    ("awd", "AWD LM, <1x4> (A)", "straight", 4.25, ("4", 0.76), ("straight", 3.85)),
)
PICTURES = (
    Picture("bars", ("speedup",)),
    Picture("scatter", ("speedup",)),
    Picture("lines", ("speedup",), x="gpus", group="model"),
    Picture("curves", runs=("dp", "pipedream"), metric="top1", over=("epochs", "virtual_time_s"), row="vgg"),
    Picture("stages", runs=("dp", "pipedream"), metric="forward_s", row="vgg"),
    Picture("schedule", runs=("pipedream",), row="vgg"),
)
ROWS = tuple(
    Row(
        name, title, {},
        {"plan": Published(plan), "speedup": Published(value)},
        where="Section 5.3" if name == "awd" else "",
        by_construction={"speedup": "both are data parallel"} if name == "resnet" else {},
        hypothesis={"speedup": "80 is the global minibatch"} if name == "awd" else {},
        note="The text says *about* 4." if name == "awd" else "",
        at={"gpus": index + 1, "model": "A <b>"},
    )
    for index, (name, title, plan, value, *_) in enumerate(_GIVEN)
)  # fmt: skip
REPORT = Report(
    "made",
    Path("made.yaml"),
    "Table 1 & <script>alert(1)</script>",
    (IDEAL, CALIBRATED),
    (PLAN, SPEEDUP, MEMORY),
    ROWS,
    paper="PipeDream (SOSP'19)",
    where="Table 1",
    claims=(
        PublishedClaim("never slower", "Section 5.2"),
        PublishedClaim("on real wires", untestable="needs 256 GPUs"),
    ),
    pictures=PICTURES,
    calibration=Calibration(
        "calibrated",
        (Constant("ring_a", "cluster-a-2019", "levels.server.ring", "1 GB/s", "9 GB/s", (("vgg", "speedup"),)),),
    ),
)


def origin(name: str, seed: int = 0, run_id: str = "", reused: str | None = None) -> Origin:
    engine, data = ("virtual", "5,000 digits") if name == "dp_small" else ("simulated", "")
    experiment_id = "7" if run_id else ""
    words = (
        f"made/{name}",
        "x=0",
        "x=1|2",
        *((f"train.seed={seed}",) if name == "dp_small" else ()),
    )  # the column's x wins
    return Origin(
        name, words, engine, "analytic: V100", data, seed, "", reused, run_id, experiment_id, "torch 2", "2026-11-22"
    )


def cells() -> tuple[TableCell, ...]:
    """Return the cells, in the report's order."""
    made = []
    for row, (name, _, _, _, *values) in zip(ROWS, _GIVEN, strict=True):
        for column, (plan, speedup) in zip((IDEAL, CALIBRATED), values, strict=True):
            origins = (origin("dp", run_id=f"<{name}>"), origin("pipedream"))
            common = TableCell(name, "plan", column.name, plan, published=row.published["plan"], origins=origins[1:])
            differs = (name, column) == ("gnmt", IDEAL)
            made.append(replace(common, reason="15-1 takes +41 % time: stage 1 computes 9.4 ms" if differs else None))
            made.append(
                TableCell(
                    name,
                    "speedup",
                    column.name,
                    speedup,
                    published=row.published["speedup"],
                    origins=origins,
                    fitted=name == "vgg" and column is CALIBRATED,
                    by_construction=row.by_construction.get("speedup"),
                    hypothesis=row.hypothesis.get("speedup"),
                )
            )
    seeds = tuple(origin("dp_small", seed, reused=KEPT) for seed in (0, 1, 2))
    made += [
        TableCell("vgg", "memory", "ideal", 3e9, 2.5e9, 3.5e9, remarks=("2 of 3 seeds",), origins=seeds),
        TableCell("vgg", "memory", "calibrated", problem=MISSED, origins=seeds),
        TableCell("awd", "memory", "ideal", problem="did not fit in memory: stage 0 needs 20 GB of 16 GB"),
    ]
    return tuple(made)


def trained(name: str, rate: float, seed: int = 0) -> RunResult:
    """Return a run whose top-1 rises at a rate, 4,000 samples and 1.8 seconds per epoch."""
    points = tuple(
        Point(4000 * n, 1.8 * n, {"top1": 1 - math.exp(-rate * n - 0.1 * seed)}) for n in range(1, 7)
    )  # fmt: skip
    met = next(point for point in points if point.metrics["top1"] >= 0.9)
    times = {"epoch_time_s": 1.8, "throughput_samples_per_s": 4000 / 1.8, "time_to_accuracy_s": met.clock_s}
    recipe = {"train.target.metric": "top1", "train.target.value": "0.9"}
    return replace(DP, name=name, seed=seed, points=points, metrics={**DP.metrics, **times}, recipe=recipe)


def evaluated() -> Evaluated:
    results = {
        ("vgg", run, column): tuple(trained(run, rate, seed) for seed in (0, 1))
        for run, rate in (("dp", 0.8), ("pipedream", 0.6))
        for column in ("ideal", "calibrated")
    }
    slower, untested = REPORT.claims
    return Evaluated(
        REPORT,
        cells(),
        (
            Score("ideal", "speedup", ALL, 4, 0.9, 0.2),
            Score("calibrated", "speedup", NOT_BY_CONSTRUCTION, 3, 0.08, None),
        ),
        (
            Verdict(slower, "ideal", NO, "min = 0.76"),
            Verdict(slower, "calibrated", YES, "min = 1"),
            Verdict(untested, "", UNTESTABLE, "needs 256 GPUs"),
        ),
        results,
        server="http://127.0.0.1:5000",
        drawings={("vgg", "pipedream"): "worker 0  F0 F1 .  B0\nworker 1  .  F0 B0 <"},
        command="pipebench report made",
        about="What **it** is about.\n\n![not from here](https://example.org/a.png) <img src=x onerror=alert(1)>",
    )
