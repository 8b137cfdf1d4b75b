"""The pairs of sides that are compared, and their rows of a table: ratios with the prediction beside."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from tests.bench.pairs import Ratio, median_and_range
from tests.bench.processes import figure15, jobs, workers
from tests.bench.processes.comparison import Comparison
from tests.bench.processes.machine import Machine
from tests.bench.processes.references import DDP, FSDP, GPIPE, ONE_F_ONE_B
from tests.bench.processes.sides import ALONE, OURS, PLAIN, REFERENCES, Given, subject_of

SHORT, LONG, FEW = 16, 96, 8  # minibatches; the long segment's fill and drain are about 1% of it
HEAD = (
    "what", "ratio (median)", "range", "target", "verdict", "work", "samples/s, theirs", "ours", "predicted", "error",
)  # fmt: skip


COMPARED = (GPIPE, ONE_F_ONE_B, DDP, FSDP)
# Largest distance of float64 weights after two updates from a plain loop's, relative to the distance that they moved.
# Adding microbatches in another order makes 1e-13, another computation more than 1e-2. In float32, BatchNorm on few
# samples would make 1e-3 of the order alone.
_LARGEST_DISTANCE = 1e-9


class Row(NamedTuple):
    """A comparison of two sides, whose names may end with settings (`single+tf32`)."""

    ours: str
    theirs: str
    target: float = 0.0  # smallest ratio wanted; 0 for none
    num_minibatches: int = SHORT


ON_CPU = (
    Row(GPIPE, GPIPE),  # against itself: the noise of this machine today
    Row(OURS[GPIPE], GPIPE, 1.0),
    Row(OURS[ONE_F_ONE_B], ONE_F_ONE_B, 1.0),
    Row(OURS[DDP], DDP, 1.0),
    Row(OURS[FSDP], FSDP, 1.2),
    Row(OURS[ALONE], ALONE, 0.95, LONG),
    Row(OURS[ALONE], OURS[GPIPE]),
)
_SINGLE = OURS[PLAIN]


def gains(base: str, settings: Sequence[str]) -> list[Row]:
    """Return a row per setting: ours with it against ours without."""
    return [Row(f"{base}+{setting}", base) for setting in settings]


SETTINGS_ON_CPU = (
    Row(_SINGLE, PLAIN, 0.98),
    Row(f"{_SINGLE}+compile", f"{PLAIN}+compile"),
    *gains(_SINGLE, ("compile", "channels_last", "unfused")),
)
_PRECISIONS = ("", "+tf32", "+bf16")
SINGLE_ON_GPU = (
    Row(PLAIN, PLAIN),  # against itself: the noise of this machine today
    *(Row(_SINGLE + p + d, PLAIN + p + d, 0.98) for p in _PRECISIONS for d in ("", "+free")),
    Row(f"{_SINGLE}+free+compile", f"{PLAIN}+free+compile"),
    *gains(_SINGLE, ("free",)),
    *gains(f"{_SINGLE}+free", ("tf32", "bf16", "compile", "channels_last", "unfused", "untried")),
    *gains(f"{_SINGLE}+free+bf16", ("compile", "channels_last", "compile+channels_last")),
)
SHORT_ON_GPU = (*SINGLE_ON_GPU[:2], Row(f"{_SINGLE}+free", f"{PLAIN}+free", 0.98))
TORCHS_ON_GPU = tuple(
    Row(f"{a}+free", f"{b}+free", target)
    for a, b, target in (
        (GPIPE, GPIPE, 0.0),
        (OURS[GPIPE], GPIPE, 1.0),
        (OURS[ONE_F_ONE_B], ONE_F_ONE_B, 1.0),
        (OURS[DDP], DDP, 1.0),
        (OURS[ALONE], ONE_F_ONE_B, 0.0),
    )
)


def distances(given: Given, sides: Sequence[str], environment: Mapping[str, str]) -> Iterator[str]:
    """Train each side in two processes, and a plain loop, for two updates; yield a sentence about their distance."""
    in_double = replace(given, subject=replace(given.subject, double=True))
    arguments = {"given": in_double.to_json(), "sides": sides, "steps": 2}
    found = workers.run(jobs.distances, 2, arguments, environment=environment, device=given.subject.device)
    for side, distance in zip(sides, map(max, zip(*found, strict=True)), strict=True):
        verdict = "the same work" if distance <= _LARGEST_DISTANCE else "NOT THE SAME WORK"
        yield f"{side} against a plain loop, 2 updates in double precision: relative distance {distance:.1e}, {verdict}"


def rows_of(
    given: Given, found: Machine, rows: Sequence[Row], pairs: int, environment: Mapping[str, str]
) -> list[list[str]]:
    """Compare row after row in one group of workers; return the cells of `HEAD` of every row.

    Args:
        given: what sides are made from.
        found: measurements of the machine, made with the settings of `given.subject`: only sides with these settings
            are predicted.
        rows: the comparisons.
        pairs: interleaved pairs of measurements per comparison.
        environment: variables of the workers.
    """
    num_processes = found.cluster.num_workers
    arguments = {"given": given.to_json(), "rows": rows, "pairs": pairs}
    comparisons = workers.run(
        jobs.comparisons, num_processes, arguments, environment=environment, limit_s=7200, device=given.subject.device
    )[0]
    cells = []
    for fields, row in zip(comparisons, rows, strict=True):
        result = Comparison(**{**fields, "speeds": tuple(fields["speeds"])})
        samples = row.num_minibatches * given.subject.minibatch_size
        mode = row.ours.split("+")[0]
        known = mode not in REFERENCES and subject_of(given, row.ours) == given.subject
        predicted = _prediction(given, found, mode, row.num_minibatches, result.ours_s) if known else ["-", "-"]
        rates = [f"{samples / seconds:,.0f}" for seconds in (result.theirs_s, result.ours_s)]
        cells.append([result.what, *ratio_cells(result.ratio), f"{result.work:.3f}", *rates, *predicted])
    return cells


def _prediction(given: Given, found: Machine, mode: str, num_minibatches: int, measured_s: float) -> list[str]:
    predicted_s = figure15.predicted_s(given.subject, given.case(mode), found, num_minibatches)
    rate = num_minibatches * given.subject.minibatch_size / predicted_s
    return [f"{rate:,.0f}", f"{measured_s / predicted_s - 1:+.1%}"]


def ratio_cells(ratio: Ratio) -> list[str]:
    """Return a ratio's median, range, target and verdict."""
    target = (f"{ratio.target:.2f}", ratio.verdict) if ratio.target else ("-", "-")
    return [*median_and_range(ratio.values, ".3f"), *target]
