"""The campaign's page: how often every fault was injected, whether runs recovered, and the time that it cost."""

import platform
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from pipebench import __version__
from pipebench.schedule.modes import MODES
from reports.studies.campaign.cases import DISTRIBUTED, EVALUATED, EVERY, LAST, VIRTUAL
from reports.studies.campaign.drawing import ENDINGS, KILLS, KINDS
from reports.studies.campaign.points import POINTS
from reports.studies.campaign.spoilt import PASSED_OVER, REFUSED
from reports.studies.campaign.trial import Done, Outcome
from reports.studies.markdown import table

WHOLE: Mapping[str, Any] = {"seed": 0, "kills": 280, "only": ""}  # the arguments, if none are given
# The arguments of the campaigns whose pages are under `reports/`, with a picture beside each, by name of the page.
PAGES = {"campaign": WHOLE, "campaign_newer_modes": {"seed": 39, "kills": 72, "only": "zero1,zero2,fsdp,zbv,dualpipe"}}
HEAD = f"""A small network with running statistics and dropout is trained for {LAST} minibatches in each
[mode](#modes), in one process on the virtual clock and in up to four processes, with a checkpoint every {EVERY}
minibatches and an evaluation every {EVALUATED}. Every run has faults injected, most runs several, at named
[points](#where-the-kills-came) of its course that a seed draws: a process that reaches its point waits until it, or
whatever else was drawn, has been killed. Launchers and single processes that were killed, and runs that were stopped,
are resumed by `pipebench run --resume`.

A run has recovered if

- it ends with exit code 0;
- its last checkpoint equals an undisturbed run's bit for bit: weights, optimizer, running statistics, counters and
  losses. That run is one of the virtual engine, in a mode without a flush one that also drains where this one was
  stopped; where three replicas sum in a ring, it is one in processes;
- MLflow has one run, FINISHED, with every point and every single metric once;
- no process, temporary folder or half-written file is left.
"""
READING = """*Down* is the time from the fault until training continues, including the restart of Python and torch;
*repeated* is the number of minibatches that were trained a second time. Both are `-` where training was over, or never
stopped.
"""
_SPOILT = """A run's files are damaged in a copy, which is then resumed. The run has to refuse in one sentence, or to
pass over the checkpoint and end with the undisturbed run's bits. *Signed*: the checksums were recomputed to match the
change. Rows in capitals are the tables of that name in `tests/checkpoint/test_spoilt.py`.
"""


@dataclass(frozen=True)
class Findings:
    """The results of a campaign so far."""

    asked: Mapping[str, Any]  # the seed and the other arguments that decide what is drawn
    outcomes: Sequence[Outcome]  # of disturbed runs
    spoilt: Mapping[str, Mapping[str, Any]]  # `rows` and `problems` of parts that damaged checkpoints, by name
    seconds: float  # the sum of all parts' wall times
    left: int = 0  # number of parts that aren't done
    not_tried: tuple[str, ...] = ()  # why some parts can't be done on this machine

    @property
    def problems(self) -> list[str]:
        """All problems of runs and of damaged checkpoints."""
        of_runs = [f"{each.name} ({each.case}): {problem}" for each in self.outcomes for problem in each.problems]
        return [*of_runs, *(problem for part in self.spoilt.values() for problem in part["problems"])]

    @property
    def num_kills(self) -> int:
        """The number of kills that were done."""
        return sum(done.kind in KILLS for each in self.outcomes for done in each.done)

    @property
    def fine(self) -> bool:
        """Whether all parts are done and none has a problem."""
        return not self.problems and not self.left and bool(self.outcomes or self.spoilt)

    @property
    def verdict(self) -> str:
        """The results in one sentence."""
        lost = sum(bool(each.problems) for each in self.outcomes)
        rows = [row for part in self.spoilt.values() for row in part["rows"]]
        taken = sum(row["answer"] not in (REFUSED, PASSED_OVER) for row in rows)
        undone = sum(each.undone for each in self.outcomes)
        return (
            f"{self.num_kills} kills and {_num_others(self.outcomes)} other faults in {len(self.outcomes)} runs, "
            f"{f'{lost} runs lost something' if lost else 'all recovered'}; {undone} came too late; {len(rows)} "
            f"damaged checkpoints, {f'{taken} not handled' if taken else 'all handled'}"
            f"{f'; parts left to do: {self.left}' if self.left else ''}."
        )


def page(found: Findings) -> str:
    """Return the page."""
    asked, name = found.asked, page_name(found.asked)
    modes = f" of {asked['only'].replace(',', ', ')}" if asked["only"] else ""
    title = f"# The campaign{modes}: injected faults and damaged checkpoints, and what was lost"
    words = " ".join(f"--{key} {value}" for key, value in asked.items() if value != WHOLE[key])
    head = f"`nox -s campaign{f' -- {words}' if words else ''}` makes this page.\n\n{HEAD}"
    made = (
        f"Seed {asked['seed']}; {found.seconds / 60:.0f} minutes, if all runs' are added; {date.today()}, "
        f"pipebench {__version__}, torch {torch.__version__}, {platform.system()} {platform.machine()}."
    )
    parts = [title, head, found.verdict, made, *(f"Not tried: {why}." for why in found.not_tried)]
    parts += ["## Faults", READING, _by_kind(found.outcomes)]
    if name:
        parts += [f"![seconds until training continues]({name}.png)"]
    parts += ["## Modes", _by_mode(found.outcomes)]
    parts += ["## Where the kills came", _by_point(found.outcomes)]
    if found.spoilt:
        parts += ["## Damaged checkpoints", _SPOILT, _by_way(found.spoilt)]
    problems = found.problems
    parts += ["## Problems", *(["None."] if not problems else ["\n".join(f"- {each}" for each in problems)])]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def page_name(asked: Mapping[str, Any]) -> str | None:
    """Return the name of the page that stores the results of these arguments; None if none does."""
    return next((name for name, arguments in PAGES.items() if arguments == asked), None)


def draw_picture(found: Findings, path: Path) -> None:
    """Draw the seconds until training continued, a dot per disturbance, and write the picture."""
    from matplotlib.figure import Figure

    kinds = [kind for kind in KINDS if any(done.down_s is not None for done in _of_kind(found.outcomes, kind))]
    figure = Figure(figsize=(8, 0.4 * len(kinds) + 1.2), layout="constrained")
    axes = figure.subplots()
    for engine, marker in ((VIRTUAL, "o"), (DISTRIBUTED, "x")):
        dots = [
            (done.down_s, row)
            for row, kind in enumerate(kinds)
            for done in _of_kind([each for each in found.outcomes if each.engine == engine], kind)
            if done.down_s is not None
        ]
        axes.plot([x for x, _ in dots], [y for _, y in dots], marker, alpha=0.6, linestyle="", label=engine)
    axes.set_yticks(range(len(kinds)), kinds)
    axes.invert_yaxis()
    axes.set_xlabel("seconds until training continues")
    axes.set_xlim(left=0)
    axes.legend()
    figure.savefig(path, dpi=100)


def _by_kind(outcomes: Sequence[Outcome]) -> str:
    rows = []
    for kind in KINDS:
        done = [*_of_kind(outcomes, kind)]
        runs = [each for each in outcomes if any(what.kind == kind for what in each.done)]
        if runs:
            recovered = sum(not each.problems for each in runs)
            down, again = (
                [d.down_s for d in done if d.down_s is not None],
                [d.again for d in done if d.again is not None],
            )
            ends = [seconds for each in outcomes for stop, seconds in each.signal_s if stop == kind]
            rows.append([kind, len(done), f"{recovered} of {len(runs)}", _spread(down), _spread(again), _spread(ends)])
    spread = "median (maximum)"
    head = (
        "fault",
        "times",
        "runs recovered",
        f"down, s: {spread}",
        f"repeated: {spread}",
        f"s until the command ended: {spread}",
    )
    return table(head, rows)


def _by_mode(outcomes: Sequence[Outcome]) -> str:
    rows = []
    for mode in MODES:
        row: list[object] = [mode]
        for engine in (VIRTUAL, DISTRIBUTED):
            own = [each for each in outcomes if (each.mode, each.engine) == (mode, engine)]
            kills = sum(done.kind in KILLS for each in own for done in each.done)
            row += [len(own), kills, _num_others(own), sum(bool(each.problems) for each in own)]
        if any(row[1:]):
            rows.append(row)
    names = ("runs", "kills", "others", "lost")
    return table(("mode", *(f"{name}, {engine}" for engine in (VIRTUAL, DISTRIBUTED) for name in names)), rows)


def _by_point(outcomes: Sequence[Outcome]) -> str:
    counts = Counter((done.point, each.engine) for each in outcomes for done in each.done if done.kind in KILLS)
    rows = [[name, what, counts[name, VIRTUAL], counts[name, DISTRIBUTED]] for name, what in POINTS.items()]
    rows = [row for row in rows if any(row[2:])]
    return table(("point", "what happens there", VIRTUAL, DISTRIBUTED), rows)


def _by_way(spoilt: Mapping[str, Mapping[str, Any]]) -> str:
    counts: dict[str, Counter[str]] = {}
    for part in spoilt.values():
        for row in part["rows"]:
            way = row["way"].partition(": ")[0]  # of the tests' tables, the table
            answer = row["answer"] if row["answer"] in (REFUSED, PASSED_OVER) else "not handled"
            counts.setdefault(way, Counter())[answer] += 1
    answers = (REFUSED, PASSED_OVER, "not handled")
    rows = [[way, sum(found.values()), *(found[answer] for answer in answers)] for way, found in counts.items()]
    return table(("damage", "times", *answers), rows)


def _of_kind(outcomes: Iterable[Outcome], kind: str) -> Iterator[Done]:
    return (done for each in outcomes for done in each.done if done.kind == kind)


def _num_others(outcomes: Iterable[Outcome]) -> int:
    return sum(done.kind not in (*KILLS, *ENDINGS) for each in outcomes for done in each.done)


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    return f"{statistics.median(values):.3g} ({max(values):.3g})"
