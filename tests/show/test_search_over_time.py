"""A search over time, as a picture."""

from pathlib import Path

from pipebench.extensions.search.record import search_figure
from pipebench.extensions.search.trace_file import VERSION, SearchFile, Trained


def test_a_search_that_was_stopped_before_its_first_evaluation_is_drawn(tmp_path: Path) -> None:
    """0.2.0 looked for the fittest of individuals without scores, and Ctrl-C ended with a traceback."""
    first = Trained(0, None, 0, 0.0, 0, cells=["a"], changed=[], layers=3, scores=[])
    found = SearchFile(VERSION, individuals=[first], metric="top1")
    search_figure(found, (), 2.0).write(tmp_path / "search.png")
    assert (tmp_path / "search.png").read_bytes().startswith(b"\x89PNG")
