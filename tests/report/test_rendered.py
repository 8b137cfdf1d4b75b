"""What is kept of rendered reports is what the command in its first line makes of today's code."""

import re
import shlex
from pathlib import Path

import matplotlib
import pytest
from click.testing import CliRunner
from PIL import Image, ImageChops, ImageStat

from pipebench.cli.main import cli
from pipebench.report.values import VALUES, read_values
from reports.studies.coverage import NAME, write_coverage
from tests.report.pages import differences

ROOT = Path(__file__).parents[2]
KEPT = sorted([*ROOT.glob("reports/rendered/*/report.md"), *ROOT.glob("docs/**/rendered/*/report.md")])
OWN = ROOT / "docs/example/report/rendered/four_modes/report.md"


# Of a few runs, or of runs that are kept; the others are made again with what is slow.
QUICK = {NAME, "four_modes", "quickstart", "figure13"}
DRAWN_ALIKE = matplotlib.__version_info__ >= (3, 11)  # which drew them; older ones place labels elsewhere
ALIKE = 3.0  # mean difference of two pictures' pixels, of 255: another font, not another number


def test_the_example_of_a_user_s_own_table_is_among_them() -> None:
    """Four modes on the user's own model, data and metric, trained on the virtual engine; nothing is published."""
    page = OWN.read_text()
    assert OWN in KEPT
    for mode in ("data parallelism", "model parallelism", "GPipe", "PipeDream"):
        assert re.search(rf"^\| {mode} \| (4|straight) \| [\d.]+ ms \|", page, re.MULTILINE), mode
    assert "published" not in page


@pytest.mark.parametrize(
    "kept",
    [
        pytest.param(path, id=path.parent.name, marks=() if path.parent.name in QUICK else pytest.mark.slow)
        for path in KEPT
    ],
)
def test_the_command_in_its_first_line_makes_a_page_again(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # commands name recipes from there
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    text, out = kept.read_text(), tmp_path / "out"
    program, *words = shlex.split(text.splitlines()[0].strip("`"))
    if kept.parent.name == NAME:
        write_coverage(out)
    else:
        assert program == "pipebench"
        done = CliRunner().invoke(cli, [*words, "--out", str(out)])
        assert done.exit_code == 0, done.output
    page = (out / "report.md").read_text()
    assert differences(text, page) == []
    drawn = {*re.findall(r"\]\(([^/)]*\.png)\)", page)}  # its own: a text may show another page's
    assert drawn == {path.name for path in out.glob("*.png")} == {path.name for path in kept.parent.glob("*.png")}
    assert [name for name in sorted(drawn) if DRAWN_ALIKE and _differ(out / name, kept.parent / name)] == []
    assert kept.parent.name == NAME or (out / "report.html").stat().st_size > len(page)


@pytest.mark.parametrize("kept", [pytest.param(path, id=path.parent.name) for path in KEPT])
def test_a_page_says_when_from_which_tree_and_by_which_command_it_was_made(kept: Path) -> None:
    first, *_, last = kept.read_text().splitlines()
    assert re.fullmatch(
        r"Made \d{4}-\d\d-\d\d \d\d:\d\d UTC from tree [0-9a-f]{12}( and \d+ changed files)? "
        r"with pipebench [\d.]+\+[0-9a-f]{12}, torch [^ ]+, by (`.+`)\.",
        last,
    )
    assert last.endswith(f"by {first}.")
    if kept.parent.name == NAME:
        return  # read from the other pages' values, and has none of its own
    values = read_values(kept.parent / VALUES)
    assert last == f"Made {values.made}, by {first}."
    assert values.report == kept.parent.name


def _differ(one: Path, other: Path) -> bool:
    with Image.open(one) as a, Image.open(other) as b:
        if a.size != b.size:
            return True
        return max(ImageStat.Stat(ImageChops.difference(a.convert("RGB"), b.convert("RGB"))).mean) > ALIKE
