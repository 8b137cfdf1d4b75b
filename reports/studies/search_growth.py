"""Print how much growth explains the gains of vPipe's Figures 13 and 14: `python -m reports.studies.search_growth`.

The output is `search_growth.md`. Nothing is simulated: a pipeline takes as long as its slowest stage, a balanced one as
the mean of its stages, and the seconds that a change adds to a stage are proportional to its number of layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipebench.extensions.search.setup import SearchSetup
from pipebench.recipe.load import load
from pipebench.train.prepare import prepare
from reports.studies.markdown import table

MODELS = {"Figure 13, Transformer": "transformer", "Figure 14, AmoebaNet": "amoebanet"}
GAINS = {"GPipe": 3.454, "PipeDream": 5.213}  # published, section 6.3: the smaller of two models'
MOST = 64.0  # largest factor on the printed numbers of layers per change

HEAD = """# What would slow a stage as vPipe's Figures 13 and 14 say

`python -m reports.studies.search_growth` makes this page.

Section 6.3 prints when layers come and go and how many: 8 of 332 of the Transformer, 46 of 2,190 of AmoebaNet, four
times each. vPipe is then said to be 3.454 times as fast as GPipe or more, and 5.213 times as fast as PipeDream. Here
the printed changes are multiplied until stages that stay as they are would be so much slower than balanced ones: *at
the worst*, between those changes that hurt most, and *on average* over the trace, whose seconds are the paper's.

Times are those of the recipes' roofline at PipeDream's minibatch, stages those that all systems begin with. A change
takes whole blocks or cells here, 20 of 645 operators and 48 of 2,201. What is deleted can't be more than a stage has:
then it counts as all of it. This is a bound: a balanced pipeline that waits for nothing, and moves for nothing. What
minibatches, swaps and recomputation change is left out, so [vpipe_figure13](rendered/vpipe_figure13/report.md) and
[vpipe_figure14](rendered/vpipe_figure14/report.md), which simulate the printed changes, are the ones to compare with
the paper.
"""


@dataclass(frozen=True)
class Trace:
    """A pipeline's stages and their changes over time."""

    stages_s: tuple[float, ...]  # of every stage's forward and backward, per minibatch, at the beginning
    # Of every printed change: when [s], the index of the stage, and the seconds per minibatch that it adds.
    changes: tuple[tuple[float, int, float], ...]
    end_s: float  # end of the trace
    layers: float  # that a printed change adds or deletes
    num_layers: int  # of the model at the beginning

    def gains(self, factor: float) -> tuple[float, float]:
        """Return balanced over unbalanced throughput, at the worst and on average, with `factor` times the changes."""
        now, since_s, worst = list(self.stages_s), 0.0, 1.0
        ours = theirs = 0.0  # minibatches over the trace
        for until_s, stage, added_s in (*self.changes, (self.end_s, 0, 0.0)):
            slowest_s, balanced_s = max(now), sum(now) / len(now)
            worst = max(worst, slowest_s / balanced_s)
            ours += (until_s - since_s) / balanced_s
            theirs += (until_s - since_s) / slowest_s
            now[stage], since_s = max(0.0, now[stage] + factor * added_s), until_s
        return worst, ours / theirs


def trace_of(model: str) -> Trace:
    """Return the trace of a model's recipe."""
    loaded = load(f"vpipe/search/{model}/pipedream")
    job = prepare(loaded.recipe, loaded.cluster, trains=False)
    search = job.extensions["search"]
    assert isinstance(search, SearchSetup)
    assert search.end_second is not None
    assert search.steps is not None
    plan, size = job.setup.plan, loaded.recipe.train.minibatch_size
    every, first = job.whole_profile.layers[size], job.setup.profile.layers[size]
    stages_s = tuple(sum(row.forward_s + row.backward_s for row in first[s.start : s.stop]) for s in plan.stages)
    changes, before, num_layers = [], search.first, 0
    for step in search.steps:
        (changed,) = step.cells ^ before
        layers = search.architectures.cells[changed].layers
        own_s = sum(every[layer].forward_s + every[layer].backward_s for layer in layers)
        stage = next(index for index, s in enumerate(plan.stages) if s.start <= layers[0] < s.stop)
        changes.append((float(step.second or 0.0), stage, own_s if changed in step.cells else -own_s))
        before, num_layers = step.cells, len(layers)
    idle = {
        layer for cell in search.architectures.all - search.first for layer in search.architectures.cells[cell].layers
    }
    return Trace(stages_s, tuple(changes), search.end_second, num_layers, len(first) - 1 - len(idle))


def needed(gain: Callable[[float], float], wanted: float) -> float | None:
    """Return the smallest factor at which an increasing `gain` is `wanted`, by bisection; None if none up to `MOST`."""
    low, high = 0.0, MOST
    if gain(high) < wanted:
        return None
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (low, middle) if gain(middle) >= wanted else (middle, high)
    return high


def rows(name: str, trace: Trace) -> list[list[str]]:
    """Return a model's rows: with the printed changes, and with those needed for each published gain."""
    worst, mean = trace.gains(1.0)
    found = [[name, "as printed", "1", f"{trace.layers:.0f} of {trace.num_layers}", f"{worst:.2f}x", f"{mean:.2f}x"]]
    for system, wanted in GAINS.items():
        for index, when in enumerate(("at the worst", "on average")):
            factor = needed(lambda each, index=index: trace.gains(each)[index], wanted)  # type: ignore[misc]
            if factor is None:
                found.append([name, f"{wanted:.2f}x as over {system}, {when}", f"none up to {MOST:.0f}", "-", "-", "-"])
                continue
            both = [f"{gain:.2f}x" for gain in trace.gains(factor)]
            grown = f"{factor * trace.layers:.0f} of {trace.num_layers}"
            found.append([name, f"{wanted:.2f}x as over {system}, {when}", f"{factor:.1f}", grown, *both])
    return found


def main(models: Sequence[str] = tuple(MODELS)) -> None:
    """Print the page."""
    print(HEAD)
    found = [row for name in models for row in rows(name, trace_of(MODELS[name]))]
    print(
        table(["figure", "changes", "times the printed", "layers each", "gain at the worst", "gain on average"], found)
    )


if __name__ == "__main__":
    main()
