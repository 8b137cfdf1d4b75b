"""Schedules as text: one row per worker, one column per unit of time."""

from collections.abc import Sequence

from pipebench.cluster import Cluster, Level
from pipebench.schedule.instructions import Instruction
from pipebench.schedule.operations import OPERATIONS, Op
from pipebench.schedule.pipeline import Pipeline
from pipebench.schedule.programs import programs
from pipebench.schedule.routes import Routes
from pipebench.simulate.costs import Costs, Crossing, StageCosts
from pipebench.simulate.network import Network
from pipebench.simulate.simulation import Simulation, TimelineEvent

_LETTERS = {op: row.cell for op, row in OPERATIONS.items() if row.cell}


class _FreeMoves:
    """Costs of moving layers in drawings: one unit of time per repeated forward, else nothing."""

    def update_s(self, stage: int, round_index: int) -> float:
        """Return 0."""
        return 0.0

    def again_s(self, it: Instruction) -> float:
        """Return one unit of time."""
        return 1.0

    def num_bytes(self, it: Instruction) -> int:
        """Return 0."""
        return 0


def draw_cells(
    pipeline: Pipeline,
    num_minibatches: int,
    forward: Sequence[int],
    backward: Sequence[int],
    *,
    weight: Sequence[int] | None = None,
    first: int = 0,
    versions: bool = False,
    routes: Routes | None = None,
) -> list[list[str]]:
    """Return what every worker does in every unit of time: `F3`, `B3` or "" (idle); communication is free.

    Parts of a split backward are `I3` (input) and `W3` (weights). With several stages per worker the stage comes first:
    `2F3`. If layers move by `routes`, passes under later cuts are marked, `F3'`, and `A3` is a forward repeated through
    layers that have arrived, of one unit of time. Versions are appended, `F3@1`, with the updates they are predicted
    ahead by, `F3@1~2`. Units are numbered from `first`.

    Stages' times are in units; `weight` is that of a split backward's weight part, half of it by default.
    """
    weight = [b // 2 for b in backward] if weight is None else weight
    times = zip(forward, backward, weight, strict=True)
    stages = tuple(StageCosts({1: f}, {1: b}, {1: w}, {1: 0.0}, 0.0) for f, b, w in times)
    nothing: Crossing = {(edge.source, edge.target): {1: 0} for edge in pipeline.edges}
    network = Network(Cluster("free", "unit", None, (Level("cluster", pipeline.num_workers, 1.0, 0.0),)))
    cells: list[list[str]] = [[] for _ in range(pipeline.num_workers)]
    simulation = Simulation(
        pipeline, programs(pipeline, num_minibatches, routes), Costs(stages, nothing, nothing), network, lambda _: 1,
        moving=None if routes is None else _FreeMoves(),
    )  # fmt: skip
    for event in simulation:
        op, stage, number, *_, version, ahead = event.instruction
        if op in _LETTERS:
            row, start, end = cells[event.worker], round(event.start_s), round(event.end_s)
            row += [""] * (start - len(row))
            cell = f"{stage if pipeline.chunks > 1 else ''}{_LETTERS[op]}{number + first}{_mark(routes, event)}"
            cell += f"@{version}{f'~{ahead}' if ahead else ''}" if versions else ""
            row += [cell] * (end - start)
    width = max(map(len, cells))
    return [row + [""] * (width - len(row)) for row in cells]


def _mark(routes: Routes | None, event: TimelineEvent) -> str:
    """Return the mark of passes under other cuts than the first."""
    op, stage, unit, *_ = event.instruction
    if routes is None or op is Op.FORWARD_AGAIN:
        return ""
    moved = ((block.at if op is Op.FORWARD else block.first) <= unit for block in routes.moves.at_stage(stage))
    return "'" if any(moved) else ""


def draw(
    pipeline: Pipeline,
    num_minibatches: int,
    forward: Sequence[int],
    backward: Sequence[int],
    *,
    weight: Sequence[int] | None = None,
    width: int | None = None,
    versions: bool = False,
    routes: Routes | None = None,
    since: int = 0,
) -> str:
    """Return `draw_cells` as text, `.` for idle.

    Without the first `since` units of time, and with lines of at most `width` characters, cut off after whole units;
    other arguments as in `draw_cells`.
    """
    cells = draw_cells(pipeline, num_minibatches, forward, backward, weight=weight, versions=versions, routes=routes)
    rows = [row[since:] for row in cells]
    names = pipeline.worker_names
    cell_width = max(len(cell) for row in rows for cell in row)
    margin = max(map(len, names))
    # A name and each cell are followed by two blanks, the last cell by none.
    shown = None if width is None else max(1, (width - margin) // (cell_width + 2))
    return "\n".join(
        f"{name:<{margin}}  " + "  ".join(f"{cell or '.':<{cell_width}}" for cell in row[:shown]).rstrip()
        for name, row in zip(names, rows, strict=True)
    )
