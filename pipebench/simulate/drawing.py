"""Schedules as text: one row per worker, one column per unit of time."""

from collections.abc import Mapping, Sequence
from typing import Any

from pipebench.cluster import Cluster, Level
from pipebench.schedule.operations import OPERATIONS
from pipebench.schedule.pipeline import Pipeline
from pipebench.schedule.programs import NOTHING, programs
from pipebench.simulate.costs import Costs, Crossing, StageCosts
from pipebench.simulate.network import Network
from pipebench.simulate.simulation import RunPart, Simulation

_BACKWARDS = {"B", "I"}  # letters of a backward, and of its first part where it is split
_LETTERS = {op: row.cell for op, row in OPERATIONS.items() if row.cell}


def draw_cells(
    pipeline: Pipeline,
    num_minibatches: int,
    forward: Sequence[int],
    backward: Sequence[int],
    *,
    weight: Sequence[int] | None = None,
    versions: bool = False,
    by_extension: Mapping[str, Any] = NOTHING,
) -> list[list[str]]:
    """Return the cells of a drawing, [worker][time]: `F3`, `B3` or "" (idle); communication takes no time.

    Parts of a split backward are `I3` (input) and `W3` (weights). With several stages per worker the stage comes first:
    `2F3`. `versions` appends the weight version, `F3@1`, and by how many updates it is predicted, `F3@1~2`.
    Times are by stage, in units of time. `weight` is that of a split backward's weight part, by default half of it.
    `by_extension` has extensions' parts in the segment, which mark cells.
    """
    weight = [b // 2 for b in backward] if weight is None else weight
    times = zip(forward, backward, weight, strict=True)
    stages = tuple(StageCosts({1: f}, {1: b}, {1: w}, {1: 0.0}, 0.0) for f, b, w in times)
    nothing: Crossing = {(edge.source, edge.target): {1: 0} for edge in pipeline.edges}
    network = Network(Cluster("free", "unit", None, (Level("cluster", pipeline.num_workers, 1.0, 0.0),)))
    cells: list[list[str]] = [[] for _ in range(pipeline.num_workers)]
    simulation = Simulation(
        pipeline, programs(pipeline, num_minibatches, by_extension), Costs(stages, nothing, nothing), network,
        lambda _: 1, part=RunPart(0, lambda: num_minibatches, by_extension),
    )  # fmt: skip
    for event in simulation:
        op, stage, number, *_, version, ahead = event.instruction
        if op in _LETTERS:
            row, start, end = cells[event.worker], round(event.start_s), round(event.end_s)
            row += [""] * (start - len(row))
            cell = f"{stage if pipeline.chunks > 1 else ''}{_LETTERS[op]}{number}"
            cell += "".join(part.mark(event) for part in by_extension.values())
            if versions:
                cell += f"@{version}~{ahead}" if ahead else f"@{version}"
            row += [cell] * (end - start)
    width = max(map(len, cells))
    return [row + [""] * (width - len(row)) for row in cells]


def blocks(pipeline: Pipeline, rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """Return cells as text, in blocks of columns, until every worker's first backward is shown.

    Lines have at most `width` characters. Without a width there is one block with all columns.
    """
    names = pipeline.worker_names
    cell_width = max(len(cell) for row in rows for cell in row)
    margin = max(map(len, names))
    # Two blanks follow the name and every cell but the last.
    shown = max(1, (width - margin) // (cell_width + 2)) if width is not None else max(map(len, rows))
    backwards = (next((i for i, cell in enumerate(row) if {*cell} & _BACKWARDS), 0) for row in rows)
    return [
        "\n".join(
            f"{name:<{margin}}  " + "  ".join(f"{cell or '.':<{cell_width}}" for cell in row[at : at + shown]).rstrip()
            for name, row in zip(names, rows, strict=True)
        )
        for at in range(0, max(backwards) + 1, shown)
    ]
