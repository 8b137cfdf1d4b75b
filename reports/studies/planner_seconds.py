"""Print how long the planner takes for every row of PipeDream's Table 1: `python -m reports.studies.planner_seconds`.

The output is `planner_seconds.md`. Times are CPU seconds of this process, so other programs' load isn't in them.
"""

import math
import time
from collections.abc import Iterator, Sequence

from pipebench.planner.cost_models import COST_MODELS, CostModel
from pipebench.planner.planner import Planner
from pipebench.planner.plans import Request
from reports.studies.markdown import table
from reports.studies.planned_models import TableRow, analytic, cluster, published_rows

LIMIT_S = 8.0  # PipeDream (SOSP'19), sections 3.1 and 5.5: all models and hardware take less

HEAD = f"""# How long the planner takes on Table 1 of PipeDream (SOSP'19)

`python -m reports.studies.planner_seconds` makes this page.

Sections 3.1 and 5.5 say that the optimizer takes less than {LIMIT_S:.0f} seconds for all models and hardware. Here is
what ours takes: seconds of one core from a profile to a plan, memory limits included. `artifact` and `sosp19` are the
paper's cost models, whose smallest bottleneck is the answer; under `overlap`, the default, the simulator judges what
searches propose and a local search improves it. The paper doesn't say on what machine its seconds were taken.
"""


def seconds(row: TableRow, model: CostModel) -> tuple[float, str]:
    """Return the CPU seconds that planning a row takes, and the plan."""
    subject = analytic(row.model)
    where = cluster(row.cluster, row.servers, limited=True)
    began_s = time.process_time()
    found = Planner(Request(subject.profile, where, model, subject.size), "pipedream").best()
    return time.process_time() - began_s, str(found.plan)


def lines(rows: Sequence[TableRow], models: Sequence[CostModel]) -> Iterator[str]:
    """Yield the page's table, then a sentence with the largest seconds under every cost model."""
    worst, cells = dict.fromkeys((model.name for model in models), 0.0), []
    for row in rows:
        own = [f"{row.model}, {row.workers} workers of {row.cluster}"]
        for model in models:
            spent_s, plan = seconds(row, model)
            worst[model.name] = max(worst[model.name], spent_s)
            own += [f"{spent_s:.2f} s", plan]
        cells.append(own)
    yield table(["row", *(head for model in models for head in (f"`{model.name}`", "plan"))], cells)
    most_s = max(worst.values(), default=math.nan)
    said = ", ".join(f"{worst[model.name]:.2f} s under `{model.name}`" for model in models)
    yield f"\nAt most {said}: {'less' if most_s < LIMIT_S else 'not less'} than the paper's {LIMIT_S:.0f} s."


def main() -> None:
    """Print the page."""
    print(HEAD)
    print("\n".join(lines(published_rows(), [*COST_MODELS.values()])))


if __name__ == "__main__":
    main()
