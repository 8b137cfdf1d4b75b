"""Writes the pages of `docs/reference/` from the schema, the tables and the docstrings, so that no name is missing.

`python -m reports.studies.reference` writes them; a test fails when they are out of date.
"""

import inspect
import json
import re
import textwrap
import typing
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from typing import Any

import click
from omegaconf import MISSING

from pipebench.cli.main import cli
from pipebench.cluster import Cluster, Level
from pipebench.hooks import EXTENSIONS, hooks, with_section
from pipebench.metrics import METRICS, STAGE_METRICS, Metric, Use
from pipebench.recipe.cluster_files import KEYS, LEVEL_KEYS, LEVELS
from pipebench.recipe.clusters import NEEDED
from pipebench.recipe.leaves import recipe_with
from pipebench.recipe.ranges import CHOICES, RANGES
from pipebench.recipe.typecheck import in_words
from pipebench.schedule.modes import MODES, Mode
from pipebench.schedule.operations import OPERATIONS
from pipebench.schedule.orders import ORDERS
from pipebench.schedule.syncs import SYNCS
from pipebench.schedule.weights import WEIGHT_POLICIES
from pipebench.zoo import DATASETS, MODELS
from reports.studies import markdown

FOLDER = Path(__file__).parents[2] / "docs/reference"
WRITTEN_BY = "<!-- written by `python -m reports.studies.reference`: change what it reads, not this file -->"
# Endings of the fields that keys of cluster files set: names of fields have a unit, those of keys don't.
UNITS = ("", "_bytes", "_bytes_per_s", "_s")
NOT_FIELDS = {
    LEVELS: "links, innermost level first: the keys of a level are below",
    "max_servers": "the most components that the outermost level may have; a plain number",
}
# Columns of the table of modes, in the order of the page.
MODE_COLUMNS = (
    "shape", "order", "flush", "weights", "sync", "accumulate", "chunks", "backward", "depth", "recompute", "sums",
    "shard", "reshard_after_forward",
)  # fmt: skip


def pages() -> dict[str, str]:
    """Return every page by its file's name."""
    made = {
        "recipe.md": ("Recipe keys", recipe_page()),
        "zoo.md": ("Options of models and data sets", zoo_page()),
        "modes.md": ("Modes, orders, weight policies", modes_page()),
        "metrics.md": ("Metrics", metrics_page()),
        "cluster.md": ("Cluster keys", cluster_page()),
        "cli.md": ("Command line", cli_page()),
    }
    return {
        name: f"{WRITTEN_BY}\n\n# {title}\n\n" + "\n\n".join(parts).rstrip() + "\n"
        for name, (title, parts) in made.items()
    }


def recipe_page() -> Iterator[str]:
    """Yield the parts of the page about a recipe's keys: a section per dataclass of the schema."""
    yield (
        "A recipe is YAML. Every key can be overridden on the command line by its full name, "
        "`pipebench run RECIPE train.optimizer.clip_norm=1`, and takes several values as a [sweep](../sweeps.md). "
        "`pipebench show RECIPE` prints a recipe with all of them filled in. Beside the keys below, `extends` names a "
        "recipe whose keys this one starts from."
    )
    yield from _sections(recipe_with(tuple((name, True) for name in with_section())), "")


def _sections(section: type, prefix: str) -> Iterator[str]:
    """Yield a dataclass's heading, description and keys, then those of the dataclasses inside it."""
    hints, descriptions = typing.get_type_hints(section), documented(section)
    inner = {each.name: part for each in fields(section) if (part := _dataclass_in(hints[each.name]))}
    yield f"## {f'`{prefix[:-1]}`' if prefix else 'Top level'}"
    yield described(section)
    yield table(
        ("key", "value", "default", "what it is"),
        (_key_row(each, prefix, hints[each.name], descriptions, inner.get(each.name)) for each in fields(section)),
    )
    for name, part in inner.items():
        yield from _sections(part, f"{prefix}{name}.")


def _key_row(
    each: "Field[Any]", prefix: str, hint: Any, descriptions: Mapping[str, str], inner: type | None
) -> list[str]:
    """Return the row of a field whose type is `hint`; `inner` is the dataclass that it holds, if it does."""
    key = f"{prefix}{each.name}"
    if inner is not None:
        description = descriptions.get(each.name) or described(inner).split("\n")[0].rstrip(".")
        link = f"[`{key}`](#{key.replace('.', '')})"
        return [link, "keys of its own", _default(each), description]
    value = in_words(hint)
    choices = ChainMap(CHOICES, *hooks("choices", EXTENSIONS).values())
    ranges = ChainMap(RANGES, *hooks("ranges", EXTENSIONS).values())
    if key in choices:
        value = ", ".join(f"`{name}`" for name in choices[key])
    elif key in ranges:
        value = ranges[key][1]
    if "null" in in_words(hint) and "null" not in value:
        value += ", or null"
    return [f"`{key}`", value, _default(each), descriptions[each.name]]


def _default(each: "Field[Any]") -> str:
    if each.default_factory is not NO_DEFAULT:
        made = each.default_factory()
        return "its keys' own" if is_dataclass(made) else f"`{made}`"
    if each.default == MISSING:
        return "required"
    plain = each.default is None or isinstance(each.default, bool)
    return f"`{json.dumps(each.default) if plain else each.default}`"


def _dataclass_in(hint: Any) -> type | None:
    parts = typing.get_args(hint) or (hint,)
    return next((part for part in parts if is_dataclass(part) and isinstance(part, type)), None)


def zoo_page() -> Iterator[str]:
    """Yield the parts of the page about the options of every model and data set: the arguments of its factory."""
    yield (
        "Options stand beside the name: `model: {name: vgg16, width: 0.25, init: kaiming}`. One that isn't given has "
        "the original's value. [The zoo](../zoo.md) says what the models and data sets are and what data they need."
    )
    for kind, entries in (("model", MODELS), ("dataset", DATASETS)):
        yield f"## `{kind}`"
        for name, entry in entries.items():
            yield f"### `{name}`"
            yield f"{entry.summary}."
            descriptions = documented(entry.make, "Args")
            if match := re.search(r"options as for `(\w+)`", inspect.getdoc(entry.make) or ""):
                descriptions = documented(entries[match[1]].make, "Args") | descriptions
            options = inspect.signature(entry.make).parameters.values()
            yield table(
                ("option", "default", "what it is"),
                ([f"`{each.name}`", f"`{each.default!r}`", descriptions[each.name]] for each in options),
            )


def modes_page() -> Iterator[str]:
    """Yield the parts of the page about modes and their columns."""
    yield (
        "A mode is a row of `pipebench/schedule/modes.py`. A recipe names one in `parallelism.mode` and may change its "
        "columns. [Modes](../modes.md) draws and explains each."
    )
    yield table(("mode", "what it is"), ([f"[{name}](../modes.md#{name})", row.summary] for name, row in MODES.items()))
    yield "## The columns"
    descriptions = documented(Mode)
    yield table(
        ("column", "what it is"), ([f"`{name}`", descriptions[name].replace("None", "null")] for name in MODE_COLUMNS)
    )
    yield table(
        ("mode", "plans", *MODE_COLUMNS[1:]),
        ([name, *(_column(row, column) for column in MODE_COLUMNS)] for name, row in MODES.items()),
    )
    for title, key, rows in (
        ("Orders of work", "order", ORDERS),
        ("Weight policies", "weights", WEIGHT_POLICIES),
        ("How replicas agree", "sync", SYNCS),
    ):
        yield f"## {title}"
        more = ", or [a file](../modes.md#schedules-of-others)" if rows is ORDERS else ""
        yield f"What `parallelism.{key}` may name{more}."
        yield table((key, "what it is"), ([f"`{name}`", row.summary] for name, row in rows.items()))
    yield "## Instructions"
    yield "What a worker's list is made of, as `pipebench draw`, timelines and reports of stalled workers call it."
    yield table(
        ("letters", "what a worker does"),
        ([f"`{row.letters}`", row.description.format(unit="a unit", round="a round", peer="w", others="others")]
         for row in OPERATIONS.values()),
    )  # fmt: skip


def _column(row: Mode, name: str) -> str:
    value = getattr(row, name)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return {"depth": "NOAM", "accumulate": "depth"}[name] if value is None else str(value)


def metrics_page() -> Iterator[str]:
    """Yield the parts of the page about metrics."""
    yield (
        "What a run logs, under these names in MLflow, `result.json` and reports. Shares are fractions, never per "
        "cent; a `*` stands for any ending. [Tracking](../tracking.md) says where they are seen. "
        "*Also logged* in MLflow: the `median` of a group of seeds under the same name; its `spread` as "
        "`<name>_mean` and so on; what the simulator `predicted` of a run in processes; and in place of the name "
        "itself `wall_<name>` where the run's clock is the `wall`'s."
    )
    yield "## Of a run"
    yield _metrics_table(METRICS)
    yield "## Of a stage"
    yield "Columns of the artifact `stages.csv`; in reports `stage_<index>_<name>`."
    yield _metrics_table(STAGE_METRICS)


def _metrics_table(rows: Iterable[Metric]) -> str:
    shown = {Use.SPREAD: "spread", Use.MEDIAN: "median", Use.PREDICTED: "predicted", Use.CLOCKED: "wall"}
    return table(
        ("metric", "unit", "better", "which runs", "what it is", "also logged"),
        (
            [f"`{row.name}`", row.unit, row.better or "-", row.of, row.says,
             ", ".join(word for flag, word in shown.items() if flag in row.shown)]
            for row in rows
        ),
    ) + (
        "\n\n*median*: a group of seeds has the median of its runs; *spread*: mean, deviation, smallest and largest, "
        "too. *predicted*: a run in processes has `predicted_<name>` beside it."
        if rows is METRICS else ""
    )  # fmt: skip


def cluster_page() -> Iterator[str]:
    """Yield the parts of the page about the keys of a cluster's file."""
    yield (
        "A cluster is a YAML file, named by `cluster.name` in a recipe. Every value but `name` and "
        "`max_servers` says its source, numbers, words and flags alike: "
        "`{value: 10 GB/s, published: where}`, `assumed: why`, `measured: how` or `calibrated: on what`. "
        "[Clusters](../clusters.md) shows one and lists those that come along."
    )
    yield "## Of a cluster"
    yield table(("key", "required", "what it is"), _cluster_rows(KEYS, Cluster))
    yield "## Of a level"
    yield table(("key", "required", "what it is"), _cluster_rows(LEVEL_KEYS, Level))


def _cluster_rows(keys: Iterable[str], owner: type) -> Iterator[list[str]]:
    """Yield the rows of keys that set fields of `owner`, whose comments describe them."""
    descriptions = documented(owner) | NOT_FIELDS
    words = {"PER_PAIR": "`per-pair`", "PER_VALUE": "`per-value`", "RING": "`ring`", "TWO_LEVEL": "`two-level`"}
    for key in keys:
        description = next(descriptions[key + unit] for unit in UNITS if key + unit in descriptions)
        for name, written in words.items():
            description = re.sub(rf"\b{name}\b", written, description)
        needed = key in {*NEEDED, "name", LEVELS}
        yield [f"`{key}`", "yes" if needed else "", description.replace("None", "`null`" if needed else "not given")]


def cli_page() -> Iterator[str]:
    """Yield the parts of the page about the command line: a section per command, from the command itself."""
    yield "What `pipebench COMMAND --help` says."
    yield from _paragraphs(cli.help or "")
    context = click.Context(cli, info_name="pipebench")
    for name in sorted(cli.list_commands(context)):  # each is imported when it is asked for
        command = cli.get_command(context, name)
        assert command is not None
        inside = click.Context(command, info_name=name, parent=context)
        yield f"## `pipebench {name}`"
        pieces = ["pipebench", name, *command.collect_usage_pieces(inside)]
        usage = " ".join(pieces).replace("[[", "[").replace("]]", "]")  # click below 8.3 doubles those of choices
        yield f"```text\n{usage}\n```"
        yield from _paragraphs(command.help or "")
        options = [each for each in command.params if isinstance(each, click.Option)]
        if options:
            yield table(("option", "what it does"), ([_option(each), _cell_text(each.help or "")] for each in options))


def _option(option: click.Option) -> str:
    names = ", ".join([*option.opts, *option.secondary_opts])
    return f"`{names}{'' if option.is_flag else f' {option.metavar or option.type.name.upper()}'}`"


def _paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a command's help as Markdown; those that click doesn't rewrap become blocks of code."""
    for part in inspect.cleandoc(text).split("\n\n"):
        if part.startswith("\b\n"):
            first, *others = part[2:].split("\n")
            if first.endswith(":") and others:
                yield first
                yield f"```text\n{textwrap.dedent(chr(10).join(others))}\n```"
            else:
                yield " ".join([first, *others])
        else:
            yield _cell_text(" ".join(part.split("\n")))


def described(thing: Callable[..., Any]) -> str:
    """Return the part of a docstring before its sections, as one line per paragraph."""
    text = re.split(r"\n(?:Attributes|Args|Returns|Raises):\n", inspect.getdoc(thing) or "")[0]
    return "\n\n".join(" ".join(part.split("\n")) for part in text.strip().split("\n\n"))


def documented(thing: Callable[..., Any], section: str = "Attributes") -> dict[str, str]:
    """Return the descriptions of attributes or arguments by name.

    They are read from a section of a Google-style docstring or, of a dataclass without it, from comments at fields.
    """
    _, found, after = (inspect.getdoc(thing) or "").partition(f"\n{section}:\n")
    if not found and isinstance(thing, type):
        # The dataclass in the source, not one that is derived from it at run time.
        written = next(each for each in reversed(thing.__mro__) if is_dataclass(each))
        return dict(_commented(inspect.getsource(written)))
    block = re.split(r"\n(?=\S)", after)[0]
    entries = re.split(r"^ {4}(?=\w+: )", block, flags=re.MULTILINE)[1:]
    split = (" ".join(entry.split()).partition(": ") for entry in entries)
    return {name: re.sub(r"(?<!\.)\.$", "", description) for name, _, description in split}


def _commented(source: str) -> Iterator[tuple[str, str]]:
    """Yield name and description of the fields of a class that have a comment beside or above them."""
    above: list[str] = []
    for line in source.splitlines():
        if line.startswith("    # "):
            above.append(line[6:])
            continue
        if match := re.fullmatch(r" {4}(\w+): [^#]+?(?:  # (.*))?", line):
            description = match[2] or " ".join(above)
            yield match[1], description[:1].lower() + description[1:]
        above = []


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table, with the cells escaped."""
    return markdown.table([*header], ([_cell_text(cell).replace("|", r"\|") for cell in row] for row in rows))


def _cell_text(text: str) -> str:
    """Return text in which angle brackets outside of code are escaped."""
    return "".join(
        part if index % 2 else part.replace("<", "&lt;").replace(">", "&gt;")
        for index, part in enumerate(re.split(r"(`[^`]*`)", text))
    )


def main() -> None:
    """Write the pages."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
