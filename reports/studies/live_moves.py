"""Print a pipeline's throughput while layers move between stages: `python -m reports.studies.live_moves`.

The output is `live_moves.md`; `live_moves.png` is drawn beside it. BERT-large runs on eight simulated devices from bad
cuts; during the run it is repartitioned to the best balanced consecutive stages.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from pipebench.engine.setup import Setup
from pipebench.extensions.moves.engine import moving
from pipebench.extensions.moves.repartition_plan import CutLayout, Repartition, Starts, layout_problems
from pipebench.extensions.moves.throughput import Finished, Finishes
from pipebench.model.plan import recut
from pipebench.recipe.clusters import load_cluster
from pipebench.recipe.load import load
from pipebench.schedule.modes import KEEP
from pipebench.schedule.operations import MIGRATION
from pipebench.simulate.meter import Meter
from pipebench.simulate.steady import SegmentTotals
from pipebench.train.prepare import prepare
from reports.studies.markdown import table
from tests.engine.moved_segment import simulate_moves

RECIPE = "recipes/vpipe/bert/pipedream.yaml"
COUNT = 280  # minibatches of the simulated segment
AT = 100  # the first minibatch whose forward runs under the new cuts
_PAGE = Path(__file__).parents[1] / "live_moves.md"

HEAD = f"""# Throughput while layers move

`python -m reports.studies.live_moves` makes this page. BERT-large of 48 blocks with 4 samples per minibatch
(`recipes/vpipe/bert/pipedream.yaml`) under PipeDream on vPipe's testbed, two servers of four 2080 Ti, simulated from
the roofline profile. Memory has no limit. From minibatch {AT} of {COUNT} on layers move to the cuts whose slowest
stage computes least, by at most one stage at a time; if that takes several steps, they follow each other as soon as
they can.

*Live*: nothing is drained. *Drained*: the pipeline is emptied, layers move, all steps one after the other, and it is
filled again. *Ideal*: the final cuts from the start. *Longest pause*: between the ends of two minibatches. *Lost*: more
seconds than ideal.

Each unit in flight between two stages is moved with the version of the block that it was computed with, as weight
stashing requires. For a large block that is more than a drained pipeline moves, and passes' messages share the links.
"""
SECTION = """
## It begins with {title}

{moved} of {layers} layers change stages, in {steps}.

"""
HEADINGS = ("course", "samples/s before", "while it moves", "after", "longest pause", "lost", "moved")
# Relative numbers of layers per stage at first, by the title of their section.
BEGINNINGS = {
    "as many layers on every device": (1, 1, 1, 1, 1, 1, 1, 1),
    "twice as many layers on each of the first four devices": (2, 2, 2, 2, 1, 1, 1, 1),
}


@dataclass(frozen=True)
class Course:
    """A simulated segment: never repartitioned, repartitioned live or after a drain, or balanced from the start."""

    name: str  # on the page
    units: Sequence[Finished]  # in order of their ends
    end_s: float  # of the segment
    moved_bytes: int  # of layers that changed stages


def balanced(setup: Setup) -> Starts:
    """Return the cuts, into as many stages as the plan has, whose slowest stage computes least.

    Bisects the seconds of the slowest stage: for a bound, stages are filled one after another up to it. Of equally good
    cuts this finds those with the longest first stages, unlike the planner's `best_consecutive`.
    """
    rows = setup.profile.by_size[setup.sampler.minibatch_size]
    seconds = [row.forward_s + row.backward_s for row in rows[: len(setup.graph.layers)]]
    seconds[-1] += rows[-1].forward_s + rows[-1].backward_s  # the loss

    def within(bound: float) -> Starts | None:
        starts, total = [], 0.0
        for index, each in enumerate(seconds):
            if total + each > bound and index > 0:
                starts.append(index)
                total = 0.0
            total += each
        return tuple(starts) if len(starts) < setup.pipeline.num_stages else None

    low, high = max(seconds), sum(seconds)
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if within(middle) else (middle, high)
    found = within(high)
    assert found is not None, "one stage holds all"
    assert len(found) == setup.pipeline.num_stages - 1, "a bound that fewer stages meet isn't the least"
    return found


def steps(before: Starts, after: Starts, num_layers: int) -> list[Starts]:
    """Return the cuts, one after another, that lead to `after` and move every layer by at most one stage at a time."""
    found, now = [], before
    while now != after:
        old = [0, *now, num_layers]
        # Each boundary goes as far as leaves its neighbours a layer of their own.
        now = tuple(min(max(to, old[i] + 1), old[i + 2] - 1) if to != old[i + 1] else to for i, to in enumerate(after))
        problems = [*layout_problems(CutLayout(tuple(old[1:-1]), (KEEP,) * num_layers), Repartition(0, now))]
        assert not problems, problems
        found.append(now)
    return found


def played(setup: Setup, moves: Sequence[Repartition], first: int, count: int) -> tuple[SegmentTotals, list[Finished]]:
    """Simulate a segment of `count` minibatches; return its totals and its finished units."""
    finishes = Finishes()
    totals = simulate_moves(setup, moves, first, count, Meter(setup.pipeline, finishes))
    return totals, finishes.units


def courses(setup: Setup, before: Starts, path: Sequence[Starts]) -> list[Course]:
    """Simulate the segment on every course; `path` are the cuts to go through, the last of which are the final ones."""

    def under(starts: Starts) -> Setup:
        return setup.under(recut(setup.graph, setup.plan, starts))

    def course(name: str, of: Setup, moves: Sequence[Repartition]) -> Course:
        totals, units = played(of, moves, 0, COUNT)
        return Course(name, units, totals.end_s, _moved(totals))

    depth = setup.pipeline.depth
    live = [Repartition(AT + 2 * depth * index, starts) for index, starts in enumerate(path)]
    made = [course("never moved", under(before), []), course("live", under(before), live)]
    drained, now, units, moved = 0.0, under(before), list[Finished](), 0
    for index, starts in enumerate(path):  # only the first segment has minibatches: all steps follow one drain
        totals, found = played(now, [Repartition(AT + 2 * depth, starts)], 0, AT if index == 0 else 0)
        units += _later(found, drained)
        drained, moved, now = drained + totals.end_s, moved + _moved(totals), under(starts)
    totals, found = played(now, [], AT, COUNT - AT)
    made.append(Course("drained", [*units, *_later(found, drained)], drained + totals.end_s, moved))
    return [*made, course("ideal", under(path[-1]), [])]


def _later(units: Sequence[Finished], by_s: float) -> list[Finished]:
    """Return units that end later by so many seconds."""
    return [unit._replace(end_s=unit.end_s + by_s) for unit in units]


def _moved(totals: SegmentTotals) -> int:
    return sum(num_bytes for (kind, _), num_bytes in totals.num_bytes.items() if kind == MIGRATION)


def rate(units: Sequence[Finished], start: int, stop: int) -> float:
    """Return the samples per second of the units [start, stop)."""
    return sum(unit.samples for unit in units[start:stop]) / (units[stop - 1].end_s - units[start - 1].end_s)


def section(title: str, made: Sequence[Course], moved: int, num_layers: int, num_moves: int, depth: int) -> str:
    """Return the page's section about one beginning."""
    ideal, around = made[-1], 2 * depth * num_moves + depth
    num_steps = "one step" if num_moves == 1 else f"{num_moves} steps"
    rows = []
    for each in made:
        units = each.units
        pause_s = max(b.end_s - a.end_s for a, b in itertools.pairwise(units[AT - 40 : AT + 80]))
        rates = (rate(units, 40, AT - 8), rate(units, AT - 8, AT + around), rate(units, COUNT - 60, COUNT - 10))
        costs = (f"{pause_s:.2f} s", f"{each.end_s - ideal.end_s:.2f} s", f"{each.moved_bytes / 1e9:.2f} GB")
        rows.append((each.name, *(f"{each_rate:.1f}" for each_rate in rates), *costs))
    text = SECTION.format(title=title, moved=moved, layers=num_layers, steps=num_steps) + table(HEADINGS, rows)
    return text + f"\n\nWhile it moves: minibatches {AT - 8} to {AT + around - 1}.\n"


def draw(made: Mapping[str, Sequence[Course]], path: Path) -> None:
    """Write the picture: samples per second of every 8 minibatches, a panel per beginning."""
    figure = Figure(figsize=(8.0, 2.6 * len(made)), layout="constrained")
    panels = figure.subplots(len(made), 1, sharex=True, squeeze=False).flat
    colours = {"never moved": "#B0B0B0", "live": "#0072B2", "drained": "#D55E00", "ideal": "#009E73"}
    for axes, (title, courses_of) in zip(panels, made.items(), strict=True):
        for each in courses_of:
            units, starts = each.units, range(1, len(each.units) - 7, 8)
            rates = [rate(units, start, start + 8) for start in starts]
            times = [(units[start - 1].end_s + units[start + 7].end_s) / 2 for start in starts]
            style = "--" if each.name == "ideal" else "-"
            axes.plot(times, rates, color=colours[each.name], label=each.name, linewidth=1.4, linestyle=style)
        axes.set_title(f"it begins with {title}", fontsize=9)
        axes.set_ylabel("samples per second", fontsize=8)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    axes.set_xlabel("simulated time [s]", fontsize=8)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=90)


def subject() -> Setup:
    """Return the setup of the recipe's run."""
    recipe = load(RECIPE).recipe
    cluster = load_cluster(recipe.cluster.name, recipe.cluster.servers or 1)
    return prepare(recipe, cluster, trains=False).setup


def begun(setup: Setup, title: str) -> tuple[Sequence[Course], str]:
    """Return the courses from one beginning, and the section about them."""
    num_layers, shares = len(setup.graph.layers), BEGINNINGS[title]
    ends = itertools.accumulate(shares[:-1])
    before, after = tuple(round(num_layers * end / sum(shares)) for end in ends), balanced(setup)
    path = steps(before, after, num_layers)
    stages = [[sum(start <= layer for start in cuts) for layer in range(num_layers)] for cuts in (before, after)]
    moved = sum(a != b for a, b in zip(*stages, strict=True))
    made = courses(setup, before, path)
    return made, section(title, made, moved, num_layers, len(path), setup.pipeline.depth)


def main() -> None:
    """Print the page, and draw its picture."""
    setup, text = moving(subject()), HEAD
    made: dict[str, Sequence[Course]] = {}
    for title in BEGINNINGS:
        made[title], section_text = begun(setup, title)
        text += section_text
    draw(made, _PAGE.with_suffix(".png"))
    print(text + "\n![samples per second over time](live_moves.png)")


if __name__ == "__main__":
    main()
