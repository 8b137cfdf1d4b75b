"""What is printed when a run, its seeds or a comparison is done."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, JustifyMethod, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pipebench.comparison import HEADINGS, comparison_markdown, comparison_rows, time_to_accuracy_s
from pipebench.errors import printable
from pipebench.formats import UNKNOWN, measure, num_bytes, number, percent, seconds
from pipebench.prediction import prediction_line
from pipebench.progress import RunProgress, preparing
from pipebench.result import COMPLETED, DIVERGED, INTERRUPTED, MISSED, REACHED, RunResult
from pipebench.timeline import ACTIVATION, ALL_REDUCE, BUFFERS, EVALUATION, GRADIENT

__all__ = [
    "RunProgress",
    "comparison_markdown",
    "comparison_table",
    "is_terminal",
    "new_table",
    "preparing",
    "print_comparison",
    "print_plain",
    "print_seeds",
    "print_summary",
    "print_written",
    "standard_error",
    "standard_output",
]

_PLAIN_WIDTH = 110  # where there is no terminal to ask
_ROOMY_WIDTH = 96
_STYLES = {REACHED: "bold green", COMPLETED: "bold", MISSED: "bold yellow", DIVERGED: "bold red", INTERRUPTED: "bold"}
_SEED_METRICS = ("time_to_accuracy_s", "epochs_to_target", "epoch_time_s", "throughput_samples_per_s")
# Heading, column of RunResult.stages, how to write it.
_STAGE_COLUMNS = (
    ("stage", "index", str),
    ("layers", "num_layers", str),
    ("replicas", "replicas", str),
    ("depth", "depth", str),
    ("forward", "forward_s", seconds),
    ("backward", "backward_s", seconds),
    ("update", "update_s", seconds),
    ("weights", "parameter_bytes", num_bytes),
    ("versions", "weight_versions_max", lambda value: f"{value:g}"),
    ("peak memory", "peak_memory_bytes", num_bytes),
)
# The same of RunResult.workers.
_WORKER_COLUMNS = (
    ("worker", "worker", str),
    ("stage", "stage", str),
    ("rank", "rank", str),
    ("compute", "compute_s", seconds),
    ("waiting", "waiting_s", seconds),
    ("sending", "sending_s", seconds),
    ("other", "other_s", seconds),
    ("all-reduce", "all_reduce_s", seconds),
    ("bubble", "bubble_fraction", percent),
)
_Columns = Sequence[tuple[str, str, Callable[[Any], str]]]


def is_terminal() -> bool:
    """Return whether standard output is a terminal that can show a live line."""
    console = Console()
    return console.is_terminal and not console.is_dumb_terminal


def print_summary(result: RunResult, picture: str, link: str, console: Console | None = None) -> None:
    """Print what one run came to.

    Args:
        result: the run's result.
        picture: the start of its pipeline as text.
        link: how to open its record.
        console: where to write; standard output by default.
    """
    console = console or standard_output()
    print_plain(console, "")
    print_plain(console, Text.assemble(result.name, ": ", (result.sentence, _STYLES.get(result.outcome, "bold"))))
    facts = Table.grid(padding=(0, 2))
    for name, text in _facts(result):
        facts.add_row(Text(name, style="dim"), Text(text))
    print_plain(console, Padding(facts, (0, 0, 0, 2)))
    for rows, columns in ((result.stages, _STAGE_COLUMNS), (result.workers, _WORKER_COLUMNS)):
        if any(rows):
            print_plain(console, Padding(_table_of(rows, columns), (0, 0, 0, 2)))
    if picture:
        print_plain(console, Padding(Text(picture, no_wrap=True, overflow="crop"), (0, 0, 1, 2)))
    _print_link(console, link)


def print_comparison(results: Sequence[RunResult], link: str, console: Console | None = None) -> None:
    """Print runs side by side.

    Args:
        results: at least one.
        link: how to open their record.
        console: where to write; standard output by default.
    """
    console = console or standard_output()
    print_plain(console, "")
    print_plain(console, comparison_table(results, narrow=console.width < _ROOMY_WIDTH))
    _print_link(console, link)


def print_seeds(
    name: str, results: Sequence[RunResult], spread: Mapping[str, float], console: Console | None = None
) -> None:
    """Print median and spread over the seeds of one recipe.

    Args:
        name: the recipe's name.
        results: one per seed.
        spread: as `pipebench.tracking.summarise_seeds` returns.
        console: where to write; standard output by default.
    """
    console = console or standard_output()
    table = new_table("", "median", "mean", "spread (std)", "smallest", "largest")
    finals = sorted({metric for result in results for metric in result.metrics if metric.startswith("best_")})
    for metric in (*_SEED_METRICS, *finals):
        if f"{metric}_median" in spread:
            columns = ("median", "mean", "std", "min", "max")
            table.add_row(metric, *(measure(metric, spread.get(f"{metric}_{column}")) for column in columns))
    reached = sum(result.outcome == REACHED for result in results)
    targeted = sum(result.outcome != COMPLETED for result in results)
    ending = f", {reached} of {targeted} reached the target" if targeted else ""
    print_plain(console, "")
    print_plain(console, Text(f"{name}: {len(results)} seeds{ending}", style="bold"))
    if table.row_count:
        print_plain(console, table)


def comparison_table(results: Sequence[RunResult], *, narrow: bool = False) -> Table:
    """Return runs side by side, with speed-ups over the dp run where there is one.

    Args:
        results: at least one.
        narrow: leave as little room between columns as can be read.
    """
    table = new_table(*HEADINGS, narrow=narrow)
    for result, (name, *cells) in zip(results, comparison_rows(results), strict=True):
        style = "" if result.outcome in (REACHED, COMPLETED) else "yellow"
        table.add_row(Text(name, style="bold"), *(Text(cell, style=style) for cell in cells))
    return table


def standard_output() -> Console:
    """Return where to print: as wide as the terminal, or as a page where there is none."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PLAIN_WIDTH)


def standard_error() -> Console:
    """Return where to say what doesn't belong to the output."""
    return Console(highlight=False, stderr=True)


def print_plain(console: Console, content: RenderableType) -> None:
    """Print, without the blanks that pad lines to the console's width where the output goes to a file."""
    if console.is_terminal:
        console.print(content)
        return
    with console.capture() as captured:
        console.print(content)
    for line in captured.get().splitlines():
        console.print(Text(line.rstrip()), soft_wrap=True)


def print_written(path: str, console: Console | None = None) -> None:
    """Say that a file was written."""
    (console or standard_output()).print(Text.assemble(("  written  ", "dim"), printable(path)), soft_wrap=True)


def _print_link(console: Console, link: str) -> None:
    if link:
        console.print(Text.assemble(("  MLflow  ", "dim"), link), soft_wrap=True)


def new_table(*headings: str, narrow: bool = False, left: int = 1) -> Table:
    """Return an empty table; numbers stand to the right, the first `left` columns and plans to the left."""
    padding = (0, 0) if narrow else (0, 1)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=padding, collapse_padding=True, show_edge=not narrow)
    for index, heading in enumerate(headings):
        justify: JustifyMethod = "left" if index < left or heading == "plan" else "right"
        table.add_column(heading, justify=justify, overflow="fold", no_wrap=index < left)
    return table


def _table_of(rows: Sequence[Mapping[str, Any]], columns: _Columns) -> Table:
    """Return a line per row, without the columns that no row has."""
    columns = [column for column in columns if any(row.get(column[1]) is not None for row in rows)]
    table = new_table(*(heading for heading, _, _ in columns))
    for row in rows:
        table.add_row(*(UNKNOWN if row.get(key) is None else write(row[key]) for _, key, write in columns))
    return table


def _facts(result: RunResult) -> list[tuple[str, str]]:
    facts = [
        ("plan", f"{result.plan} ({result.mode}, seed {result.seed}, {result.engine} engine, {result.clock} clock)"),
        ("durations", result.timing),
        ("time to accuracy", _time_to_accuracy(result)),
        ("epochs", _epochs(result)),
        ("prediction", prediction_line(result.metrics)),
        ("throughput", _throughput(result)),
        ("sent per sample", _bytes_by_kind(result.metrics)),
        ("workers idle", _idle(result.metrics)),
        ("memory", _memory(result.metrics)),
        ("this took", seconds(result.metrics["wall_time_s"]) if "wall_time_s" in result.metrics else ""),
    ]
    return [(name, text) for name, text in facts if text]


def _time_to_accuracy(result: RunResult) -> str:
    reached_s = time_to_accuracy_s(result)
    if reached_s is None:
        return "" if result.outcome == COMPLETED else f"none: {result.outcome}"
    without_s = result.metrics.get("time_to_accuracy_without_evaluation_s")
    return seconds(reached_s) + ("" if without_s is None else f" ({seconds(without_s)} without evaluation)")


def _epochs(result: RunResult) -> str:
    epochs = result.metrics.get("epochs_to_target") if result.outcome == REACHED else None
    epoch_s = result.metrics.get("epoch_time_s")
    parts = [] if epochs is None else [f"{epochs:g} to the target"]
    return ", ".join([*parts, *([] if epoch_s is None else [f"{seconds(epoch_s)} each"])])


def _throughput(result: RunResult) -> str:
    rate, update = result.metrics.get("throughput_samples_per_s"), result.metrics.get("samples_per_update")
    parts = [] if rate is None else [f"{number(rate)} samples/s"]
    return ", ".join([*parts, *([] if update is None else [f"{update:g} samples per update"])])


def _bytes_by_kind(metrics: Mapping[str, float]) -> str:
    total, each = metrics.get("comm_bytes_total"), metrics.get("comm_bytes_per_sample")
    if total is None or each is None:
        return ""
    if total == 0:
        return "nothing"
    kinds = [(kind, metrics.get(f"comm_bytes_{kind.replace('-', '_')}")) for kind in (ACTIVATION, GRADIENT, ALL_REDUCE)]
    parts = ", ".join(f"{kind} {num_bytes(value * each / total)}" for kind, value in kinds if value)
    apart = [(kind, metrics.get(f"comm_bytes_{kind}")) for kind in (BUFFERS, EVALUATION)]
    rest = "".join(f"; {kind} {num_bytes(value)} in all" for kind, value in apart if value)
    return f"{num_bytes(each)} ({parts}); {num_bytes(total)} in all{rest}"


def _idle(metrics: Mapping[str, float]) -> str:
    bubble, stall = metrics.get("bubble_fraction"), metrics.get("comm_stall_fraction")
    parts = [] if bubble is None else [f"{percent(bubble)} bubble"]
    return ", ".join([*parts, *([] if stall is None else [f"{percent(stall)} waiting for communication"])])


def _memory(metrics: Mapping[str, float]) -> str:
    peak, versions = metrics.get("peak_memory_bytes_max"), metrics.get("weight_versions_max")
    parts = [] if peak is None else [f"{num_bytes(peak)} at most on a worker"]
    return ", ".join([*parts, *([] if versions is None else [f"{versions:g} weight versions at most"])])
