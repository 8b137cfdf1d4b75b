"""The page on choosing a mode has the stored rows, which the current code reproduces, and names what is missing."""

import json
import re
from pathlib import Path

import pytest

from reports.studies.choose import CASES, MODES, ROWS, SERVERS, WORKERS, Found, Study, stored, table
from reports.studies.choose_curves import CURVES, TITLE
from reports.studies.choose_curves import MODES as DRAWN

PAGE = Path(__file__).parents[2] / "reports" / "choose.md"
AGAIN = f"is old: remove {ROWS.name}, and `python -m reports.studies.choose` makes all rows again and prints the table"
DRAW = f"are old: remove {CURVES.name}, and `python -m reports.studies.choose_curves` makes and draws them again"


def test_the_page_s_table_has_the_stored_rows() -> None:
    lines = PAGE.read_text().splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("| model |"))
    made = table(stored()).splitlines()
    assert lines[first : first + len(made)] == made
    every = len(CASES) * len(SERVERS) * len(WORKERS)
    assert f"{len(made) - 2} of {every} rows" in PAGE.read_text()


def test_every_row_has_all_modes_and_the_fastest_fits() -> None:
    for row in json.loads(ROWS.read_text()).values():
        found = [Found(**each) for each in row["modes"]]
        assert [each.mode for each in found] == [*MODES]
        assert all((each.samples_per_s > 0) is each.fits for each in found)


def test_a_quick_row_is_reproduced() -> None:
    """VGG-16 on two servers; rows were up to 30 % old, as no test made one."""
    was = [Found(**each) for each in stored()["VGG-16 | cluster-a | 8"]["modes"]]
    (case,) = (case for case in CASES if case.title == "VGG-16")
    for one, now in zip(was, Study(case).row("cluster-a", 8), strict=True):
        of_both = [(each.samples_per_s, each.bytes_per_sample, each.memory_bytes) for each in (one, now)]
        assert of_both[0] == pytest.approx(of_both[1], rel=1e-4), f"{one.mode}: choose.md {AGAIN}"
        assert (one.cause, one.shards, one.recomputes) == (now.cause, now.shards, now.recomputes), AGAIN


def test_curves_go_through_the_rows() -> None:
    """They are of the same plans, and were up to 3 % too fast, on 4,096 workers 18 %."""
    rows = stored()
    for key, curve in json.loads(CURVES.read_text()).items():
        mode, cluster = key.split(" | ")
        for count, rate in zip(WORKERS, curve["samples_per_s"], strict=False):
            (found,) = (each for each in rows[f"{TITLE} | {cluster} | {count}"]["modes"] if each["mode"] == mode)
            assert rate == pytest.approx(found["samples_per_s"], rel=1e-4), f"curves {DRAW}"


def test_the_page_states_the_curves_time_and_end() -> None:
    curves, text = json.loads(CURVES.read_text()), " ".join(PAGE.read_text().split())
    took = {mode: max(each["seconds"] for key, each in curves.items() if key.startswith(f"{mode} |")) for mode in DRAWN}
    assert f"at most {max(took.values()):.0f} s" in text
    assert ", ".join(f"`{mode}` {seconds:.0f} s" for mode, seconds in took.items()) in text
    for mode in ("dp", "pipedream-flush"):
        first, *_, last = curves[f"{mode} | h100"]["samples_per_s"]
        assert re.search(rf"{100 * last / first / 512:.0f} % (of its rate at 8 )?under `{mode}`", text)
