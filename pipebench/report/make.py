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
from pipebench.report.recipes import Asked
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
class Making:
    """Options of making a report."""

    command: str  # that makes the report
    folder: Path  # for the output
    fresh: bool = False  # whether recorded and stored results are ignored
    keeps: bool = False  # whether trained results are stored beside the report
    trains: bool = True  # if not, seeds that aren't trained yet are left out


def make_report(report: Report, asked: Sequence[Asked], making: Making) -> int:
    """Make a report; return the exit code.

    Raises:
        UserError: something that the runs use is missing, before any of them starts; or, after them, the folder can't
            be written.
    """
    require_writable()
    asked = sized(asked, _say)
    collection = _looked_up(report, asked, making)
    _say(_found(collection))
    tracking = Tracking(f"report {report.name}")
    tags = {"kind": "report", "report": report.name, "rows": ", ".join(row.name for row in report.rows)}
    parent = tracking.start(report.title, params={}, tags=tags, virtual=False)
    done = False
    try:
        if not _run(collection, tracking, parent):
            return INTERRUPTED
        outcomes, drawings = collection.outcomes(), _drawings(report, asked)
        about = {"command": making.command, "server": server_address(), "made": made_now()}
        evaluated = evaluate_report(report, outcomes, **about, drawings=drawings)
        try:
            trained = collection.trained() if making.keeps else ()
            kept = [keep(report.path.parent, result, each.loaded) for each, result in trained]
            with preparing(report.name, work="drawing pictures and writing the page"):
                rendered = render(evaluated, making.folder)
        except OSError as error:
            raise UserError(f"{error.filename or making.folder} can't be written: {error.strerror}") from error
        _record(parent, rendered)
        done = True
    finally:
        parent.finish(None, status="FINISHED" if done else "KILLED")
    _tell(evaluated, rendered, kept, parent)
    return 0


def _looked_up(report: Report, asked: Sequence[Asked], making: Making) -> Collection:
    """Return a report's runs with known results; raises a UserError if something is missing that the others use."""
    collection = Collection(asked)
    with preparing(report.name, work="looking up results"):
        if not making.fresh:
            collection.look_up(report.path.parent)
        if not making.trains:
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


def _drawings(report: Report, asked: Sequence[Asked]) -> dict[tuple[str, str], str]:
    """Return the pipelines that the report draws as text, by row and run, as in its first column."""
    wanted = {(picture.row, run) for picture in report.pictures if picture.kind == "schedule" for run in picture.runs}
    first: dict[tuple[str, str], Asked] = {}
    for each in asked:
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


def sized(asked: Sequence[Asked], tell: Callable[[str], None]) -> list[Asked]:
    """Return the runs with the largest minibatch that fits filled in for those that ask for it; 1 if none fits.

    `tell` receives a sentence per size found.

    Raises:
        UserError: a recipe is wrong at any size.
    """
    found: dict[tuple[str, ...], int] = {}
    for each in asked:
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
    return [_with_size(each, found[each.words]) if each.largest else each for each in asked]


def _with_size(asked: Asked, minibatch_size: int) -> Asked:
    words = (*asked.words, f"{_KEY}={minibatch_size}")
    return replace(asked, words=words, loaded=load_file(asked.loaded.path, words[1:]), largest=False)
