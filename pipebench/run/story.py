"""The page `about.html` of a run or a comparison.

A run's page has recipe, plan, timeline, where the time went, curves, and what to try next. A comparison's page has
which run is first and why, the table with links to its runs, curves, and what differs.

MLflow lists a run's artifacts by name, so this one comes first. The page needs no other file and no network.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pipebench
from pipebench.formats import percent, seconds
from pipebench.planner.planner import Planner
from pipebench.planner.plans import Comparison, PlanEstimate
from pipebench.recipe.schema import Recipe
from pipebench.run.advice import advice, command
from pipebench.run.request import RunRequest
from pipebench.show.answers import Run
from pipebench.show.comparison import ComparedRun, groups, headings, notes, rows
from pipebench.show.console import facts, parts_of_time
from pipebench.show.differences import differences
from pipebench.show.html import html
from pipebench.show.page import Block, Cell, Heading, Image, LinkedText, Page, PageLink, RenderedTable, Text, Verbatim
from pipebench.show.plan_answer import PlanFindings
from pipebench.show.verdict import verdict
from pipebench.tracking.run_log import RunLog
from pipebench.tracking.ui import server_address
from pipebench.train.job import Job
from pipebench.train.request import plan_request
from pipebench.train.result import RunResult

PAGE = "about.html"
_BAR = 30  # characters of a bar for 100 %
# Pictures and what they show, in the order of the page.
_PLAN = {"plan": "layers with their times and cuts, and what fills every stage's time by the cost model"}
_TIMELINE = {"timeline": "what workers and links did, from the start", "memory": "memory of every worker, as simulated"}
_CURVES = {"curves": "training loss and scores against the run's clock"}


def story(request: RunRequest, recipe: Recipe, result: RunResult, folder: Path | None) -> str:
    """Return the page of a run as HTML.

    Args:
        request: the run.
        recipe: its recipe with the mode resolved.
        result: its result.
        folder: the record's, with the pictures that the page shows; None for none.
    """
    loaded, overrides = request.loaded, request.suite.overrides
    given = "\n".join(f"{key}: {loaded.flat[key]}" for key in loaded.flat if key in loaded.origins)
    tried = "\n\n".join(f"{why}\n\n    {line}" for why, line in advice(loaded, recipe, result, overrides))
    blocks: list[Block] = [
        Text(result.sentence),
        RenderedTable(("", ""), facts(result), left=2),
        *(Heading("Recipe"), Text("What the recipe says; the artifact `recipe.yaml` has the defaults, too.")),
        Verbatim(given),
        *_pictures("Plan", _PLAN, folder),
        *_pictures("Timeline", _TIMELINE, folder),
        *(Heading("Where the time went"), *_time_tables(result)),
        *_pictures("Curves", _CURVES, folder),
        *(Heading("What to try next"), Text(tried)),
    ]
    line = command("run", loaded, loaded.words_with(overrides))
    blocks.append(Text(f"Written by pipebench {pipebench.__version__}: {result.engine} engine, {result.clock} clock."))
    return html(Page(line, f"{result.name}, seed {result.seed}", tuple(blocks)), folder or Path(), "")


def answer_of(job: Job) -> PlanFindings:
    """Return a prepared run's own plan as `pipebench plan` would; raises a PlanError."""
    recipe, setup = job.recipe, job.setup
    request = plan_request(recipe, job.cluster, job.profile, setup.dataset)
    planner = Planner(request, recipe.parallelism.mode)
    found: PlanEstimate = planner.estimate_of(setup.plan)
    comparison = Comparison(found, (), found, {}, {}, len(planner.work.states))
    return PlanFindings(recipe.name, request, recipe.parallelism.row, comparison, says_samples=True)


def _pictures(title: str, pictures: Mapping[str, str], folder: Path | None) -> list[Block]:
    there = [name for name in pictures if folder is not None and (folder / f"{name}.png").is_file()]
    return [Heading(title), *(Image(name, pictures[name]) for name in there)] if there else []


def _time_tables(result: RunResult) -> list[Block]:
    """Return the parts of the run's time, and of its workers' time in training."""
    total_s = result.metrics.get("total_time_s", 0.0)
    parts = [(name, seconds(s), s / total_s) for name, s in parts_of_time(result.metrics).items() if total_s > 0]
    workers = _parts_of_workers(result.metrics)
    blocks: list[Block] = []
    for sentence, shares in (
        (f"Of the run, on its {result.clock} clock:", parts),
        ("Of the workers' time in training:", workers),
    ):
        if shares:
            timed = any(text for _, text, _ in shares)
            lines = [
                (name, "\u2588" * round(_BAR * share), percent(share), *((text,) if timed else ()))
                for name, text, share in shares
            ]
            blocks += [Text(sentence), RenderedTable(("", "", "share", *(("time",) if timed else ())), lines, left=2)]
    return blocks


def _parts_of_workers(metrics: Mapping[str, float]) -> list[tuple[str, str, float]]:
    """Return name, seconds as text ("" if simulated) and fraction of each part of the workers' time."""
    measured = {
        "computing": "compute_s", "waiting": "waiting_s", "sending": "sending_s", "swapping": "swapping_s",
        "other": "other_s",
    }  # fmt: skip
    found_s = {name: metrics[key] for name, key in measured.items() if metrics.get(key)}
    if "computing" in found_s:
        return [(name, seconds(part_s), part_s / sum(found_s.values())) for name, part_s in found_s.items()]
    if "bubble_fraction" not in metrics:
        return []
    stalls = metrics.get("comm_stall_fraction", 0.0), metrics.get("swap_stall_fraction", 0.0)
    shares = {
        "computing": metrics.get("effective_fraction", 1.0 - metrics["bubble_fraction"]),
        "computing again": metrics.get("recompute_fraction", 0.0),
        "waiting for bytes on their way": stalls[0],
        "waiting for copies from the host": stalls[1],
        "waiting for other workers": max(0.0, metrics["bubble_fraction"] - sum(stalls)),
    }
    return [(name, "", share) for name, share in shares.items() if share]


_LINKS = (
    "Links lead to the runs in `pipebench ui`. MLflow shows this page in a frame that follows no links: there the runs "
    "are listed under Overview, Child runs."
)
_MOST_COLUMNS = 12  # recipes side by side; more are a sweep, whose runs' names say what differs


def comparison_story(parent: RunLog, runs: Sequence[Run], pictures: Sequence[str]) -> str:
    """Return the page of a comparison, or of one recipe's seeds, as HTML.

    Args:
        parent: its record.
        runs: at least one.
        pictures: names of PNG files in the record, in the order of the page.
    """
    results = [run.result for run in runs]
    blocks: list[Block] = [
        *_tables(parent, runs),
        *_list([*(f"{run.name}, seed {run.seed}: {run.sentence}" for run in results), *notes(results)]),
    ]
    if parent.folder is not None and pictures:
        blocks += [Heading("Curves"), *(Image(Path(name).stem, Path(name).stem) for name in pictures)]
    differing = differences(results)
    if differing and len(results) <= _MOST_COLUMNS:
        heads = ("key", *(f"{run.name}, seed {run.seed}" for run in results))
        blocks += [Heading("What differs in the recipes"), RenderedTable(heads, differing, left=len(heads))]
    blocks.append(Text(f"{_LINKS} Written by pipebench {pipebench.__version__}."))
    page = Page(f"pipebench compare {parent.wait_for_id() or ''}".rstrip(), parent.name, tuple(blocks))
    return html(page, parent.folder or Path(), server_address())


def _tables(parent: RunLog, runs: Sequence[Run]) -> Iterator[Block]:
    """Yield every group's verdict and its table: the verdict's first sentence, the table, the other sentences."""
    results = [run.result for run in runs]
    for group in groups(results):
        if group.title:
            yield Heading(group.title)
        first, *others = [*verdict(group), ""]
        yield Text(first)
        lines: list[tuple[Cell, ...]] = [
            (_linked(parent, runs, entry, name), *cells)
            for entry, (name, *cells) in zip(group.entries, rows(results, group), strict=True)
        ]
        yield RenderedTable(headings(results), lines, left=2)
        yield from _list(others)


def _linked(parent: RunLog, runs: Sequence[Run], entry: ComparedRun, name: str) -> LinkedText:
    """Return a row's name with a link per run of it."""
    links = (
        PageLink(
            f"seed {run.result.seed}", run.result.sentence, parent.store.experiment_id or "", run.mlflow_run_id or ""
        )
        for run in runs
        if run.result.name == entry.name
    )
    return LinkedText(name, tuple(links))


def _list(sentences: Sequence[str]) -> Iterator[Text]:
    if any(sentences):
        yield Text("\n".join(f"- {sentence}" for sentence in sentences if sentence))
