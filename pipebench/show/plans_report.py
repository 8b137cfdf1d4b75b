"""The plans of a sweep side by side: a row per run, as a table."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from pipebench.formats import num_bytes, number, ratio, seconds
from pipebench.planner.plans import PlanEstimate
from pipebench.show.plan_answer import PlanFindings, bottleneck_of
from pipebench.show.profile_report import shortened
from pipebench.show.tables import new_table, print_facts, print_table

_PLAN_WIDTH = 24
_HEADINGS = (
    *("run", "plan", "mode", "workers", "depth"),
    *("samples/s", "vs first", "memory", "sent/sample", "bottleneck", "of"),
)
_BEST_HEADINGS = ("best", "as fast")


def print_plans(answers: Sequence[PlanFindings], refused: Mapping[str, str], console: Console) -> None:
    """Print a row per run with its plan, the recipe's if it names one; `refused` has runs without a plan, and why."""
    print_table(console, _table(answers))
    print_facts(console, refused.items())


def _table(answers: Sequence[PlanFindings]) -> Table:
    named = any(answer.given is not None for answer in answers)
    table = new_table(*_HEADINGS, *(_BEST_HEADINGS if named else ()))
    first = _taken(answers[0])
    for answer in answers:
        found, best = _taken(answer), answer.comparison.best
        cells = [
            answer.name,
            shortened(str(found.plan), _PLAN_WIDTH),
            found.plan.mode,
            f"{len(found.plan.devices):,}",
            f"{found.plan.depth}",
            number(_rate(answer, found)),
            ratio(_rate(answer, found) / _rate(answers[0], first)),
            num_bytes(found.memory_bytes),
            num_bytes(sum(found.num_bytes.values()) / answer.size),
            seconds(found.bottleneck_s),
            str(bottleneck_of(answer, found)),
        ]
        if named:
            cells += [shortened(str(best.plan), _PLAN_WIDTH), ratio(_rate(answer, best) / _rate(answer, found))]
        table.add_row(*cells)
    return table


def _taken(answer: PlanFindings) -> PlanEstimate:
    return answer.given or answer.comparison.best


def _rate(answer: PlanFindings, found: PlanEstimate) -> float:
    return answer.size / found.minibatch_s
