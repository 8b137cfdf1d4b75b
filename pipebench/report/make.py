"""Make a report: run what is missing, evaluate, render, and record it as one MLflow run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from rich.text import Text

from pipebench.errors import PlanError, UserError, printable
from pipebench.recipe.load import load_file
from pipebench.report.collect import Collection
from pipebench.report.definition import Report
from pipebench.report.evaluate import evaluate_report
from pipebench.report.evaluated import KEPT, MLFLOW, Evaluated
from pipebench.report.kept import keep
from pipebench.report.progress import guess, runs_progress
from pipebench.report.recipes import ReportRun
from pipebench.report.render import Rendered, render
from pipebench.run.identity import code_identity
from pipebench.run.runner import draw
from pipebench.show.progress import preparing
from pipebench.show.terminal import standard_output
from pipebench.tracking.run_log import RunLog, Tracking
from pipebench.tracking.store import require_writable
from pipebench.tracking.ui import server_address
from pipebench.train.largest_minibatch import largest_minibatch

INTERRUPTED = 130


@dataclass(frozen=True)
class MakeOptions:
    """Options of making a report."""

    command: str  # that makes the report
    folder: Path  # for the output
    fresh: bool = False  # whether recorded and stored results are ignored
    keeps: bool = False  # whether trained results are stored beside the report
    trains: bool = True  # if not, seeds that aren't trained yet are left out


def make_report(report: Report, runs: Sequence[ReportRun], options: MakeOptions) -> int:
    """Make a report; return the exit code.

    Raises:
        UserError: something that the runs use is missing, before any of them starts; or, after them, the folder can't
            be written.
    """
    require_writable()
    runs = sized(runs, _say)
    collection = _looked_up(report, runs, options)
    _say(_found(collection))
    tracking = Tracking(f"report {report.name}")
    tags = {"kind": "report", "report": report.name, "rows": ", ".join(row.name for row in report.rows)}
    parent = tracking.start(report.title, params={}, tags=tags, virtual=False)
    done = False
    try:
        if not _run(collection, tracking, parent):
            return INTERRUPTED
        evaluated = replace(
            evaluate_report(report, collection.outcomes()),
            command=options.command,
            server=server_address(),
            made=made_now(),
            drawings=_drawings(report, runs),
        )
        try:
            trained = collection.trained() if options.keeps else ()
            kept = [keep(report.path.parent, result, each.loaded) for each, result in trained]
            with preparing(report.name, work="drawing pictures and writing the page"):
                rendered = render(evaluated, options.folder)
        except OSError as error:
            raise UserError(f"{error.filename or options.folder} can't be written: {error.strerror}") from error
        _record(parent, rendered)
        done = True
    finally:
        parent.finish(None, status="FINISHED" if done else "KILLED")
    _tell(evaluated, rendered, kept, parent)
    return 0


def _looked_up(report: Report, runs: Sequence[ReportRun], options: MakeOptions) -> Collection:
    """Return a report's runs with known results; raises a UserError if something is missing that the others use."""
    collection = Collection(runs)
    with preparing(report.name, work="looking up results"):
        if not options.fresh:
            collection.look_up(report.path.parent)
        if not options.trains:
            collection.leave_out_training()
        collection.check()
    return collection


def _run(collection: Collection, tracking: Tracking, parent: RunLog) -> bool:
    """Run what is missing; return False after an interrupt."""
    missing = collection.missing
    if not missing:
        return True
    complete = False
    try:
        with runs_progress(missing) as begin:
            complete = collection.run_missing(tracking, parent, begin)
    finally:
        if not complete:
            left = len(collection.missing)
            _say(f"{len(missing) - left} of {len(missing)} runs are done and recorded; the same command goes on")
    return complete


def _drawings(report: Report, runs: Sequence[ReportRun]) -> dict[tuple[str, str], str]:
    """Return the pipelines that the report draws as text, by row and run, as in its first column."""
    wanted = {(picture.row, run) for picture in report.pictures if picture.kind == "schedule" for run in picture.runs}
    first: dict[tuple[str, str], ReportRun] = {}
    for each in runs:
        first.setdefault((each.row, each.run), each)
    return {place: draw(first[place].loaded, cut=False) for place in sorted(wanted)}


def _found(collection: Collection) -> str:
    """Return how many results are available and how many runs are left."""
    reused = [outcome.reused for outcome in collection.by_recipe.values()]
    sources = {MLFLOW: "recorded in MLflow with this version", KEPT: "kept beside the report"}
    parts = [f"{reused.count(source)} {text}" for source, text in sources.items() if source in reused]
    missing = collection.missing
    parts.append(f"{len(missing)} to run ({guess(missing)})" if missing else "nothing to run")
    return f"{len(collection.recipes)} runs: {', '.join(parts)}"


def _record(parent: RunLog, rendered: Rendered) -> None:
    """Record the rendered files; tables and the first picture become the run's description."""
    for path in rendered.files:
        parent.file(path.name, path)
    parent.describe(rendered.summary, [path.name for path in rendered.pictures[:1]])


def _tell(evaluated: Evaluated, rendered: Rendered, kept: Sequence[Path], parent: RunLog) -> None:
    """Print a summary and the files written."""
    for score in evaluated.scores:
        rank = "" if score.rank_correlation is None else f", rank correlation {score.rank_correlation:.2f}"
        over = f"{score.cells} cells, {score.over}"
        measure = score.measure or "numbers in claims"
        _say(f"{measure}, {score.column}: geometric-mean error {score.geometric_mean_error:.1%}{rank} ({over})")
    for verdict in evaluated.verdicts:
        column = f", {verdict.column}" if verdict.column else ""
        _say(f"{verdict.answer}{column}: {verdict.claim.text} ({verdict.reason})")
    for problem in dict.fromkeys(
        f"{c.row}, {c.measure}, {c.column}: {c.problem}" for c in evaluated.cells if c.problem
    ):
        _say(f"no value: {problem}")
    for sentence in rendered.undrawn:
        _say(sentence)
    if kept:
        _say(f"kept: {len(kept)} results of runs that trained, in {kept[0].parent}/")
    if rendered.removed:
        _say(f"removed: {', '.join(path.name for path in rendered.removed)}, which the page shows no longer")
    for path in rendered.files:
        if path.suffix in (".md", ".html"):
            _say(f"written: {path}")
    _say(f"MLflow: {parent.where()}")


def made_now() -> str:
    """Return when and by which code a page is made."""
    return f"{datetime.now(UTC).strftime('%Y-%m-%d %H:%M UTC')} {code_identity()}"


def _say(text: str) -> None:
    standard_output().print(Text(printable(text)), soft_wrap=True)


_KEY = "train.minibatch_size"


def sized(runs: Sequence[ReportRun], tell: Callable[[str], None]) -> list[ReportRun]:
    """Return the runs; those that ask for the largest minibatch get the largest size that fits, or 1 if none fits.

    Args:
        runs: the runs of a report.
        tell: receives a sentence per size found.

    Raises:
        UserError: a recipe is wrong at any size.
    """
    found: dict[tuple[str, ...], int] = {}
    for each in runs:
        if each.largest and each.words not in found:
            name = f"{each.row}, {each.run}"
            try:
                with preparing(name, work="looking for the largest minibatch"):
                    found[each.words] = largest_minibatch(each.loaded).minibatch_size
            except PlanError as error:
                found[each.words] = 1
                tell(f"{name}: {error}")
            else:
                tell(f"{name}: {found[each.words]:,} samples are the largest minibatch that fits")
    return [_with_size(each, found[each.words]) if each.largest else each for each in runs]


def _with_size(run: ReportRun, minibatch_size: int) -> ReportRun:
    words = (*run.words, f"{_KEY}={minibatch_size}")
    return replace(run, words=words, loaded=load_file(run.loaded.path, words[1:]), largest=False)
