"""What is kept of rendered reports is what the command in its first line makes of today's code."""

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipebench.cli.main import cli
from tests.report.pages import differences

ROOT = Path(__file__).parents[2]
KEPT = sorted([*ROOT.glob("reports/rendered/*/report.md"), *ROOT.glob("docs/**/rendered/*/report.md")])
OWN = ROOT / "docs/example/report/rendered/four_modes/report.md"


# Of a few runs, or of runs that are kept; the others are made again with what is slow.
QUICK = {"four_modes", "quickstart", "figure10_11", "figure13", "asp"}


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
    assert program == "pipebench"
    done = CliRunner().invoke(cli, [*words, "--out", str(out)])
    assert done.exit_code == 0, done.output
    page = (out / "report.md").read_text()
    assert differences(text, page) == []
    drawn = {*re.findall(r"\]\(([^/)]*\.png)\)", page)}  # its own: a text may show another page's
    assert drawn == {path.name for path in out.glob("*.png")} == {path.name for path in kept.parent.glob("*.png")}
    assert (out / "report.html").stat().st_size > len(page)
