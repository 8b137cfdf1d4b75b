"""The page of small minibatches equals its script's output, whose fits find given constants."""

import re
from pathlib import Path

import pytest

from pipebench.recipe.clusters import load_cluster
from reports.studies import vpipe_minibatches
from reports.studies.vpipe_minibatches import Model, Pass, fitted

PAGE = (Path(vpipe_minibatches.__file__).parents[1] / "vpipe_minibatches.md").read_text()


def cells(page: str, first: str) -> list[str]:
    """Return the row of the forms' table that begins so; it is the one with a GNMT column of a factor."""
    [row] = re.findall(rf"(?m)^\| {first} \| (\S+ m?u?s|-) \|(.*)\|$", page.partition("## Is it")[0])
    return [row[0], *(cell.strip() for cell in row[1].split("|"))]


@pytest.mark.slow
def test_the_page_equals_the_script_s_output(capsys: pytest.CaptureFixture[str]) -> None:
    forms = ["nothing", "pause", "minibatch"]
    vpipe_minibatches.main(["Transformer", "GNMT"], forms)
    made = capsys.readouterr().out
    for text in (
        vpipe_minibatches.HEAD,
        vpipe_minibatches.LINES,
        vpipe_minibatches.FORMS_TEXT,
        vpipe_minibatches.OWN_TEXT,
        vpipe_minibatches.BUSY_TEXT,
    ):
        assert text.strip() in PAGE
    for form in forms:
        ours, kept = cells(made, form), cells(PAGE, form)
        assert [*ours[:2], ours[3]] == [*kept[:2], kept[3]], form  # constant, fitted error, GNMT
    for line in made.splitlines():
        if re.match(r"\| (Transformer|GNMT) \| (forward|backward)", line):
            assert line in PAGE
        if re.match(r"\| (Transformer|GNMT) \| \d+\.\d ms \|", line):  # how busy devices are
            assert line in PAGE


def test_the_pause_is_the_calibrated_cluster_s() -> None:
    """Found here from profiles, there from simulated pipelines."""
    pause_s = load_cluster("vpipe-calibrated", 1).pause_s
    assert pause_s is not None
    assert cells(PAGE, "pause")[0] == f"{pause_s * 1e6:.0f} us"


def test_a_form_with_a_known_constant_is_found() -> None:
    """Times that a cost of 20 ms per pass of 7 kernels in 3 layers made, besides what grows with the samples."""
    made = object.__new__(Model)
    made.passes = {n: (Pass(1e-3 * n, 7, 3),) * 2 for n in (4, 16)}
    made.published = {n: (1e-3 * n + 0.02, 1e-3 * n + 0.02) for n in (4, 16)}
    for form, count in {"minibatch": 1, "pause": 7, "layer": 3}.items():
        assert fitted(form, made) == pytest.approx(0.02 / count, rel=0.01)
