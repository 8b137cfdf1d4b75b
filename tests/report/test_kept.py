"""Stored results render every report without training; two of them are trained again and compared."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pipebench.recipe.catalog import find, recipe_names
from pipebench.recipe.engines import ENGINES
from pipebench.recipe.load import load_file
from pipebench.report.catalog import find_report, report_names, reports_folder
from pipebench.report.kept import kept_results
from pipebench.report.load import read_report
from pipebench.run.identity import made_on
from reports.studies import kept
from reports.studies.kept import MEASURED, WALL, difference, repeat, rounding_differences, without_seed


def trained() -> Iterator[tuple[str, ...]]:
    """Yield the words of every run that reports train, one per seed, as they are kept."""
    for name in report_names():
        report, _ = read_report(find_report(name))
        for run in (run for row in report.rows for run in row.runs.values() if ENGINES[run.engine].trains):
            words = (*run.words, f"engine.kind={run.engine}")
            yield from ((*words, f"train.seed={seed}") for seed in run.seeds) if run.seeds else (words,)


def test_stored_results_belong_to_their_commands() -> None:
    stored = [*kept_results(reports_folder()).values()]
    assert len(stored) > 50
    for each in stored:
        path = find(each.words[0], recipe_names)
        assert each.answers(load_file(path, each.words[1:])), each.words


def test_every_run_of_a_report_has_a_stored_result() -> None:
    stored = {without_seed(each.words) for each in kept_results(reports_folder()).values()}
    asked = {without_seed(words) for words in trained()}
    assert asked
    assert not sorted(asked - stored)


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1])
def test_stored_results_are_reproduced(place: int) -> None:
    """The two quickest; to the bit where processor and versions are the same, elsewhere bits may differ."""
    known = [each for each in kept_results(reports_folder()).values() if each.made]
    assert known
    same = [each for each in known if not rounding_differences(each)]
    if not same:
        pytest.skip(f"trained with {rounding_differences(known[0])}")
    each = sorted(same, key=lambda each: float(each.result.metrics[WALL]))[place]
    assert repeat(each) == "", each.words


def test_only_results_of_the_same_processor_and_versions_must_be_equal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Results stored on one processor and repeated on another were all reported as different."""
    known, here = next(iter(kept_results(reports_folder()).values())), made_on()
    elsewhere = replace(known, made={**here, "processor": "another, AVX2"})
    monkeypatch.setattr(kept, "kept_results", lambda _: {Path("a"): replace(known, made=here), Path("b"): elsewhere})
    monkeypatch.setattr(kept, "repeat", lambda _: "top1 0.9, now 0.8")
    assert kept.check(None) == 1
    first, second, *totals = capsys.readouterr().out.splitlines()
    assert first.startswith("differs  ")
    assert second.startswith("may differ  ")
    assert f"processor another, AVX2, here {here['processor']}" in second
    assert totals[0] == "0 of 2 repeat and 1 differ, of 2 in all"
    monkeypatch.setattr(kept, "repeat", lambda _: "")
    assert kept.check(None) == 0


def test_results_of_an_earlier_release_are_never_in_one_median_with_others() -> None:
    trees: dict[tuple[str, ...], set[bool]] = {}
    for each in kept_results(reports_folder()).values():
        trees.setdefault(without_seed(each.words), set()).add(bool(each.made))
    assert [words for words, named in trees.items() if len(named) > 1] == []


def test_a_different_result_is_reported_with_its_values() -> None:
    (first, second) = [*kept_results(reports_folder()).values()][:2]
    assert difference(first.result, first.result) == ""
    assert " now " in difference(first.result, replace(first.result, outcome="missed", sentence="missed it")) or (
        first.result.outcome == "missed"
    )
    changed = {**first.result.metrics, "samples_per_update": 7}
    assert "samples_per_update" in difference(first.result, replace(first.result, metrics=changed))
    assert difference(first.result, replace(first.result, points=second.result.points)) == "curves"
    later = {**first.result.metrics, **dict.fromkeys(MEASURED, 1e3)}
    assert (
        difference(replace(first.result, metrics=later), replace(first.result, metrics={**later, MEASURED[1]: 7})) == ""
    )
