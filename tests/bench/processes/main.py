"""`python -m tests.bench.processes.main`: pipebench on two processes of one thread against torch's classes and a bound.

Every ratio is speed of ours over speed of the reference, from interleaved pairs in the same processes; memory is ours
over theirs, from separate processes. The profile for all predictions is measured first, in as many processes at once as
a run has, and never adjusted.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from pipebench.model.cores import usable_cores
from pipebench.model.heap import HEAP
from pipebench.simulate.steady import simulate_segment
from tests.bench.pairs import Ratio, median_and_range
from tests.bench.processes import figure15, jobs, machine, memory, traffic, workers
from tests.bench.processes.machine import Machine
from tests.bench.processes.references import FSDP, GPIPE
from tests.bench.processes.rows import COMPARED, FEW, HEAD, ON_CPU, SETTINGS_ON_CPU, Row, distances, rows_of
from tests.bench.processes.sides import ALONE, OURS, Given
from tests.bench.processes.subject import Subject, cut_at, make_setup

PARTS = ("speed", "single", "memory", "traffic", "figure15", "crowded")
NUM_PAIRS = 7
PICTURE = Path("reports", "figure15_miniature.png")
# Environment for the memory of sharded sides: the heap returns freed blocks, else it would seem that gathered weights
# aren't freed.
_RETURNS_FREED = {"MALLOC_MMAP_THRESHOLD_": "65536"}
# Targets of predictions.
_CROWDED_ERROR = 0.10  # largest error where processes share cores
_CASES, _CORRELATION, _MEAN_ERROR = 24, 0.99, 0.04  # of figure 15: fewest cases, least correlation, largest error


def main() -> None:
    options = _options()
    console = Console(width=150)
    subject = Subject(width=options.width)
    if options.given is not None:  # this command is the one that `_traffic_apart` starts
        _print_traffic(console, Given.from_json(json.loads(options.given.read_text())), options)
        return
    environment = {} if options.plain_malloc else HEAP
    console.print(f"torch {torch.__version__}, {platform.machine()}, 2 processes of 1 thread; {subject}")
    console.print(f"{os.cpu_count()} processors, load average of the minute before {os.getloadavg()[0]:.2f}")
    if environment:
        console.print("every process: " + " ".join(f"{key}={value}" for key, value in environment.items()))
    if {*options.parts} & {"speed", "memory", "traffic"}:
        _against_torch(console, subject, options, environment)
    if "single" in options.parts and not options.references:
        alone = machine.measure(subject, 1, environment)
        given = Given(subject, 1, alone.profile, alone.cluster)
        console.print(_speed(given, alone, SETTINGS_ON_CPU, options.pairs, environment))
    for part, num_processes in (("figure15", 2), ("crowded", 3)):
        if part in options.parts and not options.references:
            _print_figure15(console, subject, num_processes, options.rounds, environment)


def _against_torch(
    console: Console, subject: Subject, options: argparse.Namespace, environment: dict[str, str]
) -> None:
    found = machine.measure(subject, 2, environment)
    cut = options.cut or cut_at(found.profile, subject.minibatch_size)
    given = Given(subject, cut, found.profile, found.cluster, found.host)
    _print_given(console, given)
    if "speed" in options.parts:
        sides = [*COMPARED, *([] if options.references else [OURS[side] for side in COMPARED])]
        console.print("\n".join(distances(given, sides, environment)))
        rows = [Row(name, GPIPE) for name in COMPARED] if options.references else ON_CPU
        console.print(_speed(given, found, rows, options.pairs, environment))
    if "memory" in options.parts:
        console.print(_memory(given, options, environment))
    if "traffic" in options.parts:
        _traffic_apart(given, options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure pipebench's processes against torch's, side by side.")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--width", type=float, default=0.25, help="of VGG-16; 1.0 takes about ten times as long")
    parser.add_argument("--cut", type=int, help="first layer of the second stage; without, where the profile balances")
    parser.add_argument("--pairs", type=int, default=NUM_PAIRS, help="of speeds")
    parser.add_argument("--memory-pairs", type=int, default=NUM_PAIRS, help="of fresh processes")
    parser.add_argument("--rounds", type=int, default=figure15.ROUNDS, help="of figure 15, and of 3 processes")
    parser.add_argument("--plain-malloc", action="store_true", help="without the settings that pipebench's workers get")
    parser.add_argument("--references", action="store_true", help="measure the references alone")
    parser.add_argument("--given", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _print_given(console: Console, given: Given) -> None:
    subject, profile = given.subject, given.profile
    rows = profile.layers[subject.minibatch_size]
    first, second = (
        sum(row.forward_s + row.backward_s for row in part) for part in (rows[: given.cut], rows[given.cut :])
    )
    (level,) = given.cluster.levels
    console.print(
        f"profile: {profile.note}\ncut before layer {given.cut} ({rows[given.cut].name}): "
        f"{1000 * first:.1f} and {1000 * second:.1f} ms per minibatch; link {level.bandwidth_bytes_per_s / 1e9:.2f} "
        f"GB/s, {1e6 * level.latency_s:.0f} us; an end of a message takes {1e6 * given.host.message_s:.0f} us and "
        f"{1e6 * given.host.message_byte_s * (1 << 20):.0f} us per MiB, an all-reduce "
        f"{1e6 * given.host.ring_byte_s * (1 << 20):.0f} us per MiB sent"
    )


def _speed(given: Given, found: Machine, rows: Sequence[Row], pairs: int, environment: dict[str, str]) -> Table:
    table = Table(f"speed, {pairs} interleaved pairs", *HEAD)
    for cells in rows_of(given, found, rows, pairs, environment):
        table.add_row(*cells)
    table.caption = "work: processor time of theirs over ours; error: measured over predicted seconds, less one"
    return table


def _memory(given: Given, options: argparse.Namespace, environment: dict[str, str]) -> Table:
    """Return the peaks of every rank, and ours over theirs on the rank that needs most."""
    table = Table(
        f"peak memory above imports and data, {options.memory_pairs} pairs of fresh processes",
        *("MB per rank, ours", "theirs", "largest rank, ours / theirs (median)", "range", "target", "verdict"),
    )
    if not memory.can_measure():
        table.add_row("not measured: needs Linux's /proc/self/clear_refs")
        return table
    pairs = [(side, GPIPE) for side in COMPARED] if options.references else [(OURS[side], side) for side in COMPARED]
    for ours, theirs in pairs:
        heap = _RETURNS_FREED if theirs == FSDP else environment
        peaks: dict[bool, list[list[int]]] = {True: [], False: []}
        for pair in range(options.memory_pairs):
            for is_ours in (True, False) if pair % 2 == 0 else (False, True):
                side = ours if is_ours else theirs
                arguments = {"given": given.to_json(), "side": side, "num_minibatches": FEW}
                peaks[is_ours].append(workers.run(jobs.peak, 2, arguments, environment=heap))
        # Inverted, so that the verdict has the same rule as that of speeds, where more is better.
        savings = tuple(max(b) / max(a) for a, b in zip(peaks[True], peaks[False], strict=True))
        ratio = Ratio(f"{ours} against {theirs}", savings, 1.0, 0.0)
        sizes = [_per_rank(peaks[is_ours]) for is_ours in (True, False)]
        values = [1 / saving for saving in savings]
        target = ["-", "-"] if options.references else ["1.00", ratio.verdict]
        table.add_row(ratio.what, *sizes, *median_and_range(values, ".3f"), *target)
    return table


def _per_rank(peaks: Sequence[Sequence[int]]) -> str:
    return " / ".join(f"{statistics.median(column) / 1e6:.1f}" for column in zip(*peaks, strict=True))


def _traffic_apart(given: Given, options: argparse.Namespace) -> None:
    """Measure traffic in a separate command, which has its own loopback interface if the system allows that."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(json.dumps(given.to_json()))
        file.flush()
        words = ["--given", file.name, *(["--references"] if options.references else [])]
        command = traffic.command_alone("tests.bench.processes.main", *words)
        quiet = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}  # no name service there, which torch warns about
        subprocess.run(command, cwd=workers.ROOT, env=quiet, check=True)


def _print_traffic(console: Console, given: Given, options: argparse.Namespace) -> None:
    if not traffic.can_measure():
        console.print("loopback: not counted, which needs Linux's /proc/net/dev")
        return
    whose = "an interface of their own" if traffic.is_alone() else "the machine's, other programs' traffic included"
    table = Table(
        f"loopback, per minibatch, where values go by sockets as between hosts; the counters are those of {whose}",
        *("payload by shapes, MB", "payload the engine counts, MB", "on the interface, MB", "protocol overhead"),
    )
    modes = {side: mode for side, mode in OURS.items() if side != ALONE}
    sides = list(modes.items())
    if not options.references:
        sides += [(mode, mode) for mode in OURS.values()]
    for side, mode in sides:
        table.add_row(side, *_traffic_cells(given, side, mode))
    console.print(table)


def _traffic_cells(given: Given, side: str, mode: str) -> list[str]:
    arguments = {"given": given.to_json(), "side": side, "num_minibatches": FEW}
    found = workers.run(jobs.sent, 2, arguments, environment=workers.BY_SOCKETS)
    carried = found[0][0]
    payload = _payload(given, mode)
    counted: dict[str, int] = {}
    for _, sent in found:
        for kind, num_bytes in sent.items():
            counted[kind] = counted.get(kind, 0) + num_bytes
    return [
        _kinds(payload),
        _kinds(counted) if side == mode else "-",
        f"{carried / FEW / 1e6:.3f}",
        f"{carried / sum(payload.values()) - 1:+.2%}",
    ]


def _payload(given: Given, mode: str) -> dict[str, int]:
    setup = make_setup(given.subject, given.case(mode), given.profile, given.cluster)
    return {kind: num_bytes for (kind, _), num_bytes in simulate_segment(setup, FEW).num_bytes.items()}


def _kinds(found: dict[str, int]) -> str:
    return ", ".join(f"{kind} {num_bytes / FEW / 1e6:.3f}" for kind, num_bytes in sorted(found.items()))


def _print_figure15(
    console: Console, subject: Subject, num_processes: int, rounds: int, environment: dict[str, str]
) -> None:
    points, found = figure15.points(subject, num_processes, environment, rounds)
    _print_given(
        console, Given(subject, cut_at(found.profile, subject.minibatch_size), found.profile, found.cluster, found.host)
    )
    head = ("predicted, samples/s", "measured, samples/s", "predicted / measured - 1", "in the rounds")
    table = Table(f"{len(points)} cases on {num_processes} processes, {rounds} rounds", *head)
    for point in points:
        rates = (point.predicted_samples_per_s, point.measured_samples_per_s)
        errors = " ".join(f"{error:+.1%}" for error in point.errors)
        table.add_row(str(point.case), *(f"{rate:,.0f}" for rate in rates), f"{point.error:+.1%}", errors)
    console.print(table)
    crowded = num_processes > usable_cores()
    console.print(_targets(points, _CROWDED_ERROR if crowded else figure15.CLOSE, whole=not crowded))
    if num_processes == 2:
        when = f"{time.strftime('%Y-%m-%d')}, {usable_cores():g} cores, torch {torch.__version__}"
        heading = f"VGG-16, width {subject.width:g}, {num_processes} processes, median of {rounds} rounds; {when}"
        figure15.draw(points, heading, PICTURE)
        console.print(f"picture: {PICTURE}")


def _targets(points: Sequence[figure15.Point], error: float, *, whole: bool) -> Table:
    """Return a table of results beside targets: of every mode and, if `whole`, of all cases together."""
    table = Table("prediction", "found", "target", "verdict")

    def add(what: str, found: str, target: str, met: bool) -> None:
        table.add_row(what, found, target, "met" if met else "MISSED")

    for mode, errors in figure15.by_mode(points).items():
        mean = statistics.fmean(map(abs, errors))
        found = f"{mean:.1%} ({min(errors):+.1%} to {max(errors):+.1%} in {len(errors)})"
        add(f"{mode}: error, the mean of its cases", found, f"{error:.0%}", mean <= error)
    if whole:
        fit = figure15.agreement(points)
        add("cases", f"{len(points)}", f"{_CASES}", len(points) >= _CASES)
        add("correlation", f"{fit.correlation:.4f}", f"{_CORRELATION}", fit.correlation >= _CORRELATION)
        found = f"{fit.mean_error:.1%} (largest {fit.largest_error:.1%})"
        add("error of all cases, mean", found, f"{_MEAN_ERROR:.0%}", fit.mean_error <= _MEAN_ERROR)
        what = f"pairs in the wrong order, of those that differ by more than {figure15.CLOSE:.0%}"
        add(what, f"{fit.wrong_pairs} of {fit.pairs}", "0", fit.wrong_pairs == 0)
    return table


if __name__ == "__main__":
    main()
