"""Print what vPipe's Table 3 may count as memory and PCIe: `python -m reports.studies.vpipe_memory [MODEL]...`.

The output is `vpipe_memory.md`: a constant of memory per device, fitted on two cells, and Algorithm 2 as printed in
place of the planner's policies. The rest is read from the page of `vpipe_table3`. With models as arguments, their
simulations run and no page is printed.
"""

import bisect
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest.mock import patch

from pipebench.errors import PlanError, RecipeError
from pipebench.planner import virtualised
from pipebench.planner.stage_problem import StageOutcome, StageProblem
from pipebench.planner.swap_recompute import best_policies
from pipebench.recipe.load import load
from pipebench.report.catalog import find_report, reports_folder
from pipebench.report.load import read_report
from pipebench.report.scores import geometric_mean_error
from pipebench.report.values import VALUES, read_values
from pipebench.schedule.modes import KEEP, RECOMPUTE, SWAP
from pipebench.train.engines import simulate
from pipebench.train.memory_forecast import MemoryForecast
from pipebench.train.prepare import prepare
from reports.studies.markdown import table

REPORT, COLUMN = "vpipe_table3", "planned"
RUNS = Path(__file__).with_name("vpipe_memory_runs.json")
MODELS = {"bert": "bert", "transformer": "transformer", "amoebanet": "amoebanet", "gnmt": "gnmt16"}  # row to recipe
ALONE, WITH_VPIPE = ("gpipe", "pipedream"), ("gpipe-vpipe", "pipedream-vpipe")
FITTED_ON = ("transformer-gpipe", "transformer-pipedream")
NUM_DEVICES, DEVICE_BYTES = 8, 11e9

HEAD = """# Memory and PCIe in vPipe's Table 3

`python -m reports.studies.vpipe_memory` makes this page, from [vpipe_table3](rendered/vpipe_table3/report.md) with the
planner's cuts and from simulations that `reports/studies/vpipe_memory_runs.json` keeps. Memory and PCIe are
utilisations summed over 8 devices: 8 would be all of each. Errors are geometric means.
"""
CONSTANT = """
## A constant per device

*Hypothesis:* a device's memory has the same gigabytes of something else in every row: the context of CUDA, libraries'
workspaces, what PyTorch's allocator reserves beyond what tensors take. The tensors are those simulated. The constant is
fitted on the Transformer's two rows without vPipe ({constant:.1f} GB); every other row is a prediction.

On the six rows without vPipe that it wasn't made for an error of {alone:.0%} becomes {predicted:.0%}. AmoebaNet under
GPipe would need another constant. vPipe fills the memory that it is given, and with the constant AmoebaNet's rows with
vPipe exceed 8 devices; *less memory* below leaves room for the constant. It is more than a context and workspaces are
known to take. An allocator's reserve may take as much; the paper says neither how memory was measured nor what it
includes.
"""
POLICIES = """
## What Algorithm 2 swaps

The paper's own words: of a stage's layers, in order of bytes per second of their copies or forwards, Algorithm 2
(section 4.2) swaps as many as copies have time for, `space = P * window`, whether or not memory is short; only then it
goes on while memory is short. Plans here swap and recompute what they must, in as few seconds as that takes.
*As printed* a layer takes its bytes times the units in flight of the space; *by equation (2)* twice its bytes, for the
way out and back. Stages with up to three units in flight swap nothing in either, as that frees nothing here; *in every
stage* they do, and the last waits for each of its copies. Cuts and minibatches are the same, and Algorithm 1 moves
nothing. *Less memory* takes the constant above from every device. PCIe is both directions over the rate of one.
"""
JUDGED = """
So most of the PCIe time that simulations lack is what Algorithm 2 swaps without need: by equation (2)
it keeps PCIe busy for
{pcie} of what is published, has {throughput} of the throughput, and leaves utilisation as near as it
was. The space as printed, times the units in flight, allows too little of it. AmoebaNet doesn't fit under either, as
what is swapped first is never recomputed. Plans don't adopt it, since swapping without need costs time. Table 3's PCIe,
which this is to explain, was known before it was tried; no number was fitted on it.
"""


@dataclass(frozen=True)
class Run:
    """A simulated run."""

    row: str  # of Table 3
    way: str  # in which stages choose policies, a key of `WAYS`
    pcie: float = 0.0  # utilisation, the sum of 8 devices: both directions over the rate of one
    memory: float = 0.0  # utilisation, the sum of 8 devices, of tensors only
    effective: float = 0.0  # utilisation of arithmetic without recomputation, the sum of 8 devices
    throughput: float = 0.0  # samples per second; 0 if no policies fit in memory


def listed(problem: StageProblem, taken: int, *, everywhere: bool = False) -> StageOutcome:
    """Choose a stage's policies by vPipe's Algorithm 2 as printed.

    Differs: memory is what the stage really keeps, found by bisection, and not equation (1)'s.

    Args:
        problem: the stage.
        taken: how many times its bytes a swapped layer takes of the space that copies have during the window.
        everywhere: also swap in stages where that frees no memory.
    """
    swaps = SWAP in (problem.chooses if everywhere else problem.choices)
    layers = range(problem.num_layers)
    kept = [problem.outcome([KEEP] * layer + [SWAP] + [KEEP] * (len(layers) - layer - 1)) for layer in layers]
    num_bytes = [outcome.sums.swapped_bytes for outcome in kept]
    forward_s = [problem.rows[problem.start + layer].forward_s for layer in layers]
    copy_s = [n / problem.pcie_bytes_per_s for n in num_bytes] if problem.pcie_bytes_per_s else [math.inf] * len(layers)
    ops = [RECOMPUTE if copy > forward else SWAP for copy, forward in zip(copy_s, forward_s, strict=True)]
    cost_s = [min(pair) for pair in zip(copy_s, forward_s, strict=True)]
    order = sorted(layers, key=lambda each: num_bytes[each] / cost_s[each] if cost_s[each] else 0.0, reverse=True)
    policies, space = [KEEP] * len(layers), problem.window_s * (problem.pcie_bytes_per_s or 0.0)
    while order and space >= 0 and swaps:
        layer = order.pop(0)
        policies[layer] = SWAP
        space -= taken * num_bytes[layer]

    def outcome(count: int) -> StageOutcome:
        changed = {layer: ops[layer] for layer in order[:count]}
        return problem.outcome([changed.get(layer, policies[layer]) for layer in layers])

    return outcome(bisect.bisect_left(range(len(order)), True, key=lambda count: outcome(count).fits))


# How a stage chooses its policies, and whether devices have less memory: the fitted constant is taken away.
WAYS: Mapping[str, tuple[Callable[[StageProblem], StageOutcome], bool]] = {
    "as here": (best_policies, False),
    "as here, less memory": (best_policies, True),
    "as printed": (lambda problem: listed(problem, problem.in_flight), False),
    "as printed, in every stage": (lambda problem: listed(problem, problem.in_flight, everywhere=True), False),
    "by equation (2)": (lambda problem: listed(problem, 2), False),
    "by equation (2), less memory": (lambda problem: listed(problem, 2), True),
}


JUDGED_HEAD = (
    "policies",
    "rows that fit",
    "PCIe ÷ published",
    "error, PCIe",
    "error, memory with the constant",
    "error, effective utilisation",
    "throughput, of that as here",
)


USUAL, LISTED = "as here", "by equation (2)"


class Table:
    """Simulated and published values of Table 3, from the rendered page of `vpipe_table3`."""

    def __init__(self) -> None:
        values = read_values(reports_folder() / "rendered" / REPORT / VALUES)
        cells = [each for each in values.cells if each.column == COLUMN and not isinstance(each.value, str)]
        self._here = {(each.row, each.measure): float(each.value) for each in cells}
        self._report = read_report(find_report(REPORT))[0]

    def here(self, row: str, measure: str) -> float:
        """Return a cell's simulated value."""
        return self._here[row, measure]

    def published(self, row: str, measure: str) -> float:
        """Return a cell's published value."""
        return float(self._report.row(row).published[measure].value)


def constant_gb(of: Table) -> float:
    """Return the gigabytes per device with which the fitted rows' memory is as published, in the geometric mean."""
    low, high = 0.0, DEVICE_BYTES / 1e9
    for _ in range(50):  # bisection: the error grows with the constant
        middle = (low + high) / 2
        error = sum(math.log(with_constant(of.here(row, "memory"), middle) / of.published(row, "memory"))
                    for row in FITTED_ON)  # fmt: skip
        low, high = (low, middle) if error > 0 else (middle, high)
    return round(low, 1)


def with_constant(memory: float, gigabytes: float) -> float:
    """Return the sum of 8 devices' memory utilisation with `gigabytes` more on each device."""
    return memory + NUM_DEVICES * gigabytes * 1e9 / DEVICE_BYTES


def played(model: str, system: str, way: str, gigabytes: float) -> Run:
    """Simulate a row with vPipe, with stages that choose policies in one of `WAYS`; `gigabytes` is the constant."""
    choose, is_less = WAYS[way]
    loaded = load(f"vpipe/{MODELS[model]}/{system}", ["parallelism.cuts=null", "parallelism.vpipe.repartition=false"])
    memory_bytes = int(DEVICE_BYTES - gigabytes * 1e9 * is_less)
    try:
        with patch.object(virtualised, "best_policies", choose):
            job = prepare(loaded.recipe, replace(loaded.cluster, memory_bytes=memory_bytes), trains=False)
    except (PlanError, RecipeError):
        return Run(f"{model}-{system}", way)
    watch = MemoryForecast(job)
    result = watch.with_peaks(simulate(job)[0])
    metrics, peaks = result.metrics, [row["peak_memory_bytes"] for row in result.stages]
    return Run(
        f"{model}-{system}",
        way,
        (metrics["pcie_out_fraction"] + metrics["pcie_in_fraction"]) * NUM_DEVICES,
        sum(peaks) / DEVICE_BYTES,
        metrics["effective_fraction"] * NUM_DEVICES,
        metrics["throughput_samples_per_s"],
    )


def known() -> list[Run]:
    """Return the stored runs."""
    return [Run(**each) for each in json.loads(RUNS.read_text())] if RUNS.is_file() else []


def play_missing(gigabytes: float, models: Sequence[str]) -> None:
    """Simulate the runs that aren't stored yet, and store each."""
    for model in models:
        for system, way in ((system, way) for system in WITH_VPIPE for way in WAYS):
            runs = known()
            if not any((each.row, each.way) == (f"{model}-{system}", way) for each in runs):
                runs = sorted([*runs, played(model, system, way, gigabytes)], key=lambda each: (each.row, each.way))
                lines = ",\n ".join(json.dumps(asdict(each)) for each in runs)
                RUNS.write_text(f"[\n {lines}\n]\n")


def constants(of: Table, gigabytes: float) -> Iterator[tuple[str, ...]]:
    """Yield a row per row of Table 3: memory without and with the constant."""
    for row in (f"{model}-{system}" for system in (*ALONE, *WITH_VPIPE) for model in MODELS):
        here, published = of.here(row, "memory"), of.published(row, "memory")
        more = with_constant(here, gigabytes)
        mark = " *" if row in FITTED_ON else ""
        yield (
            row,
            f"{published}",
            f"{here:.2f}",
            f"{here / published:.2f}",
            f"{more:.2f}{mark}",
            f"{more / published:.2f}",
        )


def errors(of: Table, gigabytes: float, rows: Sequence[str]) -> tuple[float, float]:
    """Return the geometric-mean errors of memory over some rows, without and with the constant."""
    pairs = [(of.here(row, "memory"), of.published(row, "memory")) for row in rows]
    without = geometric_mean_error([here / published for here, published in pairs])
    return without, geometric_mean_error([with_constant(here, gigabytes) / published for here, published in pairs])


def judged(of: Table, runs: Sequence[Run], gigabytes: float) -> Iterator[tuple[str, ...]]:
    """Yield a row per way: errors over the rows with vPipe that fit, and throughput over the planner's policies'."""
    by_way = {way: {each.row: each for each in runs if each.way == way and each.throughput} for way in WAYS}
    usual, listed_rows = by_way[USUAL], by_way[LISTED]
    some = {f"{USUAL}, rows that fit {LISTED}": {row: usual[row] for row in listed_rows}}
    for way, found in {**by_way, **some}.items():
        mine = [*found.values()]
        memory = [with_constant(each.memory, gigabytes) / of.published(each.row, "memory") for each in mine]
        pcie, busy = ([getattr(each, name) / of.published(each.row, name) for each in mine]
                      for name in ("pcie", "effective"))  # fmt: skip
        slower = [each.throughput / usual[each.row].throughput for each in mine]
        yield (
            way,
            f"{len(mine)}",
            f"{min(pcie):.2f} to {max(pcie):.2f}",
            *(f"{geometric_mean_error(each):.0%}" for each in (pcie, memory, busy)),
            f"{min(slower):.2f} to {max(slower):.2f}",
        )


def rows_of(of: Table, runs: Sequence[Run]) -> Iterator[tuple[str, ...]]:
    """Yield a row per row of Table 3 with vPipe: PCIe utilisation, published and in every way."""
    for row in (f"{model}-{system}" for model in MODELS for system in WITH_VPIPE):
        found = {each.way: each.pcie for each in runs if each.row == row}
        yield (
            row,
            f"{of.published(row, 'pcie')}",
            *(f"{found[way]:.2f}" if found[way] else "doesn't fit" for way in WAYS),
        )


def main(models: Sequence[str] = tuple(MODELS)) -> None:
    """Simulate what is missing of some models; print the page if these are all."""
    of = Table()
    gigabytes = constant_gb(of)
    play_missing(gigabytes, models)
    if {*models} != {*MODELS}:
        return
    alone = [f"{model}-{system}" for model in MODELS for system in ALONE]
    before, after = errors(of, gigabytes, [row for row in alone if row not in FITTED_ON])
    print(HEAD + CONSTANT.format(constant=gigabytes, alone=before, predicted=after))
    print(
        table(
            ("row", "published", "tensors", "÷ published", "with the constant", "÷ published"),
            [*constants(of, gigabytes)],
        )
    )
    runs = known()
    print(POLICIES)
    ways = {row[0]: row for row in judged(of, runs, gigabytes)}
    print(table(JUDGED_HEAD, [*ways.values()]))
    print()
    print(table(("PCIe of 8", "published", *WAYS), [*rows_of(of, runs)]))
    print(JUDGED.format(pcie=ways[LISTED][2], throughput=ways[LISTED][-1]))


if __name__ == "__main__":
    main(sys.argv[1:] or tuple(MODELS))
