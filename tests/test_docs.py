"""What the documentation shows is what the code does."""

import itertools
import json
import math
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from pipebench.cli.main import cli
from pipebench.extensions.moves.repartition_plan import CutLayout, Repartition
from pipebench.extensions.moves.settings import MOVES
from pipebench.formats import num_bytes, number, percent, ratio, seconds
from pipebench.recipe.yaml_file import read_mapping
from pipebench.report.values import VALUES, read_values
from pipebench.schedule.modes import KEEP, MODES
from pipebench.schedule.operations import Op
from pipebench.schedule.pipeline import Pipeline, chain, noam
from pipebench.schedule.programs import programs
from pipebench.tracking.view import view_state
from pipebench.zoo import DATASETS, MODELS
from tests.commands import run_copy
from tests.instruction_text import render
from tests.pictures import draw
from tests.schedule.moving import Routes, moving, moving_programs
from tests.test_rooms import ROOMS

ROOT = Path(__file__).parents[1]
MOST_WORDS = 850  # of README, code included, but not signs between the cells of tables and drawings
MOST_UNLIKE = 2.0  # of 255 grey levels, on average: a picture with another panel is ten apart

DRAWN = [
    ("single", (1,), 3, 1),
    ("dp", (4,), 8, 1),
    ("dp-asp", (4,), 8, 1),
    ("model", (1, 1, 1, 1), 1, 1),
    ("hybrid", (3, 1), 6, 1),
    ("gpipe", (1, 1, 1, 1), 1, 4),
    ("pipedream-flush", (1, 1, 1, 1), 1, 4),
    ("interleaved", (1,) * 8, 1, 4),
    ("zero-bubble", (1, 1, 1, 1), 1, 6),
    ("zero-bubble", (2, 2), 2, 4),
    ("zbv", (1,) * 8, 1, 8),
    ("dualpipev", (1,) * 8, 1, 8),
    ("dualpipe", (2,) * 4, 2, 4),
    ("pipedream", (1, 1, 1, 1), 6, 1),
    ("pipedream", (2, 1), 8, 1),
    ("spectrain", (1, 1, 1, 1), 6, 1),
    ("xpipe", (1, 1, 1, 1), 2, 4),
    ("pipemare", (1, 1, 1, 1), 6, 1),
    ("zero1", (2, 2, 2), 4, 1),
    ("zero2", (2, 2, 2), 4, 1),
    ("fsdp", (2, 2, 2), 4, 1),
]


@pytest.mark.parametrize(("mode", "replicas", "num_minibatches", "microbatches"), DRAWN)
def test_pictures_of_the_modes(mode: str, replicas: tuple[int, ...], num_minibatches: int, microbatches: int) -> None:
    section = (ROOT / "docs/modes.md").read_text().split(f"\n## {mode}\n")[1].split("\n## ")[0]
    pictures = re.findall(r"```\n(.*?)\n```", section, re.DOTALL)
    row, n = MODES[mode], len(replicas)
    depth = row.depth or noam(replicas[: max(1, n // row.chunks)])
    pipeline = Pipeline(
        replicas, chain(n), row.order, row.flush, depth, microbatches, row.accumulate or depth, weights=row.weights,
        chunks=min(row.chunks, n), sync=row.sync, backward=row.backward, sums=row.sums, shard=row.shard,
    )  # fmt: skip
    assert draw(pipeline, num_minibatches, [1] * n, [2] * n) in pictures


@pytest.mark.parametrize(
    ("mode", "count", "microbatches", "width"),
    [("spectrain", 6, 1, 120), ("xpipe", 2, 4, 129), ("pipemare", 6, 1, 126)],
)
def test_pictures_of_the_versions_that_passes_read(mode: str, count: int, microbatches: int, width: int) -> None:
    text, row = (ROOT / "docs/modes.md").read_text(), MODES[mode]
    pipeline = Pipeline((1,) * 4, chain(4), row.order, row.flush, 4, microbatches, weights=row.weights)
    assert f"```\n{draw(pipeline, count, [1] * 4, [2] * 4, width=width, versions=True)}\n```" in text


@pytest.mark.parametrize("after", [(4, 6), (2, 6)])
def test_pictures_of_layers_that_move(after: tuple[int, int]) -> None:
    text, pipeline = (ROOT / "docs/vpipe.md").read_text(), Pipeline((1,) * 3, chain(3), "1f1b", False, 3)
    routes = Routes(pipeline, CutLayout((3, 6), (KEEP,) * 9), lambda layout: pipeline)
    routes.announce(Repartition(6, after))
    drawn = draw(moving(pipeline), 10, [1] * 3, [2] * 3, by_extension={MOVES: routes}, since=12, width=126)
    assert f"```\n{drawn}\n```" in text
    lists = [[*program] for program in moving_programs(pipeline, 10, routes)][:2]
    for program in lists:
        shown = [it for it in program if it.op not in (Op.LOAD_INPUT, Op.RECEIVE_ACTIVATION, Op.SEND_ACTIVATION)]
        shown = [it for it in shown if it.op not in (Op.RECEIVE_GRADIENT, Op.SEND_GRADIENT)]
        begin = next(i for i, it in enumerate(shown) if it.op is Op.FORWARD and it.number == 4)
        end = next(i for i, it in enumerate(shown) if it.op is Op.FORWARD and it.number == 7)
        assert f"\n{render(shown[begin:end])}\n" in text


def columns_of(name: str) -> list[str]:
    """Return a mode's row as the documentation has it."""
    row = MODES[name]
    accumulate = "depth" if row.accumulate is None else str(row.accumulate)
    stated = (row.flush, row.recompute, row.reshard_after_forward)
    flush, recompute, reshards = ("yes" if each else "no" for each in stated)
    depth = "NOAM" if row.depth is None else str(row.depth)
    return [
        name, row.shape, row.order, flush, row.weights, row.sync, accumulate, str(row.chunks), row.backward, depth,
        recompute, row.sums, row.shard, reshards,
    ]  # fmt: skip


def test_the_documented_table_of_modes_is_the_package_s() -> None:
    lines = (ROOT / "docs/reference/modes.md").read_text().split("\n| mode | plans |")[1].split("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert rows[2:] == [columns_of(name) for name in MODES]


def test_every_mode_has_a_paragraph() -> None:
    headings = re.findall(r"^## (\S+)$", (ROOT / "docs/modes.md").read_text(), re.MULTILINE)
    assert headings == list(MODES)


def test_readme_s_pipeline_is_drawn_by_the_schedule() -> None:
    readme = (ROOT / "README.md").read_text().splitlines()
    shown = [line[:81].rstrip() for line in readme if line.startswith("stage ")]
    pipeline = Pipeline((1, 1, 1, 1), chain(4), "1f1b", False, 4)
    drawn = [line[:81].rstrip() for line in draw(pipeline, 9, [1] * 4, [2] * 4).splitlines()]
    assert shown == drawn


def test_the_architecture_page_shows_the_schedule_s_minibatch() -> None:
    pipeline = Pipeline((1, 1), chain(2), "1f1b", False, 2)
    text = (ROOT / "docs/architecture.md").read_text()
    for worker, program in enumerate(programs(pipeline, 5)):
        (line,) = re.findall(rf"^({worker}\w+3.*)$", text, re.MULTILINE)
        about = [each for each in program if each.number == 3]
        assert line.replace(" ...", "") == render(about)


def test_the_index_has_every_page_of_the_folder() -> None:
    docs = ROOT / "docs"
    listed = re.findall(r"^\| \[.+?\]\((\S+?\.md)\) \|", (docs / "index.md").read_text(), re.MULTILINE)
    pages = [path.relative_to(docs).as_posix() for path in (*docs.glob("*.md"), *docs.glob("reference/*.md"))]
    assert sorted(listed) == sorted(name for name in pages if name != "index.md")


def test_the_architecture_page_names_existing_packages_and_files() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    rooms = [*re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE), "root"]
    assert rooms == list(ROOMS)
    files = re.findall(r"`((?:\w+/)+\w+\.py)`", text)
    assert len(files) > 15
    for file in files:
        assert (ROOT / file).exists() or (ROOT / "pipebench" / file).exists(), file


def links(page: Path) -> Iterator[tuple[str, Path]]:
    """Yield a page's links into the repository, and the files or folders that they are to."""
    for link in re.findall(r"\]\((?!mailto:|#)([^)#\s]+)", page.read_text()):
        if not link.startswith("http"):
            yield link, page.parent / link


def test_links_between_pages_are_not_dead() -> None:
    folders = ("docs", "docs/reference", "reports")
    pages = [*ROOT.glob("*.md"), *(page for folder in folders for page in (ROOT / folder).glob("*.md"))]
    for page in pages:
        for link, file in links(page):
            assert file.exists(), f"{page.relative_to(ROOT)} links {link}"


def test_the_pictures_of_readme_are_not_empty() -> None:
    pictures = [file for _, file in links(ROOT / "README.md") if file.suffix == ".png"]
    assert len(pictures) == 2
    assert all(picture.stat().st_size > 1000 for picture in pictures)


def test_readme_is_read_in_five_minutes() -> None:
    words = (ROOT / "README.md").read_text().split()
    assert sum(re.search(r"\w", word) is not None for word in words) <= MOST_WORDS


def test_table_1_of_the_results_is_the_report_s() -> None:
    """Each of its rows has the report's cells, in the report's order."""
    page = (ROOT / "reports/rendered/table1/report.md").read_text()
    text = (ROOT / "docs/results.md").read_text()
    rows = [line for line in text.split("| row of Table 1 |")[1].splitlines()[2:] if line]
    shown = {cells[0]: cells[2:] for cells in map(_cells, itertools.takewhile(lambda line: line[0] == "|", rows))}
    epochs, times = (
        {cells[0]: cells for cells in map(_cells, page.split(f"## {title}, higher")[1].split("\n\n")[1].splitlines())}
        for title in (
            "Epoch-time speed-up over data parallelism, stated plan",
            "Time-to-accuracy speed-up over data parallelism",
        )
    )
    assert [*shown] == [name for name, cells in epochs.items() if cells[1].endswith("x")]
    published = read_mapping(ROOT / "reports/published/pipedream_sosp19.yaml")["entries"]
    unlisted = {
        each["claim"].partition(":")[0].replace(" on ", ", "): f"{each['values']['tta_speedup']:g}x"
        for each in published
        if each["id"].startswith("t1-") and isinstance(each["values"].get("tta_speedup"), float)
    }
    for name, cells in shown.items():
        time = times.get(name, ["-", unlisted.get(name, "-"), "-", "-", "-"])
        assert cells == [epochs[name][1], epochs[name][2], epochs[name][4], time[1], time[4]], name


def test_the_four_ways_of_readme_are_the_report_s() -> None:
    """The runs kept in the repository."""
    page = (ROOT / "reports/rendered/quickstart/report.md").read_text()
    rows = [_cells(line) for line in page.split("## Side by side")[1].split("## ")[0].splitlines() if line]
    reported = {name: [plan, *others] for name, *others, plan in rows[2:]}
    header, shown = four_ways()
    columns = [header.index(name) for name in ("plan", "time to accuracy", "vs dp", "epochs", "bytes per sample")]
    columns.append(header.index("memory"))
    assert {name: [line[column] for column in columns] for name, line in shown.items()} == reported


def four_ways() -> tuple[list[str], dict[str, list[str]]]:
    """Return the headings of README's table, and its rows by their first cell."""
    text = (ROOT / "README.md").read_text().split("## Four ways")[1].split("```\n")[1]
    lines = [re.split(r" {2,}", line.strip()) for line in text.partition("\n\n")[0].splitlines()]
    return lines[0], {line[0]: line for line in lines[1:]}


def test_readme_s_sentences_on_the_four_ways_agree_with_their_table_and_the_results_page() -> None:
    """Once its reason was one processor's epochs at one seed."""
    header, rows = four_ways()
    memory = header.index("memory")
    one, other = (float(rows[mode][memory].split()[0]) for mode in ("pipedream", "dp"))
    readme, results = (" ".join((ROOT / name).read_text().split()) for name in ("README.md", "docs/results.md"))
    assert f"pays with {one / other:.1f} times the memory" in readme
    medians = [int(re.findall(rf"{mode}.*?\(median (\d+) ms\)", results)[0]) for mode in (", pipedream", ", dp")]
    assert "medians are [{} ms and {} ms]".format(*medians) in readme
    times = f"{medians[1] / medians[0]:.2f} times as fast"
    assert times in readme
    assert f"pipedream was {times} as dp: how a processor rounds" in results


@pytest.mark.parametrize(
    ("report", "measure", "systems", "text"),
    [
        ("vpipe_table3", "effective", "gpipe-vpipe pipedream-vpipe", "with vPipe {both} of the published from either"),
        ("vpipe_table3", "effective", "gpipe", "GPipe {table2}, {planned}"),
        ("vpipe_table3", "effective", "pipedream", "PipeDream {table2}, {planned}"),
        (
            "vpipe_figure9",
            "improvement",
            "gpipe-vpipe",
            "average {planned} from the planner's cuts, {table2} from Table 2's",
        ),
        (
            "vpipe_figure9",
            "improvement",
            "pipedream-vpipe",
            "average {planned} from the planner's cuts, {table2} from Table 2's",
        ),
    ],
)
def test_the_results_sentences_on_vpipe_s_systems_agree_with_the_report(
    report: str, measure: str, systems: str, text: str
) -> None:
    """Once values that one column lacks were left out, and ones that the paper doesn't print were called published."""
    found: dict[str, list[float]] = {"table2": [], "planned": []}
    models = ("bert", "transformer", "amoebanet", "gnmt")
    for cell in read_values(ROOT / "reports/rendered" / report / VALUES).cells:
        model, _, system = cell.row.partition("-")
        if (cell.measure, model in models, system in systems.split()) == (measure, True, True):
            base = cell.published if measure == "effective" else 1
            found[cell.column].append(float(cell.value) / float(base or math.nan))
    x = "x" if measure == "improvement" else ""
    ends = {name: f"{min(each):.2f}{x} to {max(each):.2f}{x}" for name, each in found.items()}
    if x:
        ends = {name: f"{sum(each) / len(each):.2f}x ({ends[name]})" for name, each in found.items()}
    stated = text.format(**ends, both=ends["table2"])
    assert stated in (ROOT / "docs/results.md").read_text()
    assert "either" not in text or ends["table2"] == ends["planned"]


def test_the_errors_of_readme_and_the_results_are_the_report_s() -> None:
    page = (ROOT / "reports/rendered/table1/report.md").read_text()
    scores = {
        (cells[1], cells[2]): cells[4:]
        for cells in map(_cells, page.split("\n## Scores\n")[1].splitlines())
        if len(cells) == 6 and cells[0].endswith("stated plan")
    }
    ideal, _ = scores["ideal hardware", "not by construction"]
    error, rank = scores["clusters of 2019", "not by construction"]
    predicted, _ = scores["clusters of 2019", "not fitted on"]
    readme, results = (" ".join((ROOT / name).read_text().split()) for name in ("README.md", "docs/results.md"))
    assert f"three rates fitted on six of its 11 rows | {_rounded(error)} |" in readme
    assert f"its five other rows | {_rounded(predicted)} (" in readme
    assert f"links as published | {_rounded(ideal)} |" in readme
    assert f"geometric-mean error is {error}" in results
    assert f"ideal hardware: {_rounded(ideal)}) and the rank correlation {rank}." in results
    assert f"the error is {_rounded(predicted)}, that of a constant" in results


def _rounded(share: str) -> str:
    return f"{float(share.rstrip('%')):.0f}%"


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_quick_start_prints_what_readme_says(tmp_path: Path) -> None:
    """Trains the quick start whole, in a folder of its own; compares what does not vary between machines."""
    done = run_copy(["run", "quickstart"], tmp_path, {"COLUMNS": "110"})
    assert done.returncode == 0, done.stderr
    assert "quickstart: reached top1 0.95" in done.stdout
    readme = (ROOT / "README.md").read_text().split("## Four ways")[0]
    for beginning in (
        "plan  ",
        "durations",
        "datasheet, PCIe 16 GB), 10 us per kernel",
        "sent per sample",
        "workers idle",
        "memory  ",
    ):
        (shown,) = [line.strip() for line in readme.splitlines() if line.strip().startswith(beginning)]
        shown = re.split(r"; \d+ MB in all", shown)[0]  # totals grow with the epochs it takes
        assert shown in done.stdout, shown
    # How many epochs it takes varies, and the seconds with them, but not what is said of them.
    ((of_readme,), (stated,)) = (re.findall(r"time to accuracy +(.*)", text) for text in (readme, done.stdout))
    assert re.sub(r"[\d.]+ m?s", "", stated) == re.sub(r"[\d.]+ m?s", "", of_readme)
    assert "52.9 ms each" in done.stdout
    assert (tmp_path / "mlflow.db").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("rendered")
def test_the_plan_of_the_planner_page_is_what_the_planner_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    page = (ROOT / "docs/planner.md").read_text()
    command, shown = re.findall(r"```\n(.*?)\n```", page, re.DOTALL)[:2]
    drawn = tmp_path / "plan.png"
    done = CliRunner().invoke(cli, [*command.split()[1:], "--picture", str(drawn)])
    assert done.exit_code == 0, done.output
    printed = {line.strip() for line in done.output.splitlines()}
    missing = [line for line in shown.splitlines() if line != "..." and line.strip() not in printed]
    assert not missing
    assert unlike(drawn, ROOT / "docs/plan.png") < MOST_UNLIKE, f"{command} --picture docs/plan.png"


@pytest.mark.slow
def test_how_recipes_scale_is_what_sweeps_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/sweeps.md").read_text().split("## Weak and strong scaling")[1]
    found = re.findall(r"```\n(pipebench run [^\n]*)\n```\n\n```\n(.*?)\n```", page, re.DOTALL)
    assert len(found) == 2
    for command, shown in found:
        done = CliRunner().invoke(cli, command.split()[1:])
        assert done.exit_code == 0, done.output
        stated, printed = ({" ".join(line.split()) for line in text.splitlines()} for text in (shown, done.output))
        assert stated <= printed


@pytest.mark.usefixtures("rendered")
@pytest.mark.parametrize("name", ["memory", "occupancy", pytest.param("swap", marks=pytest.mark.slow)])
def test_pictures_of_memory_are_what_their_commands_draw(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page also has the command's message on too little memory."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/memory.md").read_text()
    (command,) = re.findall(rf"^    pipebench (draw .*--picture {name}\.png.*)$", page, re.MULTILINE)
    done = CliRunner().invoke(cli, shlex.split(command))
    assert done.exit_code == 0, done.output
    again = f"docs/{name}.png is old: `pipebench {command}` draws it again"
    assert unlike(tmp_path / f"{name}.png", ROOT / f"docs/{name}.png") < MOST_UNLIKE, again
    stated = " ".join(line for line in done.output.splitlines() if line.startswith("out of memory"))
    assert stated in " ".join(page.split())


def unlike(one: Path, other: Path) -> float:
    """Return how far two pictures are apart as thumbnails, in grey levels: other releases of matplotlib move text."""
    pixels = [np.asarray(Image.open(path).convert("L").resize((96, 54)), dtype=float) for path in (one, other)]
    return float(np.abs(pixels[0] - pixels[1]).mean())


def test_the_runs_of_mlflow_s_picture_are_those_of_readme_s_table() -> None:
    """The study that takes it writes the page's cells into the file.

    To 1%: it needs a browser, and so is taken more rarely than the clock changes.
    """
    with Image.open(ROOT / "docs/mlflow.png") as picture:
        about = json.loads(picture.info["Description"])
    cells = [dict(zip(about["columns"], row, strict=True)) for row in about["rows"]]
    shown = {cell["mode"]: cell for cell in cells if "," not in cell["mode"]}
    stated = {
        mode: [seconds(float(cell["time_to_accuracy_s"])), ratio(float(cell["speedup_over_dp"])),
               num_bytes(float(cell["comm_bytes_per_sample"])), num_bytes(float(cell["peak_memory_bytes_max"])),
               percent(float(cell["bubble_fraction"])), cell["epochs_to_target"], seconds(float(cell["epoch_time_s"])),
               number(float(cell["throughput_samples_per_s"])), cell["plan"]]
        for mode, cell in shown.items()
    }  # fmt: skip
    header, rows = four_ways()
    columns = (
        *("time to accuracy", "vs dp", "bytes per sample", "memory", "bubble", "epochs", "epoch time", "samples/s"),
        "plan",
    )
    assert rows.keys() == stated.keys()
    for name, row in rows.items():
        for column, cell in zip(columns, stated[name], strict=True):
            (given, unit), (shown_as, its_unit) = map(_parted, (row[header.index(column)], cell))
            assert unit == its_unit, f"{name}, {column}"
            assert given == pytest.approx(shown_as, rel=0.01), f"{name}, {column}"
    state = json.loads(view_state())["columnOrder"]
    places = [state.index(f"{kind}.`{name}`") for name in about["columns"][3:] for kind in ("tags", "metrics", "params")
              if f"{kind}.`{name}`" in state]  # fmt: skip
    assert len(places) == len(about["columns"]) - 3
    assert places == sorted(places), "the columns of the view, in its order"


def _parted(cell: str) -> tuple[float, str]:
    """Return the number that a cell begins with, 0 if none, and the rest."""
    number = re.match(r"[\d,]*\.?\d*", cell)
    assert number
    return float(number[0].replace(",", "") or 0), cell[number.end() :]


def test_the_page_of_the_zoo_has_every_name_and_its_size() -> None:
    text = (ROOT / "docs/zoo.md").read_text()
    assert {*MODELS, *DATASETS} <= {*re.findall(r"`(\w+)`", text)}
    for name, entry in MODELS.items():
        with torch.device("meta"):
            count = sum(parameter.numel() for parameter in entry.make().parameters())
        (row,) = [line for line in text.splitlines() if line.startswith("| ") and f"`{name}`" in line]
        assert f"{count:,}" in row, name
