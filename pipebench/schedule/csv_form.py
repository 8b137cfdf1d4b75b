"""The CSV form of torch.distributed.pipelining: one row per worker, one cell per pass.

`2F0` is the forward of microbatch 0 at stage 2, `2B0` its backward, `2I0` and `2W0` the backward's input and weight
part. Empty cells are ignored; `(2F3;1B0)OVERLAP_F_B` is two passes, one after the other. The passes imply all
communication (torch calls this form compute-only).
"""

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

from pipebench.errors import UserError
from pipebench.files import FileError, read_text
from pipebench.schedule.instructions import BACKWARDS
from pipebench.schedule.operations import OPERATIONS, Op

_OPS = {op: OPERATIONS[op].cell for op in (Op.FORWARD, *BACKWARDS)}
_LETTERS = {letter: op for op, letter in _OPS.items()}
_CELL = re.compile(r"([0-9]{1,6})([FBIW])([0-9]{1,9})", re.ASCII)
_TOGETHER = re.compile(r"\((.*)\)OVERLAP_F_B")
_COMMUNICATION = re.compile(r"[0-9]+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)[0-9]*")


class CsvError(UserError, ValueError):
    """A file isn't a schedule in this form, or can't be executed; names row and cell."""


class ScheduleCell(NamedTuple):
    """One pass of a file."""

    number: int  # of its cell in the row, from 1
    stage: int
    op: Op
    microbatch: int

    def __str__(self) -> str:
        """Return the text form."""
        return f"{self.stage}{_OPS[self.op]}{self.microbatch}"


@dataclass(frozen=True)
class CsvSchedule:
    """A schedule read from a file; one row of passes per position in the pipeline."""

    rows: tuple[tuple[ScheduleCell, ...], ...]

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The position of every stage."""
        positions = {cell.stage: position for position, row in enumerate(self.rows) for cell in row}
        return tuple(positions[stage] for stage in sorted(positions))

    @property
    def chunks(self) -> int:
        """Stages per worker."""
        return len(self.placement) // len(self.rows)

    @cached_property
    def num_microbatches(self) -> int:
        """Microbatches between two flushes."""
        return 1 + max(cell.microbatch for row in self.rows for cell in row)

    @cached_property
    def splits(self) -> bool:
        """Whether backwards are split."""
        return any(cell.op is Op.BACKWARD_WEIGHT for row in self.rows for cell in row)


def is_csv(order: str) -> bool:
    """Return whether an order of work is a file's path rather than a name."""
    return order.endswith(".csv")


def read_csv(path: str) -> CsvSchedule:
    """Return the schedule of a file, cached by its text; raises a CsvError if it can't be read or isn't one."""
    try:
        return _read(path, read_text(path))
    except FileError as error:
        raise CsvError(str(error)) from error


def is_schedule(path: Path) -> bool:
    """Return whether a file is a schedule in this form."""
    try:
        read_csv(str(path))
    except CsvError:
        return False
    return True


def write_csv(rows: Iterable[Iterable[tuple[int, Op, int]]]) -> str:
    """Return rows of (stage, op, microbatch) as CSV text."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([str(ScheduleCell(0, *each)) for each in row] for row in rows)
    return text.getvalue()


@cache
def _read(path: str, text: str) -> CsvSchedule:
    """Parse and check a file's text."""
    try:
        rows = [row for row in csv.reader(io.StringIO(text, newline="")) if any(cell.strip() for cell in row)]
    except csv.Error as error:
        raise CsvError(f"{path}: isn't a table of cells: {error}") from error
    if not rows:
        raise CsvError(f"{path}: has no passes, allowed is a row per worker with cells such as 0F0, 0B0, 0I0, 0W0")
    schedule = CsvSchedule(tuple(tuple(_cells(path, number, row)) for number, row in enumerate(rows, 1)))
    for problem in (_places(schedule), _passes(schedule), _circle(schedule)):
        if problem is not None:
            raise CsvError(f"{path}: {problem}")
    return schedule


def _cells(path: str, row: int, given: Sequence[str]) -> Iterator[ScheduleCell]:
    """Yield the passes of a row; raises a CsvError for a cell that is none."""
    for number, text in enumerate(given, 1):
        together = _TOGETHER.fullmatch(text.strip())
        for part in (together[1] if together else text).split(";"):
            match = _CELL.fullmatch(part.strip())
            if match is not None:
                yield ScheduleCell(number, int(match[1]), _LETTERS[match[2]], int(match[3]))
            elif part.strip():
                why = "not a pass"
                if _COMMUNICATION.fullmatch(part.strip()):
                    why = "communication, which follows from the passes: write the file in torch's form compute_only"
                problem = f"got {part.strip()[:40]!r}, {why}; allowed is a stage, F, B, I or W, and a microbatch: 2F0"
                raise CsvError(f"{path}: row {row}, cell {number}: {problem}")


def _places(schedule: CsvSchedule) -> str | None:
    """Return what is wrong with the placement of stages, or None."""
    row_of: dict[int, int] = {}
    for row, cells in enumerate(schedule.rows, 1):
        for cell in cells:
            if row_of.setdefault(cell.stage, row) != row:
                return f"row {row}, cell {cell.number}: got {cell}, stage {cell.stage} is in row {row_of[cell.stage]}"
    missing = next((stage for stage in range(len(row_of)) if stage not in row_of), None)
    if missing is not None:
        return f"has {len(row_of)} stages and none is {missing}, allowed are stages from 0 on without gaps"
    counts = [len({cell.stage for cell in cells}) for cells in schedule.rows]
    if len({*counts}) > 1:
        return f"rows have {', '.join(map(str, counts))} stages, allowed are equally many in every row"
    return None


def _passes(schedule: CsvSchedule) -> str | None:
    """Return which microbatch doesn't run once forward and once backward at which stage, or None."""
    for row, cells in enumerate(schedule.rows, 1):
        found: dict[tuple[int, int], dict[Op, int]] = {}
        for cell in cells:
            ops = found.setdefault((cell.stage, cell.microbatch), {})
            if cell.op in ops:
                return f"row {row}, cell {cell.number}: got {cell} again, it stands in cell {ops[cell.op]}"
            ops[cell.op] = cell.number
        for stage in sorted({cell.stage for cell in cells}):
            for microbatch in range(schedule.num_microbatches):
                ops = found.get((stage, microbatch), {})
                if {*ops} not in ({Op.FORWARD, Op.BACKWARD}, {Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT}):
                    given = ", ".join(f"{stage}{_OPS[op]}{microbatch}" for op in ops) or "nothing"
                    where = f"of microbatch {microbatch} at stage {stage}"
                    return f"row {row}: got {given} {where}, allowed is F once, and B once or I and W once each"
    return None


def _circle(schedule: CsvSchedule) -> str | None:
    """Return which passes wait for later ones, in their row or through others, or None.

    All rows are executed side by side; passes that are left over wait in a circle.
    """
    done: set[tuple[int, Op, int]] = set()
    next_cell = [0] * len(schedule.rows)  # index, per row
    last = len(schedule.placement) - 1

    def is_ready(cell: ScheduleCell) -> bool:
        stage, unit = cell.stage, cell.microbatch
        if cell.op is Op.FORWARD:
            return stage == 0 or (stage - 1, Op.FORWARD, unit) in done
        if cell.op is Op.BACKWARD_WEIGHT:
            return (stage, Op.BACKWARD_INPUT, unit) in done
        came_back = any((stage + 1, op, unit) in done for op in (Op.BACKWARD, Op.BACKWARD_INPUT))
        return (stage, Op.FORWARD, unit) in done and (stage == last or came_back)

    moved = True
    while moved:
        moved = False
        for row, cells in enumerate(schedule.rows):
            while next_cell[row] < len(cells) and is_ready(cells[next_cell[row]]):
                done.add(cells[next_cell[row]][1:])
                next_cell[row] += 1
                moved = True
    stuck = [(row, cells[next_cell[row]]) for row, cells in enumerate(schedule.rows) if next_cell[row] < len(cells)]
    if not stuck:
        return None
    waiting = "; ".join(f"row {row + 1} waits in cell {cell.number}, {cell}" for row, cell in stuck)
    return f"can't be carried out, since passes wait for others that stand behind them: {waiting}"
