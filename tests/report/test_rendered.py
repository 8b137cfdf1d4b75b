"""Stored pages of reports equal those that the command in their first line makes with the current code."""

import re
import shlex
from pathlib import Path

import matplotlib
import pytest
from click.testing import CliRunner
from PIL import Image, ImageChops, ImageStat

from pipebench.cli.main import cli
from pipebench.report.catalog import find_report
from pipebench.report.evaluate import CellOutcome, evaluate_report
from pipebench.report.evaluated import Origin
from pipebench.report.load import load_report
from pipebench.report.values import VALUES, read_values
from pipebench.train.engines import simulate
from pipebench.train.memory_forecast import MemoryForecast
from pipebench.train.prepare import prepare
from reports.studies.coverage import NAME, write_coverage
from tests.report.pages import differences

ROOT = Path(__file__).parents[2]
STORED = sorted([*ROOT.glob("reports/rendered/*/report.md"), *ROOT.glob("docs/**/rendered/*/report.md")])
OWN = ROOT / "docs/example/report/rendered/four_modes/report.md"


# Pages of a few runs, or of stored runs; the others are made again in slow tests.
QUICK = {NAME, "quickstart", "figure13"}
# Of reports that take long, a row that is simulated in a second or less.
QUICK_ROWS = {
    "figure1": "vgg16-4", "figure14a": "vgg16", "figure14b": "vgg16", "figure15": "plan-16", "figure16": "gnmt8",
    "figure17": "gnmt8", "figure18": "depth-2", "ours": "vgg16-hybrid-planned", "preprint2018": "s2vt-4",
    "table1": "awd-lm-1x4-a-per-gpu", "theory": "interleaved-n2-m4-v2", "vpipe_calibration": "gnmt-pipedream",
    "vpipe_figure1": "gnmt", "vpipe_figure9": "gnmt-gpipe",
    "vpipe_figure15a": "gnmt", "vpipe_table2": "gnmt", "vpipe_table3": "gnmt-pipedream",
}  # fmt: skip
DRAWN_ALIKE = matplotlib.__version_info__ >= (3, 11)  # which drew them; older ones place labels elsewhere
ALIKE = 3.0  # mean difference of two pictures' pixels, of 255: another font, not another number


def test_the_example_of_a_user_s_own_table_is_among_them() -> None:
    """Four modes on the user's own model, data and metric, trained on the virtual engine; nothing is published."""
    page = OWN.read_text()
    assert OWN in STORED
    for mode in ("data parallelism", "model parallelism", "GPipe", "PipeDream"):
        assert re.search(rf"^\| {mode} \| (4|straight) \| [\d.]+ ms \|", page, re.MULTILINE), mode
    assert "published" not in page


@pytest.mark.parametrize(
    "stored",
    [
        pytest.param(path, id=path.parent.name, marks=() if path.parent.name in QUICK else pytest.mark.slow)
        for path in STORED
    ],
)
def test_the_command_in_its_first_line_makes_a_page_again(
    stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # commands name recipes from there
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    text, out = stored.read_text(), tmp_path / "out"
    program, *words = shlex.split(text.splitlines()[0].strip("`"))
    if stored.parent.name == NAME:
        write_coverage(out)
    else:
        assert program == "pipebench"
        done = CliRunner().invoke(cli, [*words, "--out", str(out)])
        assert done.exit_code == 0, done.output
    page = (out / "report.md").read_text()
    assert differences(text, page) == []
    drawn = {*re.findall(r"\]\(([^/)]*\.png)\)", page)}  # its own: a text may show another page's
    assert drawn == {path.name for path in out.glob("*.png")} == {path.name for path in stored.parent.glob("*.png")}
    assert [name for name in sorted(drawn) if DRAWN_ALIKE and _differ(out / name, stored.parent / name)] == []
    assert stored.parent.name == NAME or (out / "report.html").stat().st_size > len(page)


@pytest.mark.parametrize("stored", [pytest.param(path, id=path.parent.name) for path in STORED])
def test_a_page_says_when_from_which_tree_and_by_which_command_it_was_made(stored: Path) -> None:
    first, *_, last = stored.read_text().splitlines()
    assert re.fullmatch(
        r"Made \d{4}-\d\d-\d\d \d\d:\d\d UTC from tree [0-9a-f]{12}( and \d+ changed files)? "
        r"with pipebench [\d.]+\+[0-9a-f]{12}, torch [^ ]+, by (`.+`)\.",
        last,
    )
    assert last.endswith(f"by {first}.")
    if stored.parent.name == NAME:
        return  # read from the other pages' values, and has none of its own
    values = read_values(stored.parent / VALUES)
    assert last == f"Made {values.made}, by {first}."
    assert values.report == stored.parent.name


@pytest.mark.parametrize(("name", "row"), QUICK_ROWS.items(), ids=QUICK_ROWS)
def test_a_quick_row_has_the_current_simulator_s_values(name: str, row: str) -> None:
    """The whole page is made again in slow tests only, and could be out of date until then."""
    report, asked = load_report(find_report(name), [row])
    outcomes: dict[tuple[str, str, str], list[CellOutcome]] = {}
    played: dict[tuple[str, ...], CellOutcome] = {}
    for each in asked:
        if each.words not in played:
            job = prepare(each.loaded.recipe, each.loaded.cluster, trains=False)
            result, _ = simulate(job, MemoryForecast(job))
            origin = Origin(each.run, each.words, result.engine, "", "", 0)
            played[each.words] = CellOutcome(origin, result)
        outcomes.setdefault((each.row, each.run, each.column), []).append(played[each.words])
    now = {(cell.measure, cell.column): cell.value for cell in evaluate_report(report, outcomes).cells}
    cells = read_values(ROOT / "reports/rendered" / name / VALUES).cells
    stored = {(cell.measure, cell.column): cell.value for cell in cells if cell.row == row}
    assert stored
    again = f"reports/rendered/{name} is old: `nox -s reports -- {name}` makes it again"
    assert {key: now[key] for key in stored} == {
        key: value if isinstance(value, str) else pytest.approx(value, rel=1e-3) for key, value in stored.items()
    }, again


def _differ(one: Path, other: Path) -> bool:
    with Image.open(one) as a, Image.open(other) as b:
        if a.size != b.size:
            return True
        return max(ImageStat.Stat(ImageChops.difference(a.convert("RGB"), b.convert("RGB"))).mean) > ALIKE
