"""Evaluate a report: cells, scores and verdicts from the outcomes of its runs, by pure functions."""

import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from pipebench.formats import UNKNOWN, listed
from pipebench.report.definition import Measure, PublishedClaim, Quoted, Report, Row
from pipebench.report.evaluated import EARLIER, LEFT_OUT, NO, UNTESTABLE, YES, Evaluated, Origin, TableCell, Verdict
from pipebench.report.expressions import Cells, Expression, Lookup, NoValueError, Value, cells_of, evaluate, explain
from pipebench.report.metrics import value_of
from pipebench.report.reasons import reason_for_plan, same_plan
from pipebench.report.recipes import SAME
from pipebench.report.scores import claim_scores, scores_of
from pipebench.report.wording import number_text
from pipebench.simulate.meter import MEMORY
from pipebench.train.result import RunResult

_NOT_RUN = "no run answers it"
_MOST_NAMED = 4  # rows named in a reason


@dataclass(frozen=True)
class CellOutcome:
    """The outcome of one run of a row."""

    origin: Origin
    result: RunResult | None = None  # None if it couldn't run
    problem: str | None = None  # why it couldn't run


# By row, run and column (SAME for a run that is the same in all columns); one outcome per seed.
Outcomes = Mapping[tuple[str, str, str], Sequence[CellOutcome]]


def evaluate_report(report: Report, outcomes: Outcomes) -> Evaluated:
    """Evaluate a report, given the outcomes of its runs."""
    table = _ResultTable(report, outcomes)
    cells = tuple(
        cell
        for row in report.rows
        for column in report.columns
        for measure in report.measures
        if (cell := table.cell(row, measure, column.name)) is not None
    )
    verdicts = tuple(verdict for claim in report.claims for verdict in _verdicts(report, claim, cells))
    return Evaluated(
        report=report,
        cells=cells,
        scores=(*scores_of(report, cells), *claim_scores(report, verdicts)),
        verdicts=verdicts,
        about="".join(piece if isinstance(piece, str) else _quoted(report, piece, cells) for piece in report.about),
        results=table.results(),
    )


class _ResultTable:
    """Makes cells from outcomes."""

    def __init__(self, report: Report, outcomes: Outcomes) -> None:
        self._report, self._outcomes = report, outcomes
        self._fitted = report.calibration.cells if report.calibration else frozenset()

    def results(self) -> dict[tuple[str, str, str], tuple[RunResult, ...]]:
        """Return the results of every run in every column."""
        return {
            (row.name, run, column.name): tuple(
                each.result for each in self._of(row, run, column.name) if each.result is not None
            )
            for row in self._report.rows
            for run in row.runs
            for column in self._report.columns
        }

    def cell(self, row: Row, measure: Measure, column: str) -> TableCell | None:
        """Return a cell; None if the row lacks its runs and nothing is published."""
        published = row.published.get(measure.published_name)
        missing = any(run not in row.runs for run in measure.runs)
        if missing and (published is None or measure.published_as):
            return None
        calibrated = self._report.calibration is not None and self._report.calibration.column == column
        known: dict[str, Any] = {
            "row": row.name,
            "measure": measure.name,
            "column": column,
            "published": published,
            "fitted": calibrated and (row.name, measure.published_name) in self._fitted,
            "by_construction": row.by_construction.get(measure.name),
            "hypothesis": row.hypothesis.get(measure.name),
            "chosen": row.chosen.get(measure.name) or measure.chosen.get(column),
        }
        if calibrated and published is not None and not known["fitted"] and not known["chosen"]:
            known["chosen"] = self._fitted_part(row, measure)
        if missing:
            return TableCell(**known, problem=_NOT_RUN)
        runs = [self._of(row, run, column) for run in measure.runs]
        origins = tuple(each.origin for outcomes in runs for each in outcomes)
        found = self._plan(row, measure, column) if measure.expression is None else _number(measure, runs)
        if "value" in found:
            found["remarks"] = (*found["remarks"], *_about_seeds(row, dict(zip(measure.runs, runs, strict=True))))
        return TableCell(**known, origins=origins, **found)

    def _fitted_part(self, row: Row, measure: Measure) -> str | None:
        """Return a remark if the measure is computed from metrics of a fitted cell of the row, else None.

        Such a cell is no pure prediction.
        """
        own = {*measure.expression.metrics} if measure.expression else set()
        measures = [self._report.measure(name) for where, name in sorted(self._fitted) if where == row.name]
        parts = [each.title for each in measures if each.expression and own.issuperset(each.expression.metrics)]
        return f"a part of it is fitted: {parts[0]}" if parts else None

    def _of(self, row: Row, run: str, column: str) -> Sequence[CellOutcome]:
        return self._outcomes.get((row.name, run, SAME if row.runs[run].same else column), ())

    def _plan(self, row: Row, measure: Measure, column: str) -> dict[str, Any]:
        """Return the plan of a run and why it differs from the published one."""
        chosen = self._of(row, str(measure.plan_of), column)[0]
        if chosen.result is None:
            return {"problem": chosen.problem}
        plan, published, reason = chosen.result.plan, row.published.get(measure.name), None
        if published is not None and measure.against in row.runs and not same_plan(plan, str(published.value)):
            other = self._of(row, str(measure.against), column)[0]
            if other.result is None or same_plan(other.result.plan, str(published.value)):
                reason = reason_for_plan(chosen.result, other.result or str(other.problem))
        return {"value": plan, "reason": reason, "remarks": tuple(_remarks([chosen]))}


def _number(measure: Measure, runs: Sequence[Sequence[CellOutcome]]) -> dict[str, Any]:
    """Return the median over all combinations of the runs' seeds, and the range of those that reached their target.

    In the median a missed target counts as an infinite time. So a ratio of two runs is infinite or 0 if one of them
    missed its target. If both did, the ratio has no value and the combination doesn't count.
    """
    values: list[tuple[float, bool]] = []  # each with whether a target was missed
    problems: dict[str, None] = {}
    used: dict[int, CellOutcome] = {}
    combinations = [dict(zip(measure.runs, chosen, strict=True)) for chosen in itertools.product(*runs)]
    for chosen in combinations:
        missed = _missed(measure, chosen)
        problems.update(missed)
        try:
            values.append((_value(measure, chosen), bool(missed)))
        except NoValueError as error:
            problems.update({} if missed else {str(error): None})
        else:
            used.update((id(each), each) for each in chosen.values())
    values.sort()
    reached = [value for value, is_missed in values if not is_missed]
    remarks = [*_remarks(used.values())]
    if problems and reached:
        of = "seeds" if sum(len(outcomes) > 1 for outcomes in runs) == 1 else "combinations of seeds"
        remarks.append(f"{len(reached)} of {len(combinations)} {of}; the others: {'; '.join(problems)}")
    remarked = {"remarks": tuple(dict.fromkeys(remarks))}
    middle = values[(len(values) - 1) // 2 : len(values) // 2 + 1]  # the one or two values that make the median
    if not reached or any(is_missed for _, is_missed in middle):
        return {"problem": "; ".join(problems) or _NOT_RUN, **remarked}
    spread = {"low": reached[0], "high": reached[-1]} if len(reached) > 1 or problems else {}
    return {"value": statistics.median(value for value, _ in middle), **spread, **remarked}


def _missed(measure: Measure, chosen: Mapping[str, CellOutcome]) -> dict[str, None]:
    """Return the outcomes of the runs that missed the target to which the measure is a time; none if a run failed."""
    assert measure.expression is not None
    found = [(chosen[run].result, metric) for run, metric in measure.expression.metrics]
    known = [(result, metric) for result, metric in found if result is not None]
    if len(known) < len(found):
        return {}
    return {result.outcome: None for result, metric in known if value_of(result, metric) == math.inf}


def _value(measure: Measure, chosen: Mapping[str, CellOutcome]) -> float:
    """Return the value for one outcome of every run; raises a NoValueError with the reason if there is none."""

    def lookup(run: str, metric: str) -> Value:
        outcome = chosen[run]
        if outcome.result is None:
            raise NoValueError(str(outcome.problem))
        found = value_of(outcome.result, metric)
        if isinstance(found, str):
            raise NoValueError(found if len(chosen) == 1 else f"{run}: {found}")
        return found

    assert measure.expression is not None
    value = evaluate(measure.expression, lookup)
    assert not isinstance(value, Cells)  # validated
    return float(value)


def _remarks(outcomes: Iterable[CellOutcome]) -> Iterator[str]:
    for each in outcomes:
        if each.result is not None and MEMORY in each.result.notes:
            yield f"{each.origin.name}: {each.result.notes[MEMORY]}"


def _about_seeds(row: Row, runs: Mapping[str, Sequence[CellOutcome]]) -> Iterator[str]:
    """Yield remarks on runs with fewer seeds than defined, and on runs that an earlier release trained."""
    for name, outcomes in runs.items():
        if len(outcomes) < len(row.runs[name].seeds or ()):
            yield f"{name}: {len(outcomes)} of {len(row.runs[name].seeds or ())} seeds are trained"
        if any(each.origin.made.startswith(EARLIER) for each in outcomes):
            yield f"{name}: trained by {EARLIER}; it may not repeat"


def _quoted(report: Report, quoted: Quoted, cells: Sequence[TableCell]) -> str:
    """Return a quoted number as text, UNKNOWN if it has no value."""
    if _left_out(report, quoted.expression):
        return f"({LEFT_OUT})"
    try:
        value = evaluate(quoted.expression, _lookup_in(report, cells, quoted.column))
    except NoValueError:
        return UNKNOWN
    assert not isinstance(value, Cells)  # validated
    return number_text(value, quoted.unit)


def _verdicts(report: Report, claim: PublishedClaim, cells: Sequence[TableCell]) -> Iterator[Verdict]:
    if claim.untestable is not None:
        yield Verdict(claim, "", UNTESTABLE, claim.untestable)
        return
    expression = claim.holds if claim.number is None else claim.number.value
    assert expression is not None  # testable
    left_out = _left_out(report, expression)
    if left_out:
        yield Verdict(claim, "", LEFT_OUT, f"it is about {listed(left_out, _MOST_NAMED)}, too")
        return
    for column in report.columns:
        try:
            found = verdict(claim, column.name, _lookup_in(report, cells, column.name))
        except NoValueError as error:
            yield Verdict(claim, column.name, UNTESTABLE, str(error))
        else:
            absent = dict.fromkeys(_absent(expression, [cell for cell in cells if cell.column == column.name]))
            without = f"; without {listed([*absent], _MOST_NAMED)}" if absent else ""
            yield replace(found, reason=f"{found.reason}{without}")


def _absent(expression: Expression, cells: Sequence[TableCell]) -> Iterator[str]:
    """Yield the rows that an expression reads but whose runs gave no value, each with the reason."""
    failed = [cell for cell in cells if cell.problem not in (None, _NOT_RUN)]
    for measure, row in cells_of(expression):
        for cell in failed:
            if cell.measure == measure and fnmatchcase(cell.row, row or "*"):
                yield f"{cell.row} ({cell.problem})"


def _left_out(report: Report, expression: Expression) -> list[str]:
    """Return the rows that an expression reads but that the report leaves out."""
    cells = [({*report.measure(measure).runs}, row) for measure, row in cells_of(expression)]
    return [
        row.name
        for row in report.left_out
        if any(runs <= row.runs.keys() and fnmatchcase(row.name, asked or "*") for runs, asked in cells)
    ]


def verdict(claim: PublishedClaim, column: str, lookup: Lookup) -> Verdict:
    """Return whether a testable claim holds for the cells of `lookup`; raises a NoValueError if one is missing."""
    number = claim.number
    if number is None:
        assert claim.holds is not None
        return Verdict(claim, column, YES if evaluate(claim.holds, lookup) else NO, explain(claim.holds, lookup))
    value = evaluate(number.value, lookup)
    assert not isinstance(value, Cells)  # validated
    ratio = value / number.published
    reason = f"{number_text(value, number.unit)}, {ratio:.2f} of the published"
    return Verdict(claim, column, YES if abs(ratio - 1) <= number.within else NO, reason, value)


def _lookup_in(report: Report, cells: Sequence[TableCell], column: str) -> Lookup:
    """Return a function that looks up a measure in a column: its value in a row, or its cells in matching rows."""
    rows = [row.name for row in report.rows]
    own = [cell for cell in cells if cell.column == column]

    def lookup(measure: str, row: str) -> Value:
        mine = [cell for cell in own if cell.measure == measure and (not row or fnmatchcase(cell.row, row))]
        values = {cell.row: float(cell.value) for cell in mine if isinstance(cell.value, int | float)}
        if row in rows and row in values:
            return values[row]
        if values and row not in rows:
            return Cells(values)
        why = "; ".join(dict.fromkeys(f"{cell.row}: {cell.problem}" for cell in mine if cell.problem))
        raise NoValueError(f"{measure} has no value{f' of {row}' if row else ''}{f' ({why})' if why else ''}")

    return lookup
