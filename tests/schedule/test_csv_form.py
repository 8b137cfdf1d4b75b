"""Schedules in files: torch's are read, timed, trained and written; faults of a file are one sentence."""

import csv
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pipebench.errors import UserError
from pipebench.schedule.csv_form import CsvError, read_csv
from pipebench.schedule.orders import as_csv, order_of
from pipebench.schedule.pipeline import SPLIT, WHOLE, Pipeline, chain
from pipebench.schedule.programs import programs
from pipebench.simulate.drawing import draw_cells
from tests.engine.test_modes import sequentially
from tests.models import SkipNet
from tests.schedule.torch_schedules import V_SHAPED, dump, make
from tests.support import Blobs, Mlp, make_engine, make_setup, momentum, parameters_of

SCHEDULES = [
    ("ScheduleLoopedBFS", 2, 3, 4), ("ScheduleInterleaved1F1B", 2, 2, 4), ("ScheduleInterleaved1F1B", 3, 2, 6),
    ("ScheduleInterleavedZeroBubble", 2, 2, 4), ("ScheduleInterleavedZeroBubble", 3, 2, 6),
    ("ScheduleZBVZeroBubble", 2, 2, 4), ("ScheduleZBVZeroBubble", 3, 2, 6), ("ScheduleDualPipeV", 2, 2, 6),
    ("ScheduleDualPipeV", 3, 2, 8),
]  # fmt: skip
Dump = Callable[[str, int, int, int], Path]


@pytest.fixture
def dumped(tmp_path: Path) -> Dump:
    return lambda name, *shape: dump(make(name, *shape), tmp_path / f"{name}.csv")


def rows_of(path: Path) -> list[list[tuple[int, str, int]]]:
    """Read a file once more, without the package: (stage, letter, microbatch), row by row."""
    with path.open(newline="") as file:
        found = [re.findall(r"(\d+)([FBIW])(\d+)", " ".join(row)) for row in csv.reader(file)]
    return [[(int(stage), letter, int(number)) for stage, letter, number in row] for row in found]


def ends(rows: list[list[tuple[int, str, int]]], seconds: dict[str, int]) -> dict[tuple[int, str, int], int]:
    """Return when every pass of rows ends: after the one before it in its row, and after what it needs."""
    last = max(stage for row in rows for stage, *_ in row)
    before = {cell: row[place - 1] for row in rows for place, cell in enumerate(row) if place}
    known: dict[tuple[int, str, int], int] = {}

    def end(cell: tuple[int, str, int]) -> int:
        if cell not in known:
            stage, letter, unit = cell
            needed = [before[cell]] if cell in before else []
            if letter == "F" and stage:
                needed.append((stage - 1, "F", unit))
            if letter in "BI" and stage < last:
                needed += [c for c in ((stage + 1, "B", unit), (stage + 1, "I", unit)) if any(c in row for row in rows)]
            known[cell] = max(map(end, needed), default=0) + seconds[letter]
        return known[cell]

    for row in rows:
        for cell in row:
            end(cell)
    return known


@pytest.mark.parametrize("shape", SCHEDULES, ids=str)
def test_torch_s_schedules_take_the_time_of_their_cells(shape: tuple[str, int, int, int], dumped: Dump) -> None:
    path, (_, ranks, chunks, microbatches) = dumped(*shape), shape
    schedule, n = read_csv(str(path)), ranks * chunks
    assert (len(schedule.rows), schedule.chunks, schedule.num_microbatches) == (ranks, chunks, microbatches)
    in_turn = tuple(stage % ranks for stage in range(n))
    assert schedule.placement == ((*range(ranks), *reversed(range(ranks))) if shape[0] in V_SHAPED else in_turn)
    assert schedule.splits == ("Zero" in shape[0] or "Dual" in shape[0])
    pipeline = Pipeline(
        (1,) * n, chain(n), str(path), True, ranks, microbatches, chunks=chunks,
        backward=SPLIT if schedule.splits else WHOLE,
    )  # fmt: skip
    drawn = draw_cells(pipeline, 1, [2] * n, [5] * n, weight=[2] * n)
    # A backward that the file leaves whole is two parts in turn here, and its gradient leaves after the first.
    rows = [
        [part for stage, letter, unit in row for part in ([(stage, "I", unit), (stage, "W", unit)]
         if letter == "B" and schedule.splits else [(stage, letter, unit)])]
        for row in rows_of(path)
    ]  # fmt: skip
    found = ends(rows, {"F": 2, "B": 5, "I": 3, "W": 2})
    for row, cells in zip(rows, drawn, strict=True):
        last = {cell: place + 1 for place, cell in enumerate(cells) if cell}
        assert last == {f"{s}{letter}{u}": found[s, letter, u] for s, letter, u in row}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model", [SkipNet, Mlp])
@pytest.mark.parametrize("shape", SCHEDULES, ids=str)
def test_torch_s_schedules_train_like_one_worker(
    shape: tuple[str, int, int, int], model: type[SkipNet] | type[Mlp], dumped: Dump
) -> None:
    """Values that skip stages and meet the same worker again in a V; whole minibatches, a short last group."""
    path, (_, ranks, chunks, microbatches) = dumped(*shape), shape
    dataset, made = Blobs(num_train=46), model()
    setup = make_setup(
        made, ([*range(1, ranks * chunks)], [1] * ranks * chunks), weights="one", order=str(path), chunks=chunks,
        accumulate=microbatches, backward=SPLIT if read_csv(str(path)).splits else WHOLE, dataset=dataset,
        make_optimizer=momentum,
    )  # fmt: skip
    engine = make_engine(setup)
    engine.train(0, 11)
    assert engine.num_bytes == engine.network.num_bytes
    groups = [range(k, min(k + microbatches, 11)) for k in range(0, 11, microbatches)]
    expected = sequentially(made, dataset, groups, 4, momentum)
    for name, parameter in parameters_of(engine).items():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-11, atol=1e-12)


ANY_ORDER = """\
0F2,0F0,0F1,0F3,0I0,0I2,0W2,0I1,0W0,0I3,0W3,0W1
1F2,1I2,1F0,1I0,1W0,1F3,1I3,1W2,1W3,1F1,1I1,1W1
"""


@pytest.mark.parametrize("loader_processes", [0, 1])
def test_microbatches_in_any_order_train_like_one_worker(loader_processes: int, tmp_path: Path) -> None:
    """Stages run them in orders of their own; the last minibatch has one sample, for four microbatches."""
    path, dataset, model = tmp_path / "any.csv", Blobs(num_train=25), Mlp()
    path.write_text(ANY_ORDER)
    dataset.loader_processes = loader_processes
    setup = make_setup(
        model, ([3], [1, 1]), weights="one", order=str(path), microbatches=4, backward=SPLIT, dataset=dataset,
        make_optimizer=momentum,
    )  # fmt: skip
    engine = make_engine(setup)
    engine.train(0, 7)
    expected = sequentially(model, dataset, [range(k, k + 1) for k in range(7)], 4, momentum)
    for name, parameter in parameters_of(engine).items():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-11, atol=1e-12)
    engine.loaders.close()


def test_rows_of_replicas_and_microbatches(dumped: Dump) -> None:
    """Two workers for each row: each runs its own units in the row's order."""
    path, dataset, model = dumped("ScheduleInterleaved1F1B", 2, 2, 4), Blobs(num_train=46), Mlp()
    setup = make_setup(
        model, ([2, 4, 6], [2] * 4), weights="one", order=str(path), chunks=2, microbatches=4, dataset=dataset,
        make_optimizer=momentum,
    )  # fmt: skip
    engine = make_engine(setup)
    engine.train(0, 7)
    expected = sequentially(model, dataset, [range(k, min(k + 2, 7)) for k in range(0, 7, 2)], 4, momentum)
    for name, parameter in parameters_of(engine).items():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-11, atol=1e-12)
    engine.evaluate()


@pytest.mark.parametrize(
    ("order", "n", "chunks", "backward"),
    [("1f1b", 3, 1, WHOLE), ("1f1b", 3, 1, SPLIT), ("all-forwards", 4, 2, WHOLE), ("interleaved", 4, 2, WHOLE),
     ("interleaved", 6, 3, SPLIT), ("zero-bubble", 4, 1, SPLIT)],
)  # fmt: skip
@pytest.mark.parametrize("replicas", [1, 2])
def test_our_schedules_are_written_read_back_and_accepted_by_torch(
    order: str, n: int, chunks: int, backward: str, replicas: int, tmp_path: Path
) -> None:
    rows = n // chunks
    ours = Pipeline((replicas,) * n, chain(n), order, True, rows, 6, chunks=chunks, backward=backward)
    path = tmp_path / "ours.csv"
    path.write_text(as_csv(ours))
    read = Pipeline((replicas,) * n, chain(n), str(path), True, rows, 6, chunks=chunks, backward=backward)
    count = 2 * replicas
    assert [list(program) for program in programs(read, count)] == [list(program) for program in programs(ours, count)]
    assert as_csv(read) == path.read_text()
    if chunks > 1:
        theirs = make("ScheduleInterleaved1F1B", rows, chunks, 6)
        theirs._load_csv(str(path))
        assert dump(theirs, tmp_path / "theirs.csv").read_text().split() == path.read_text().split()


def test_schedules_that_the_form_can_t_express_are_refused() -> None:
    with pytest.raises(UserError, match="holds what is between two flushes, and this schedule has none"):
        as_csv(Pipeline((1, 1), chain(2), "1f1b", False, 2))
    with pytest.raises(UserError, match="replicated alike, and this plan is 2-1"):
        as_csv(Pipeline((2, 1), chain(2), "1f1b", True, 2))


FAULTS = {
    "": "has no passes, allowed is a row per worker with cells such as 0F0",
    ",,\n": "has no passes",
    "0F0,0B0\n1F0,1X0": "row 2, cell 2: got '1X0', not a pass; allowed is a stage, F, B, I or W, and a microbatch: 2F0",
    "0F0,0SEND_F0": "row 1, cell 2: got '0SEND_F0', communication, which follows from the passes: write the file in",
    "0F0,(0B0;zz)OVERLAP_F_B": "row 1, cell 2: got 'zz', not a pass",
    "0F0,0B0\n0F1,0B1": "row 2, cell 1: got 0F1, stage 0 is in row 1",
    "0F0,0B0\n2F0,2B0": "has 2 stages and none is 1, allowed are stages from 0 on without gaps",
    "0F0,0B0,1F0,1B0\n2F0,2B0": "rows have 2, 1 stages, allowed are equally many in every row",
    "0F0,0B0,,0F0": "row 1, cell 4: got 0F0 again, it stands in cell 1",
    "0F0,0F1,0B0": "row 1: got 0F1 of microbatch 1 at stage 0, allowed is F once, and B once or I and W once each",
    "0F0,0I0": "row 1: got 0F0, 0I0 of microbatch 0 at stage 0, allowed is F once",
    "0F0,0B0,0W0": "row 1: got 0F0, 0B0, 0W0 of microbatch 0",
    "0F1,0B1": "row 1: got nothing of microbatch 0 at stage 0",
    "0F0,0W0,0I0": "can't be carried out, .*: row 1 waits in cell 2, 0W0$",
    "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1": "row 1 waits in cell 2, 0B0; row 2 waits in cell 2, 1F1$",
}


@pytest.mark.parametrize("text", FAULTS)
def test_a_fault_is_one_sentence_that_says_where(text: str, tmp_path: Path) -> None:
    path = tmp_path / "s.csv"
    path.write_text(text)
    with pytest.raises(CsvError) as raised:
        order_of(str(path))
    assert str(raised.value).startswith(f"{path}: ")
    assert re.search(FAULTS[text], str(raised.value))


def test_a_file_that_has_changed_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "s.csv"
    path.write_text("0F0,0B0\n")
    assert read_csv(str(path)).num_microbatches == 1
    path.write_text("0F0,0B0,0F1,0B1\n")
    assert read_csv(str(path)).num_microbatches == 2
