"""Prints the results of a run, of its seeds, or of a comparison."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pipebench.errors import printable
from pipebench.formats import UNKNOWN, measure, num_bytes, number, percent, seconds
from pipebench.metrics import SPREAD_METRICS
from pipebench.show.comparison import groups, has_seeds, headings, notes, rows, short_names, time_to_accuracy_s
from pipebench.show.tables import new_table, print_facts, print_groups, print_table
from pipebench.show.terminal import print_plain, standard_output
from pipebench.show.verdict import verdict
from pipebench.simulate.meter import CUT_ANEW, EPOCHS, MEMORY, PLAN, PREDICTION, THROUGHPUT, WORKERS_IDLE
from pipebench.simulate.timeline import BUFFERS, EVALUATION, TRAINING_KINDS
from pipebench.train.prediction import prediction_line
from pipebench.train.result import COMPLETED, DIVERGED, INTERRUPTED, MISSED, REACHED, RunResult

_STYLES = {REACHED: "bold green", COMPLETED: "bold", MISSED: "bold yellow", DIVERGED: "bold red", INTERRUPTED: "bold"}
# Heading, key of a row of `RunResult.stages`, formatter.
_STAGE_COLUMNS = (
    ("stage", "index", str),
    ("layers", "num_layers", str),
    ("replicas", "replicas", str),
    ("depth", "depth", str),
    ("forward", "forward_s", seconds),
    ("backward", "backward_s", seconds),
    ("update", "update_s", seconds),
    ("samples per update", "samples_per_update", str),
    ("lr", "lr", lambda value: f"{value:.3g}"),
    ("weights", "parameter_bytes", num_bytes),
    ("versions", "weight_versions_max", lambda value: f"{value:g}"),
    ("peak memory", "peak_memory_bytes", num_bytes),
    ("on the host", "host_peak_bytes", num_bytes),
)
# Heading, key of a row of `RunResult.workers`, formatter.
_WORKER_COLUMNS = (
    ("worker", "worker", str),
    ("stage", "stage", str),
    ("rank", "rank", str),
    ("compute", "compute_s", seconds),
    ("waiting", "waiting_s", seconds),
    ("sending", "sending_s", seconds),
    ("swapping", "swapping_s", seconds),
    ("other", "other_s", seconds),
    ("all-reduce", "all_reduce_s", seconds),
    ("overlapped", "overlapped_s", seconds),
    ("bubble", "bubble_fraction", percent),
    ("allocated", "allocated_peak_bytes", num_bytes),
    ("reserved", "reserved_peak_bytes", num_bytes),
)
_RESIDUE = 1e-9  # relative: a part of the time this small is a rounding error
_Columns = Sequence[tuple[str, str, Callable[[Any], str]]]
_Saying = tuple[str, Callable[[float], str]]  # a metric and its formatter
_THROUGHPUT: tuple[_Saying, ...] = (
    ("throughput_samples_per_s", lambda rate: f"{number(rate)} samples/s"),
    ("samples_per_update", lambda samples: f"{samples:g} samples per update"),
)
_IDLE: tuple[_Saying, ...] = (
    ("bubble_fraction", lambda share: f"{percent(share)} bubble"),
    ("comm_stall_fraction", lambda share: f"{percent(share)} waiting for communication"),
    ("swap_stall_fraction", lambda share: f"{percent(share)} waiting for what was swapped"),
)
_STALENESS: tuple[_Saying, ...] = (
    ("staleness_mean", lambda updates: f"{number(updates)} updates between pull and push on average"),
    ("staleness_max", lambda updates: f"{updates:g} at most"),
)
_MOVES: tuple[_Saying, ...] = (
    ("repartitions", lambda times: f"{times:g} times" if times != 1 else "once"),
    ("migration_bytes", lambda moved: f"{num_bytes(moved)} of layers moved"),
    ("migration_stall_s", lambda stall: f"{seconds(stall)} of standing still meanwhile"),
)
_MEMORY: tuple[_Saying, ...] = (
    ("peak_memory_bytes_max", lambda peak: f"{num_bytes(peak)} at most on a worker"),
    ("allocated_peak_bytes_max", lambda peak: f"{num_bytes(peak)} at most in a GPU's allocator"),
    ("reserved_peak_bytes_max", lambda peak: f"{num_bytes(peak)} reserved"),
    ("host_peak_bytes_max", lambda peak: f"{num_bytes(peak)} at most on its host"),
    ("weight_versions_max", lambda versions: f"{versions:g} weight version{'' if versions == 1 else 's'} at most"),
)


# Patterns found in a pipeline drawn as text, and their meaning. Workers' names have no capitals.
_LEGEND = (
    (r"F\d+\.", "F3.1: forward of minibatch 3's microbatch 1"),
    (r"F\d+(?![\d.])", "F3: forward of minibatch 3"),
    (r"\dF", "2F3: stage 2's"),
    ("B", "B: backward"),
    ("I", "I, W: backward of inputs, of weights"),
    ("U", "U: update"),
    ("E", "E: forward of an evaluation, after which numbers begin at 0 again"),
    (r" \.", ". : waiting"),
)


def print_summary(result: RunResult, picture: str, link: str, console: Console) -> None:
    """Print a run's result.

    Args:
        result: of the run.
        picture: the pipeline as text; "" for none.
        link: how to open the run's record; "" if unknown.
        console: where to print.
    """
    print_plain(console, "")
    print_outcome(result, console)
    print_facts(console, facts(result))
    for lines, columns in ((result.stages, _STAGE_COLUMNS), (result.workers, _WORKER_COLUMNS)):
        if any(lines):
            print_table(console, _table_of(lines, columns), indent=2)
    if picture:
        print_plain(console, Padding(Text(picture, no_wrap=True, overflow="crop"), (0, 0, 0, 2)))
        legend = "; ".join([*(text for sign, text in _LEGEND if re.search(sign, picture)), "time goes to the right"])
        print_plain(console, Padding(Text(legend, style="dim"), (0, 0, 1, 2)))
    print_link(link, console)


def print_outcome(result: RunResult, console: Console | None = None) -> None:
    """Print a run's result in one line."""
    style = _STYLES.get(result.outcome, "bold")
    print_plain(console or standard_output(), Text.assemble(result.name, ": ", (result.sentence, style)))


def print_comparison(results: Sequence[RunResult], link: str, console: Console) -> None:
    """Print runs side by side: a row per recipe, and a table for each group of comparable recipes."""
    print_plain(console, "")
    tables, verdicts = [], list[str]()
    for group in groups(results):
        verdicts += verdict(group)
        table = new_table(*headings(results))
        for entry, (name, *cells) in zip(group.entries, rows(results, group), strict=True):
            style = "" if entry.has_succeeded() else "yellow"
            table.add_row(Text(name, style="bold"), *(Text(cell, style=style) for cell in cells))
        tables.append((group.title, table))
    print_groups(console, tables)
    for line in (*verdicts, *notes(results)):
        print_plain(console, Padding(Text(line), (0, 0, 0, 2)))
    print_link(link, console)


def print_differences(results: Sequence[RunResult], differing: Sequence[tuple[str, ...]], console: Console) -> None:
    """Print the keys in which recipes differ, a column per run; `differing` as by `show.differences.differences`."""
    print_plain(console, "")
    if not differing:
        print_plain(console, "  The recipes are the same.")
        return
    names = short_names([result.name for result in results])
    seeds = [f", seed {each.seed}" if has_seeds(results) else "" for each in results]
    table = new_table("key", *(f"{names[each.name]}{seed}" for each, seed in zip(results, seeds, strict=True)))
    for key, *cells in differing:
        table.add_row(Text(printable(key), style="bold"), *(Text(printable(cell)) for cell in cells))
    print_table(console, table)


def print_position(number: int, total: int, name: str, console: Console) -> None:
    """Print which run begins, counted from 1."""
    print_plain(console, "")
    print_plain(console, Text.assemble((f"{number} of {total}", "bold"), f"  {name}"))


def print_undrawn(num_simulated: int, console: Console) -> None:
    """Print that these runs have no pictures because they are too many."""
    said = f"{num_simulated:,} simulated runs: of so many none has pictures, which a run alone has, the comparison does"
    print_plain(console, said)


def print_seeds(name: str, results: Sequence[RunResult], spread: Mapping[str, float], console: Console) -> None:
    """Print median and spread over the seeds of one recipe; `spread` as by `tracking.summary.summarise_seeds`."""
    table = new_table("", "median", "smallest", "largest", "mean", "spread (std)")
    finals = sorted({metric for result in results for metric in result.metrics if metric.startswith("best_")})
    for metric in (*SPREAD_METRICS, *finals):
        if f"{metric}_min" in spread:  # the others may be missing: they are infinite if seeds missed the target
            columns = ("median", "min", "max", "mean", "std")
            table.add_row(metric, *(measure(metric, spread.get(f"{metric}_{column}")) for column in columns))
    reached = sum(result.outcome == REACHED for result in results)
    targeted = sum(result.has_target for result in results)
    ending = f", {reached} of {targeted} reached the target" if targeted else ""
    print_plain(console, "")
    print_plain(console, Text(f"{name}: {len(results)} seeds{ending}", style="bold"))
    if table.row_count:
        print_table(console, table)


def print_written(path: str, console: Console | None = None) -> None:
    """Print that a file was written."""
    (console or standard_output()).print(Text.assemble(("  written  ", "dim"), printable(path)), soft_wrap=True)


def print_link(link: str, console: Console | None = None) -> None:
    """Print how to open a record, if it is known."""
    if link:
        (console or standard_output()).print(Text.assemble(("  MLflow  ", "dim"), link), soft_wrap=True)


def _table_of(lines: Sequence[Mapping[str, Any]], columns: _Columns) -> Table:
    """Return a table with a row per mapping, without empty columns."""
    columns = [column for column in columns if any(row.get(column[1]) is not None for row in lines)]
    table = new_table(*(heading for heading, _, _ in columns))
    for row in lines:
        table.add_row(*(UNKNOWN if row.get(key) is None else write(row[key]) for _, key, write in columns))
    return table


def facts(result: RunResult) -> list[tuple[str, str]]:
    """Return the facts of a run's summary, each a name and a text; a note on a fact is appended to its text."""
    metrics = result.metrics
    to_target = (("epochs_to_target", lambda epochs: f"{epochs:g} to the target"),) if result.outcome == REACHED else ()
    named = [
        (PLAN, f"{result.plan} ({result.mode}, seed {result.seed}, {result.engine} engine, {result.clock} clock)"),
        ("durations", result.timing),
        ("time to accuracy", _time_to_accuracy(result)),
        (EPOCHS, _said(metrics, *to_target, ("epoch_time_s", lambda s: f"{seconds(s)} each"))),
        (PREDICTION, prediction_line(metrics)),
        (THROUGHPUT, _said(metrics, *_THROUGHPUT)),
        ("sent per sample", _bytes_by_kind(metrics)),
        ("staleness", _said(metrics, *_STALENESS)),
        (WORKERS_IDLE, _said(metrics, *_IDLE)),
        (CUT_ANEW, _said(metrics, *_MOVES)),
        (MEMORY, _said(metrics, *_MEMORY)),
        ("this took", _took(result)),
    ]
    return [(name, "; ".join(filter(None, (text, result.notes.get(name))))) for name, text in named if text]


def parts_of_time(metrics: Mapping[str, float], *, to_target: bool = False) -> dict[str, float]:
    """Return the seconds of each part of a run on its clock, which add up to the whole.

    The whole is the run's total time or, with `to_target`, its time to accuracy.
    """
    whole, checkpoints = (
        ("time_to_accuracy_s", "time_to_accuracy_checkpoint_s") if to_target else ("total_time_s", "checkpoint_time_s")
    )
    names = {"evaluation": "evaluation_time_s", "checkpoints": checkpoints, "lost by restarts": "lost_time_s"}
    given = {name: metrics.get(key, 0.0) for name, key in names.items()}
    training_s = metrics.get("time_to_accuracy_without_evaluation_s")
    if to_target and training_s is not None:  # evaluations after the target don't count
        given["evaluation"] = metrics[whole] - training_s - given["checkpoints"] - given["lost by restarts"]
    least_s = _RESIDUE * metrics.get(whole, 0.0)
    found = {name: s for name, s in given.items() if s > least_s}
    return {"training": metrics[whole] - sum(found.values()), **found} if whole in metrics else {}


def _time_to_accuracy(result: RunResult) -> str:
    reached_s = time_to_accuracy_s(result)
    if reached_s is None:
        return f"none: {result.outcome}" if result.has_target else ""
    return seconds(reached_s) + _parts(parts_of_time(result.metrics, to_target=True))


def _took(result: RunResult) -> str:
    """Return the time that the run took here, and the time before its clock began.

    For a run on the wall clock the parts are listed, those before it was resumed included.
    """
    metrics = result.metrics
    parts = parts_of_time(metrics) if result.clock == "wall" else {}
    if "wall_time_s" not in metrics:
        return ""
    whole_s = sum(parts.values()) if parts else metrics["wall_time_s"]
    started = f", after {seconds(metrics['start_time_s'])} of preparing" if "start_time_s" in metrics else ""
    return f"{seconds(whole_s)}{_parts(parts)}{started}"


def _parts(parts: Mapping[str, float]) -> str:
    return f" ({', '.join(f'{seconds(s)} {name}' for name, s in parts.items())})" if len(parts) > 1 else ""


def _said(metrics: Mapping[str, float], *parts: _Saying) -> str:
    """Return the texts of those metrics of `parts` that a run has, joined by commas."""
    return ", ".join(say(metrics[name]) for name, say in parts if name in metrics)


def _bytes_by_kind(metrics: Mapping[str, float]) -> str:
    total, each = metrics.get("comm_bytes_total"), metrics.get("comm_bytes_per_sample")
    if total is None or each is None:
        return ""
    if total == 0:
        return "nothing"
    kinds = [(kind, metrics.get(f"comm_bytes_per_sample_{kind.replace('-', '_')}")) for kind in TRAINING_KINDS]
    parts = ", ".join(f"{kind} {num_bytes(value)}" for kind, value in kinds if value)
    apart = [(kind, metrics.get(f"comm_bytes_{kind}")) for kind in (BUFFERS, EVALUATION)]
    rest = "".join(f"; {kind} {num_bytes(value)} in all" for kind, value in apart if value)
    return f"{num_bytes(each)} ({parts}); {num_bytes(total)} in all{rest}"
