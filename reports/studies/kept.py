"""Repeats the trainings whose results reports use, and trains missing ones: `nox -s kept`, or this module as a program.

Trained results are stored in `reports/kept/`, so that a fresh clone renders without training. Processors and releases
of torch differ in rounding, which stale gradients can amplify to whole epochs. So a result records what trained it, and
has to repeat exactly only where all of that is the same.

    python -m reports.studies.kept                      # repeats stored results, quickest first, and compares
    python -m reports.studies.kept --runs 2             # the two quickest
    python -m reports.studies.kept train asp figure13   # trains what these reports lack; all reports if none is named
    python -m reports.studies.kept clocks               # replaces times by today's simulator's, without training

An interrupted `train` resumes. A result that names no tree is from an earlier release and counts as missing. Once a run
has a result that names its tree, results of the same run without a tree are removed, so that the two are never mixed.
"""

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from pipebench import files
from pipebench.recipe.catalog import find, recipe_names
from pipebench.recipe.engines import engine_kind
from pipebench.recipe.load import load_file
from pipebench.report.catalog import find_report, report_names, reports_folder
from pipebench.report.collect import Collection
from pipebench.report.kept import KeptResult, keep, kept_results
from pipebench.report.load import load_report
from pipebench.report.recipes import ReportRun
from pipebench.run.identity import made_on
from pipebench.tracking.run_log import Tracking
from pipebench.train.result import RunResult
from pipebench.typed_json import write
from reports.studies import clocks

WALL = "wall_time_s"
TOTAL = "total_time_s"
ROUNDS = ("processor", "torch", "numpy", "threads")  # facts that results record and on which rounding depends
MEASURED = (WALL, "start_time_s")  # metrics of the host's clock, which never repeat
SEED = "train.seed="
_UNTIMED_S = 60.0  # assumed wall time of results that lack it


def without_seed(words: Sequence[str]) -> tuple[str, ...]:
    """Return a command's words without the seed: the same for all seeds of a run."""
    return tuple(word for word in words if not word.startswith(SEED))


def trained(name: str) -> list[ReportRun]:
    """Return the runs of a report that train, row by row, each once."""
    _, asked = load_report(find_report(name))
    return [*{each.words: each for each in asked if engine_kind(each.loaded.recipe).trains}.values()]


def fresh(each: ReportRun) -> KeptResult:
    """Train a run now and return its result.

    Raises:
        RuntimeError: the run ends without a result.
        KeyboardInterrupt: it was interrupted.
    """
    tracking = Tracking("kept")
    parent = tracking.start("kept", params={}, tags={"kind": "report"}, virtual=False)
    collection = Collection([each])
    done = collection.run_missing(tracking, parent, lambda _: None)
    parent.finish(None, status="FINISHED" if done else "KILLED")
    if not done:
        raise KeyboardInterrupt
    for _, made in collection.trained():
        return made
    raise RuntimeError(f"{' '.join(each.words)}: {next(iter(collection.by_recipe.values())).problem}")


def difference(before: RunResult, now: RunResult) -> str:
    """Return how two results of one recipe differ; "" if all but times by the host's clock are equal to the bit.

    Metrics that only one of them has aren't compared, since releases add some.
    """
    if before.outcome != now.outcome:
        return f"{before.sentence}, now {now.sentence}"
    common = {name for name in before.metrics if name in now.metrics and name not in MEASURED}
    found = [
        f"{name} {before.metrics[name]:.6g}, now {now.metrics[name]:.6g}"
        for name in sorted(common)
        if before.metrics[name] != now.metrics[name]
    ]
    if not found and [point.metrics for point in before.points] != [point.metrics for point in now.points]:
        found = ["curves"]
    return "; ".join(sorted(found, key=lambda each: not each.startswith("epochs"))[:3])


def repeat(kept: KeptResult) -> str:
    """Run a stored result's command again; return how the result differs, "" if it repeats."""
    loaded = load_file(find(kept.words[0], recipe_names), kept.words[1:])
    return difference(kept.result, fresh(ReportRun("", kept.words[0], "", kept.words, loaded)).result)


def rounding_differences(kept: KeptResult) -> str:
    """Return which facts that decide rounding differ between here and where a result was trained; "" if none do."""
    here, made = made_on(), kept.made
    return "; ".join(f"{name} {made.get(name)}, here {here[name]}" for name in ROUNDS if made.get(name) != here[name])


def check(most: int | None) -> int:
    """Repeat the `most` quickest stored results, or all; return how many differ although rounding is the same here."""
    kept = sorted(kept_results(reports_folder()).values(), key=lambda each: each.result.metrics.get(WALL, _UNTIMED_S))
    verdicts: Counter[str] = Counter()
    for each in kept[:most]:
        found, rounding = repeat(each), rounding_differences(each)
        differs = "may differ" if rounding else "differs"
        verdict = differs if found else "repeats"
        verdicts[verdict] += 1
        made = "; ".join(filter(None, (each.made.get("tree", each.version), rounding)))
        print(f"{verdict}  {' '.join(each.words)}  ({made}) {found}", flush=True)
    print(f"{verdicts['repeats']} of {verdicts.total()} repeat and {verdicts['differs']} differ, of {len(kept)} in all")
    if verdicts["may differ"]:
        print(f"{verdicts['may differ']} others were made with another processor, torch or NumPy, and may differ")
    return verdicts["differs"]


def missing(names: Sequence[str]) -> list[ReportRun]:
    """Return the runs that reports lack, or have without a tree: report by report, the quickest rows first."""
    known = [*kept_results(reports_folder()).values()]
    took_s = {without_seed(each.words): each.result.metrics.get(WALL, _UNTIMED_S) for each in known}
    left: dict[tuple[str, ...], ReportRun] = {}
    for name in names or report_names():
        asked, slowest_s = trained(name), dict[str, float]()  # the slowest run of each row
        for each in asked:
            slowest_s[each.row] = max(slowest_s.get(each.row, 0.0), took_s.get(without_seed(each.words), _UNTIMED_S))
        for each in sorted(asked, key=lambda each: slowest_s[each.row]):
            if not any(one.made and one.answers(each.loaded) for one in known):
                left.setdefault(each.words, each)
    return [*left.values()]


def train(names: Sequence[str]) -> None:
    """Train the runs that reports lack, storing each result as soon as it is there."""
    folder, left = reports_folder(), missing(names)
    for number, each in enumerate(left, 1):
        made = fresh(each)
        path = keep(folder, made, each.loaded)
        for older in outdated(made, path):
            older.unlink()
        print(f"{number} of {len(left)}: {' '.join(each.words)}: {made.result.sentence}", flush=True)


def outdated(made: KeptResult, path: Path) -> Iterator[Path]:
    """Yield the files of results of the same run, of any seed, that name no tree."""
    for other, kept in kept_results(reports_folder()).items():
        if other != path and not kept.made and without_seed(kept.words) == without_seed(made.words):
            yield other


def set_clocks() -> None:
    """Replace the times of stored results by those of today's simulator; see `clocks`."""
    for path, kept in kept_results(reports_folder()).items():
        loaded = load_file(find(kept.words[0], recipe_names), kept.words[1:])
        if (now := clocks.played_again(loaded, kept.result)) is not None:
            changed = replace(kept, result=now, made={**kept.made, **clocks.of_today()})
            files.replace(path, (write(changed) + "\n").encode())
            print(f"{' '.join(kept.words)}: {now.metrics[TOTAL] / kept.result.metrics[TOTAL] - 1:+.3%}", flush=True)


def main() -> int:
    """Check, train or set the clocks, as the arguments say; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("check", "train", "clocks"), default="check")
    parser.add_argument("reports", nargs="*", metavar="REPORT", help="what to train for; all by default")
    parser.add_argument("--runs", type=int, help="repeat the quickest N only", metavar="N")
    given = parser.parse_args()
    if given.what == "train":
        train(given.reports)
        return 0
    if given.what == "clocks":
        if given.reports or given.runs is not None:
            parser.error("clocks are set of all results: leave out names and --runs")
        set_clocks()
        return 0
    return min(1, check(given.runs))


if __name__ == "__main__":
    raise SystemExit(main())
