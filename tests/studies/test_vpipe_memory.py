"""The page of memory and PCIe equals its script's output of stored runs; Algorithm 2 is read as by the planner."""

from pathlib import Path

import pytest

from pipebench.planner.swap_recompute import algorithm_2
from reports.studies import vpipe_memory
from reports.studies.vpipe_algorithms import stage
from reports.studies.vpipe_memory import Table, constant_gb, known, listed, played, with_constant

PAGE = (Path(vpipe_memory.__file__).parents[1] / "vpipe_memory.md").read_text()


def test_the_page_equals_the_script_s_output(capsys: pytest.CaptureFixture[str]) -> None:
    vpipe_memory.main()
    assert capsys.readouterr().out.rstrip() == PAGE.rstrip()


def test_sentences_on_equation_2_agree_with_its_row() -> None:
    """It was two thirds and more, beside a row from 0.57 on."""
    (row,) = [line.split(" | ") for line in PAGE.splitlines() if line.startswith("| by equation (2) |")]
    assert f"keeps PCIe busy for {row[2]} of what is published" in " ".join(PAGE.split())
    assert f"has {row[-1].removesuffix(' |')} of the throughput" in " ".join(PAGE.split())


def test_the_constant_fits_its_two_rows() -> None:
    of = Table()
    found = [with_constant(of.here(row, "memory"), constant_gb(of)) for row in vpipe_memory.FITTED_ON]
    stated = [of.published(row, "memory") for row in vpipe_memory.FITTED_ON]
    assert found[0] * found[1] == pytest.approx(stated[0] * stated[1], rel=0.02)


@pytest.mark.parametrize("seed", range(20))
def test_algorithm_2_is_read_as_in_the_planner(seed: int) -> None:
    """The planner's swaps only where that frees memory; the study's may swap everywhere, and fits no less."""
    problem = stage(seed, 12)
    assert listed(problem, problem.in_flight).memory == algorithm_2(problem).memory


def test_a_stored_run_is_reproduced() -> None:
    way = "by equation (2)"
    (kept,) = [each for each in known() if (each.row, each.way) == ("gnmt-pipedream-vpipe", way)]
    again = played("gnmt", "pipedream-vpipe", way, 0.0)
    for name in ("pcie", "memory", "effective", "throughput"):
        assert getattr(again, name) == pytest.approx(getattr(kept, name), rel=1e-6), name
