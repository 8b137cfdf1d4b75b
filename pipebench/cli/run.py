"""`pipebench run`: trains recipes or resumes a run, as a user's command or as one of a run's processes."""

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from pipebench.cli.group import note_verbose, trust
from pipebench.cli.json_output import json_flag, json_line, json_text, only_json
from pipebench.cli.main import main
from pipebench.cli.parameters import Parameter, option, parse_seeds, zip_flag
from pipebench.cli.references import complete, load_all, split
from pipebench.distributed.launch_template import Template
from pipebench.errors import UserError, WorkersFailedError
from pipebench.garbage import freeze_all, without_collector
from pipebench.interrupts import RaisedBySignals
from pipebench.recipe.engines import engine_kind
from pipebench.recipe.load import LoadedRecipe
from pipebench.run.folder import resumed
from pipebench.run.lock import locked
from pipebench.run.preflight_all import preflight_all
from pipebench.run.suite import Suite, suite_name

if TYPE_CHECKING:
    from pipebench.show.answers import RunComparison


@click.command
@click.argument("words", metavar="RECIPE... [KEY=VALUE...]", nargs=-1, shell_complete=complete)
@option("--seeds", Parameter(parse_seeds), "0,1,2", "Run every recipe once per seed; gives a median and a spread.")
@zip_flag
@click.option(
    "--resume",
    metavar="RUN",
    help="Go on with a run from its last checkpoint. RUN is its folder in pipebench-runs/, the beginning of its name, "
    "or its MLflow run id. Keys may be changed.",
)
@trust
@click.option(
    "--verbose",
    is_flag=True,
    callback=note_verbose,
    help="Log every worker's instructions with their times; show the whole traceback of an error in your own code.",
)
@json_flag
@click.option(
    "--json-lines",
    is_flag=True,
    help="Print a line of JSON per evaluation and, every second, one on how far training is; at the end one per "
    "result, and for several runs one with their table.",
)
def run(seeds: tuple[int, ...] | None, as_json: bool, json_lines: bool, **asked: Any) -> int:
    """Train recipes to their target and record the answers in MLflow.

    RECIPE is a file, a folder of recipes, or a short name from `pipebench ls recipes`. KEY=VALUE overrides a key
    of every recipe named; `pipebench show RECIPE` prints all keys. KEY=A,B,C makes a run of each, side by side.
    Everything is checked before anything runs. With --json, text for people goes to standard error.

    \b
    Examples:
      pipebench run quickstart
      pipebench run quickstart/dp quickstart/gpipe train.seed=1
      pipebench run recipes/quickstart --seeds 0,1,2
      pipebench run quickstart parallelism.depth=1,2,4,7
      pipebench run quickstart/dp cluster.servers=1,2,4 train.minibatch_size=32,16,8 --zip
      pipebench run my-recipe.yaml parallelism.plan=2-1-1 cluster.servers=4
      pipebench run quickstart --json > result.json
      pipebench run quickstart engine.kind=distributed      a process per worker, on this host
      torchrun --nnodes 2 --nproc-per-node 4 ... -m pipebench run my-recipe.yaml engine.kind=distributed
      pipebench run --resume my-recipe-1f0c9a7e
    """
    if asked["trusts"] and not asked["resume"]:
        raise click.UsageError("--trust goes with --resume RUN, whose folder may belong to another user")
    if asked["resume"] and seeds:
        raise click.UsageError("--resume goes on with the run's own seed: leave out --seeds")
    if asked["resume"] and asked["zipped"]:
        raise click.UsageError("--resume goes on with one run: leave out --zip")
    if _started_as_worker():
        if as_json or json_lines:
            raise click.UsageError("--json is for one process: started by torchrun, result.json is in the run's folder")
        from pipebench.distributed.launch_worker import worker_main

        return worker_main(lambda: _work(seeds, **asked), verbose=asked["verbose"])
    with RaisedBySignals():
        return _run_all(seeds, as_json=as_json, json_lines=json_lines, **asked)


def _run_all(seeds: Sequence[int] | None, *, as_json: bool, json_lines: bool, **asked: Any) -> int:
    """Check and run what a user's command asks for; return the exit code."""
    can_copy = sys.platform == "linux" and _has_computed_nothing()
    with without_collector():
        loaded, suite = _to_run(**asked)
    lock = nullcontext() if suite.resumed is None else locked(suite.resumed.path)
    with lock, _template(loaded) if can_copy else nullcontext() as template:
        preflight_all(loaded, seeds=seeds)
        try:
            return _run(loaded, replace(suite, template=template), seeds, as_json=as_json, json_lines=json_lines)
        except WorkersFailedError as error:  # its launcher has printed why
            return error.exit_code


def _has_computed_nothing() -> bool:
    """Return whether torch isn't imported yet, and so no thread of torch can be running in this process."""
    return "torch" not in sys.modules


def _template(loaded: Sequence[LoadedRecipe]) -> AbstractContextManager[Template | None]:
    """Return the process whose copies are workers, with everything imported; None for recipes without processes.

    It must be called before anything computes. Loading recipes builds models, but without weights.
    """
    if not any(engine_kind(each.recipe).in_processes for each in loaded):
        return nullcontext()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # as in `worker_settings`; torch reads it when imported
    with without_collector():
        from pipebench.run import runner  # noqa: F401 # what workers import, too
    freeze_all()  # otherwise the collector scans all of it again and again while MLflow is imported
    return Template(main)


def _run(
    loaded: Sequence[LoadedRecipe], suite: Suite, seeds: Sequence[int] | None, *, as_json: bool, json_lines: bool
) -> int:
    """Run recipes that passed all checks, print the results in the requested form, and return the exit code."""
    with without_collector():
        from pipebench.run import runner

    if not as_json and not json_lines:
        code: int = runner.run_recipes(loaded, suite, seeds=seeds)
        return code
    several = runner.num_runs(loaded, seeds) > 1
    with only_json() as write:

        def show(made: "RunComparison") -> None:
            if not json_lines:
                write(json_text((made if several else made.runs[0]).to_dict()))
                return
            for each in made.runs:
                write(json_line({"event": "result", **each.to_dict()}))
            if several:
                write(json_line({"event": "comparison", **made.to_dict(), "runs": len(made.runs)}))

        if json_lines:
            suite = replace(suite, on_progress=lambda facts: write(json_line(facts)))
        made = runner.run_all(loaded, suite, seeds=seeds, show=show)
    return made.exit_code


def _to_run(
    *, words: Sequence[str], zipped: bool, resume: str | None, trusts: bool, verbose: bool
) -> tuple[list[LoadedRecipe], Suite]:
    """Return the recipes to run, or the one to resume, and how to run them."""
    references, overrides = split(words)
    if resume is None:
        if not references:
            raise click.UsageError("name at least one recipe, for example: pipebench run quickstart")
        loaded = load_all(references, overrides, zipped=zipped)
        return loaded, Suite(suite_name(loaded), tuple(overrides), verbose)
    if references:
        raise click.UsageError(f"--resume goes on with a run's own recipe: leave out {references[0]}")
    checked = "PIPEBENCH_RUN" in os.environ and _started_as_worker()  # by the process that started this one
    prints = not checked and os.environ.get("RANK", "0") == "0"
    folder, recipe = resumed(resume, overrides, trusts=trusts or checked, prints=prints)
    return [recipe], Suite(folder.read().suite, tuple(overrides), verbose, folder)


_ALONE = (None, "", "1")  # WORLD_SIZE of a process without others; any other text is checked when processes join


def _started_as_worker() -> bool:
    """Return whether torchrun or our launcher started this process as one of several."""
    return "RANK" in os.environ and ("PIPEBENCH_RUN" in os.environ or os.environ.get("WORLD_SIZE") not in _ALONE)


def _work(seeds: Sequence[int] | None, **asked: Any) -> None:
    """Do one process's part of a run."""
    if seeds is not None:
        raise UserError("--seeds: processes that are started together run one seed; give train.seed=N")
    loaded, suite = _to_run(**asked)
    from pipebench.distributed.launch_worker import launched_by_us

    # One process tries a minibatch for all; the launcher of `pipebench run` has done so already.
    preflight_all(loaded, tries=not launched_by_us() and os.environ.get("RANK") == "0")
    from pipebench.run.processes import work

    kinds = {engine_kind(each.recipe) for each in loaded}
    if len(loaded) != 1 or not all(kind.in_processes for kind in kinds):
        raise UserError(
            f"{os.environ['WORLD_SIZE']} processes were started, so the command needs one recipe with "
            f"engine.kind=distributed; it has {len(loaded)}, of kind {', '.join(sorted(kind.name for kind in kinds))}"
        )
    work(loaded[0], suite)
