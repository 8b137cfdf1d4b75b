"""The page of Algorithm 1's decisions equals its script's output."""

from pathlib import Path

from reports.studies import vpipe_decisions
from reports.studies.vpipe_decisions import decisions_s

PAGE = (Path(vpipe_decisions.__file__).parents[1] / "vpipe_decisions.md").read_text()


def test_the_page_equals_the_script_s_output() -> None:
    assert vpipe_decisions.HEAD.strip() in PAGE
    layers, seconds = decisions_s("GNMT")
    assert f"| GNMT | {layers} | {len(seconds)} |" in PAGE
    assert all(each > 0 for each in seconds)
