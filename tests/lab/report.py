"""Writes the lab's report: `lab.md`, its picture `lab.png`, and `lab.json` with the numbers of both."""

import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import torch

import pipebench
from pipebench.files import replace as replace_file
from pipebench.formats import num_bytes, number, percent, seconds
from pipebench.model.cores import usable_cores
from reports.studies.markdown import table
from tests.lab.findings import Findings, Run, Wire, label
from tests.lab.ladder import step_of
from tests.lab.picture import draw
from tests.lab.wires import EFFICIENCY, FRAME_BYTES, PAYLOAD_BYTES

_PAYLOAD = f"{percent(EFFICIENCY)} of it ({PAYLOAD_BYTES} bytes in a frame of {FRAME_BYTES})"


def write_report(found: Findings, say: Callable[[str], None]) -> None:
    """Write report, picture and numbers into the lab's folder; `say` prints a line."""
    folder = found.options.folder
    draw(found, folder / "lab.png")
    texts = {"lab.md": markdown(found), "lab.json": json.dumps(numbers(found), indent=1) + "\n"}
    for name, text in texts.items():
        replace_file(folder / name, text.encode())
    say(f"written: {folder / 'lab.md'}, lab.png, lab.json, predictions.json, logs")


def markdown(found: Findings) -> str:
    parts = [_head(found), _runs(found), _crossover(found), _wires(found), _bytes(found)]
    return "\n\n".join(part for part in parts if part) + "\n"


def numbers(found: Findings) -> dict[str, Any]:
    """Return all predictions and measurements, as JSON can hold them."""
    options = {**asdict(found.options), "folder": found.options.folder.name}
    return {
        "options": options,
        "free": asdict(found.free),
        "wires": [asdict(wire) for wire in found.wires],
        "crossing": None if found.crossing is None else asdict(found.crossing),
        "curves": {name: [[at, asdict(each)] for at, each in curve] for name, curve in found.curves.items()},
        **{
            name: [{**_row(run), "recipe": run.case.name, "mode": run.case.mode} for run in runs]
            for name, runs in (("runs", found.runs), ("climbed", found.climbed))
        },
    }


def _row(run: Run) -> dict[str, Any]:
    return {
        "bandwidth_bytes_per_s": run.bandwidth_bytes_per_s,
        "predicted": asdict(run.predicted),
        "predicted_time_to_accuracy_s": run.predicted_time_to_accuracy_s,
        "outcome": run.result.outcome,
        "metrics": dict(run.result.metrics),
        "passed": asdict(run.passed),
    }


def _head(found: Findings) -> str:
    options = found.options
    workers = options.num_hosts * options.workers_per_host
    per_host = "1 worker" if options.workers_per_host == 1 else f"{options.workers_per_host} workers"
    return f"""# Real sockets of limited bandwidth: predicted and measured

{options.num_hosts} hosts (network namespaces of one machine), {per_host} each: torchrun on every host, Gloo over TCP,
wall clock. Recipes: {", ".join(f"`{case.name}` ({case.mode})" for case in found.cases)}. {_machine()}.

Every prediction was stored before anything trained at its bandwidth. It is the simulator's, from a profile
and a model of the wires. {workers} processes at once measured layers and messages beforehand, over wires without
a limit. A wire has the stated bandwidth, {_PAYLOAD} for payload, and a latency
of {seconds(found.free.latency_s)}: half of a small message's round trip, without a limit. The number of epochs to the
target is the virtual engine's: bandwidths don't change it.

![throughput and time to accuracy against bandwidth](lab.png)"""


def _machine() -> str:
    system = f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}"
    return (
        f"{usable_cores():g} cores ({platform.machine()}), {system}, torch {torch.__version__}, "
        f"pipebench {pipebench.__version__}, {datetime.now(UTC):%Y-%m-%d}"
    )


def _runs(found: Findings) -> str:
    has_target = any(run.predicted_time_to_accuracy_s is not None for run in found.runs)
    heads = ["bandwidth", "recipe", "plan", "samples/s", "predicted", "difference"]
    heads += ["to the target", "predicted", "difference"] if has_target else []
    rows = [_cells(run, has_target=has_target) for run in found.runs]
    errors = [abs(_throughput_error(run)) for run in found.runs]
    mean, most = percent(sum(errors) / len(errors)), percent(max(errors))
    below = f"Throughput is {mean} off on average (mean of absolute errors), and {most} at most."
    return f"## Every recipe at every bandwidth\n\n{_table(heads, rows, left=3)}\n\n{below}"


def _cells(run: Run, *, has_target: bool) -> list[str]:
    cells = [
        label(run.bandwidth_bytes_per_s), run.case.name, run.predicted.plan, number(run.throughput_samples_per_s),
        number(run.predicted.throughput_samples_per_s), f"{100 * _throughput_error(run):+.1f}%",
    ]  # fmt: skip
    if has_target:
        measured_s, predicted_s = run.time_to_accuracy_s, run.predicted_time_to_accuracy_s
        error = "" if measured_s is None or predicted_s is None else f"{100 * (measured_s / predicted_s - 1):+.1f}%"
        cells += [run.result.outcome if measured_s is None else seconds(measured_s), seconds(predicted_s), error]
    return cells


def _throughput_error(run: Run) -> float:
    return run.throughput_samples_per_s / run.predicted.throughput_samples_per_s - 1


def leads(found: Findings) -> list[tuple[float, float, float]]:
    """Return the pipeline's lead over data parallelism at every bandwidth of the ladder.

    Returns:
        Bandwidth [bytes/s]; the measured throughput of the pipeline over that of data parallelism, less 1; the same as
        predicted.
    """
    crossing = found.crossing
    assert crossing is not None
    rows = []
    for bandwidth in crossing.ladder:
        of = {run.case.name: run for run in found.climbed if run.bandwidth_bytes_per_s == bandwidth}
        pipeline, whole = of[crossing.pipeline], of[crossing.data_parallel]
        measured = pipeline.throughput_samples_per_s / whole.throughput_samples_per_s - 1
        predicted = pipeline.predicted.throughput_samples_per_s / whole.predicted.throughput_samples_per_s - 1
        rows.append((bandwidth, measured, predicted))
    return rows


def _crossover(found: Findings) -> str:
    if found.crossing is None:
        if not found.options.climbs:
            return ""
        return "## The crossover\n\nNone is predicted between 1 Mbit/s and 100 Gbit/s."
    crossing, rows = found.crossing, leads(found)
    heads = ["bandwidth", f"{crossing.pipeline} is ahead by", "predicted"]
    lead_table = _table(heads, [[label(at), f"{100 * m:+.1f}%", f"{100 * p:+.1f}%"] for at, m, p in rows], left=1)
    where = label(crossing.bandwidth_bytes_per_s)
    return f"""## The crossover

Predicted beforehand: `{crossing.pipeline}` and `{crossing.data_parallel}` are equally fast at {where}. {_verdict(rows)}

{lead_table}"""


def _verdict(rows: Sequence[tuple[float, float, float]]) -> str:
    """Return the bandwidths between which the lead changed, and the distance from the predicted step, as a sentence."""
    ladder = [row[0] for row in rows]
    measured, predicted = (step_of(ladder, [row[column] for row in rows]) for column in (1, 2))
    if measured is None or predicted is None:
        return "Measured: nowhere on this ladder."
    apart = abs(ladder.index(measured[0]) - ladder.index(predicted[0]))
    distance = "the predicted step" if apart == 0 else f"{apart} step{'s' * (apart > 1)} from the predicted one"
    return f"Measured: between {label(measured[0])} and {label(measured[1])}, {distance}."


def _wires(found: Findings) -> str:
    rows = [_wire_cells(wire) for wire in (*found.wires, found.free)]
    heads = ["limit", "payload per second", "of the limit", "round trip"]
    return f"""## The wires

What two plain sockets got, one direction, for half a second; headers leave them {_PAYLOAD}.

{_table(heads, rows, left=1)}"""


def _wire_cells(wire: Wire) -> list[str]:
    bandwidth, goodput = wire.bandwidth_bytes_per_s, wire.goodput_bytes_per_s
    share = "" if bandwidth is None else percent(goodput / bandwidth)
    return [
        "none" if bandwidth is None else label(bandwidth),
        f"{number(8e-6 * goodput)} Mbit",
        share,
        seconds(2 * wire.latency_s),
    ]


def _bytes(found: Findings) -> str:
    heads = ["bandwidth", "recipe", "logged", "on the wires", "headers", "other", "more than logged"]
    rows = []
    for run in (*found.runs, *found.climbed):
        passed = run.passed
        more = percent(passed.wire_bytes / passed.payload_bytes - 1) if passed.payload_bytes else ""
        sizes = (passed.payload_bytes, passed.wire_bytes, passed.header_bytes, passed.other_bytes)
        rows.append([label(run.bandwidth_bytes_per_s), run.case.name, *map(num_bytes, sizes), more])
    return f"""## Bytes

What the runs logged (activations, gradients, all-reduces, buffers, evaluation), and what the interfaces counted from
each run's start to its end. Headers are 66 bytes a piece (Ethernet, IP, TCP), acknowledgements included; a piece is up
to 64 kB here, and would be frames of {FRAME_BYTES:,} bytes on a cable. Other: torchrun's rendezvous, heartbeats, the
messages' own headers, what processes tell each other at the start, at drains and at the end.

{_table(heads, rows, left=2)}"""


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> str:
    """Return a table whose first `left` columns are aligned to the left, the others to the right."""
    return table(heads, rows, ["---" if index < left else "---:" for index in range(len(heads))])
