"""The record of a run's search."""

from pathlib import Path
from unittest.mock import Mock

from pipebench.extensions.search.record import record
from pipebench.extensions.search.trace_file import FILE_NAME, load_trace
from tests.engine.test_cells import whole
from tests.search.test_searching import history, job, run


def test_a_search_is_recorded_as_file_table_and_picture(tmp_path: Path) -> None:
    searched = job(whole(weights="one", cuts=()))
    result, _ = run(searched)
    log, found = Mock(), history(result)
    assert record(log, result, searched).search is None
    texts = dict(call.args for call in log.text.call_args_list)
    assert texts.keys() == {FILE_NAME, "search.md"}
    rows = texts["search.md"].splitlines()[2:]
    assert [row for row in rows if row.startswith(f"| **{found.best}** |")]
    assert len(rows) == len(found.individuals)
    assert [call.args[0] for call in log.file.call_args_list] == ["search.png"]
    (tmp_path / FILE_NAME).write_text(texts[FILE_NAME])
    trace = load_trace(str(tmp_path / FILE_NAME))  # another run can train the same individuals
    assert [each.minibatch for each in trace.changes] == [each.minibatch for each in found.individuals]
