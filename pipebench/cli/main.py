"""The command line: run recipes, show what they resolve to, list what there is.

Heavy imports (torch, mlflow) wait until a command needs them: `--help` is immediate.
"""

import io
import os
import select
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click

from pipebench import __version__
from pipebench.errors import Fault, RecipeError, UserError, WorkersFailedError, printable, printable_lines
from pipebench.recipe.users_code import as_users, traceback_of

if TYPE_CHECKING:
    from pipebench.recipe.load import LoadedRecipe
    from pipebench.run.suite import Suite

USER_ERROR, INTERNAL_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 3, 130, 141
_VERBOSE = "pipebench.verbose"  # in click's meta, which outlives the command
LISTS = ("models", "datasets", "clusters", "modes", "cost-models", "recipes")


class _ReaderGoneError(Exception):
    """Whoever read our output has gone, as in `pipebench ls | head -1`."""


class _Commands(click.Group):
    """Commands whose errors end in one sentence and an exit code, never in a traceback for a user's mistake."""

    _meta: Mapping[str, Any] = MappingProxyType({})

    def invoke(self, ctx: click.Context) -> Any:
        self._meta = ctx.meta
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BrokenPipeError as error:
            # click would take any broken pipe for the output's and exit with 1 in silence.
            raise (_ReaderGoneError() if _reader_is_gone() else RuntimeError("a pipe broke inside")) from error

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        code = self._exit_code(*args, **extra)
        if standalone_mode:
            sys.exit(code)
        return code

    def _exit_code(self, *args: Any, **extra: Any) -> int:
        try:
            code: object = super().main(*args, standalone_mode=False, **extra)  # type: ignore[call-overload]
            return code if isinstance(code, int) else 0
        except click.ClickException as error:
            told = io.StringIO()
            error.show(told)
            _say(told.getvalue())
            return USER_ERROR
        except UserError as error:
            return self._mistake(error)
        except (click.Abort, KeyboardInterrupt):
            return INTERRUPTED
        except _ReaderGoneError:
            # Give the interpreter's last flush somewhere to go.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return BROKEN_PIPE
        except (Exception, SystemExit) as error:
            theirs = as_users(error)
            if theirs is not None:
                return self._mistake(theirs)
            if isinstance(error, SystemExit):
                raise
            _say(f"pipebench: internal error: {type(error).__name__}: {error}\n{traceback.format_exc()}")
            return INTERNAL_ERROR

    def _mistake(self, error: UserError) -> int:
        for line in printable_lines(str(error) or type(error).__name__):
            click.echo(f"pipebench: error: {line}", err=True)
        if self._meta.get(_VERBOSE):
            _say(traceback_of(error))
        return USER_ERROR


def _note_verbose(ctx: click.Context, option: click.Parameter, value: bool) -> bool:
    ctx.meta[_VERBOSE] = value
    return value


# Every command that runs a user's code can show where in it an error came from.
_tracebacks = click.option(
    "--verbose",
    is_flag=True,
    expose_value=False,
    callback=_note_verbose,
    help="Show the whole traceback of an error in your own code.",
)


def _say(text: str) -> None:
    for line in printable_lines(text):
        click.echo(line, err=True)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pipebench")
def cli() -> None:
    """Which way of parallelising training reaches the target accuracy first, and what does it cost?

    A recipe (YAML) asks the question: this model, this data, this cluster, this mode of parallelism.
    pipebench trains it to its target and records the answer in MLflow.

    \b
    Start here:
      pipebench run quickstart             PipeDream on 4 workers, real data, no download
      pipebench run recipes/quickstart     the same training in four modes, side by side
      pipebench show quickstart            every setting of a recipe
      pipebench profile quickstart         what every layer costs, as a table and a picture
      pipebench plan quickstart            which layers make a stage, on how many workers, and why
      pipebench ls modes                   what there is to choose from
      pipebench ui                         the recorded runs in a browser
      pipebench run --resume RUN           go on from a checkpoint, under another plan too
      pipebench export RUN                 a run's weights as a plain state_dict

    \b
    Exit codes: 0 target reached or none set, 1 missed or diverged, 2 a mistake in what
    was given, 3 an internal failure or workers that failed, 130 interrupted.
    """


@cli.command(short_help="Train recipes to their target and record the answers.")
@click.argument("words", metavar="RECIPE... [KEY=VALUE...]", nargs=-1)
@click.option("--seeds", metavar="0,1,2", help="Run every recipe once per seed; gives a median and a spread.")
@click.option(
    "--resume",
    metavar="RUN",
    help="Go on with a run from its last checkpoint: its folder in pipebench-runs/, the beginning of its name, or its "
    "MLflow run id. Keys may be changed.",
)
@click.option(
    "--verbose",
    is_flag=True,
    callback=_note_verbose,
    help="Log what every worker does, with its time; show the whole traceback of an error in your own code.",
)
def run(words: tuple[str, ...], seeds: str | None, resume: str | None, verbose: bool) -> int:
    """Train recipes to their target and record the answers in MLflow.

    RECIPE is a file, a folder of recipes, or a short name from `pipebench ls recipes`. KEY=VALUE overrides a key
    of every recipe named; `pipebench show RECIPE` prints all keys. Everything is checked before anything runs.

    \b
    Examples:
      pipebench run quickstart
      pipebench run quickstart/dp quickstart/gpipe train.seed=1
      pipebench run recipes/quickstart --seeds 0,1,2
      pipebench run my-recipe.yaml parallelism.plan=2-1-1 cluster.servers=4
      pipebench run quickstart engine.kind=distributed      a process per worker, on this host
      torchrun --nnodes 2 --nproc-per-node 4 ... -m pipebench run my-recipe.yaml engine.kind=distributed
      pipebench run --resume my-recipe-1f0c9a7e
    """
    if resume and seeds:
        raise click.UsageError("--resume goes on with the run's own seed: leave out --seeds")
    if _started_as_worker():
        from pipebench.distributed.launch_worker import worker_main

        return worker_main(lambda: _work(words, seeds, resume, verbose), verbose=verbose)
    chosen_seeds = _parse_seeds(seeds)
    loaded, suite = _to_run(words, resume, verbose)
    from pipebench.run.preflight_all import preflight_all

    preflight_all(loaded)
    from pipebench.run import runner

    try:
        code: int = runner.run_recipes(loaded, suite, seeds=chosen_seeds)
    except WorkersFailedError as error:  # its launcher has said why
        return error.exit_code
    return code


def _to_run(words: Sequence[str], resume: str | None, verbose: bool) -> tuple[list["LoadedRecipe"], "Suite"]:
    """Return the recipes to run, or the one to go on with, and how to run them."""
    references, overrides = _split(words)
    if resume is None:
        if not references:
            raise click.UsageError("name at least one recipe, for example: pipebench run quickstart")
        loaded = _load_all(references, overrides)
        from pipebench.run.suite import Suite, suite_name

        return loaded, Suite(suite_name(loaded), tuple(overrides), verbose)
    if references:
        raise click.UsageError(f"--resume goes on with a run's own recipe: leave out {references[0]}")
    from pipebench.run.resuming import resumed
    from pipebench.run.suite import Suite

    folder, recipe = resumed(resume, overrides)
    return [recipe], Suite(folder.read().suite, tuple(overrides), verbose, folder)


def _started_as_worker() -> bool:
    """Return whether torchrun, or a parent of ours, started this process as one of several."""
    return "RANK" in os.environ and ("PIPEBENCH_RUN" in os.environ or int(os.environ.get("WORLD_SIZE") or 1) > 1)


def _work(words: Sequence[str], seeds: str | None, resume: str | None, verbose: bool) -> None:
    """Do one process's part of a run."""
    if seeds is not None:
        raise UserError("--seeds: processes that are started together run one seed; give train.seed=N")
    loaded, suite = _to_run(words, resume, verbose)
    from pipebench.distributed.launch_worker import launched_by_us
    from pipebench.run.preflight_all import preflight_all

    # One tries for all; where `pipebench run` is the launcher, it has.
    preflight_all(loaded, tries=not launched_by_us() and os.environ.get("RANK") == "0")
    from pipebench.recipe.engines import engine_kind
    from pipebench.run.processes import work

    kinds = {engine_kind(each.recipe) for each in loaded}
    if len(loaded) != 1 or not all(kind.in_processes for kind in kinds):
        raise UserError(
            f"{os.environ['WORLD_SIZE']} processes were started, so the command needs one recipe with "
            f"engine.kind=distributed; it has {len(loaded)}, of kind {', '.join(sorted(kind.name for kind in kinds))}"
        )
    work(loaded[0], suite)


@cli.command(short_help="Print a recipe with everything filled in.")
@click.argument("words", metavar="RECIPE [KEY=VALUE...]", nargs=-1, required=True)
def show(words: tuple[str, ...]) -> None:
    """Print a recipe as YAML with its base, overrides and defaults filled in; the output is a recipe of its own.

    \b
    Examples:
      pipebench show quickstart
      pipebench show quickstart train.minibatch_size=64 parallelism.plan=2-1-1
    """
    from omegaconf import OmegaConf

    click.echo(OmegaConf.to_yaml(_load_one(words).config), nl=False)


@cli.command(short_help="Draw the pipeline that a recipe makes.")
@click.argument("words", metavar="RECIPE [KEY=VALUE...]", nargs=-1, required=True)
@_tracebacks
def draw(words: tuple[str, ...]) -> None:
    """Draw the start of the pipeline that a recipe makes: workers downwards, time to the right. Trains nothing.

    \b
    Examples:
      pipebench draw quickstart
      pipebench draw quickstart/gpipe parallelism.microbatches=8
    """
    loaded = _load_one(words)
    from pipebench.recipe.preflight import preflight
    from pipebench.run import runner

    preflight(loaded, trains=False)
    click.echo(runner.draw(loaded))


@cli.command(name="profile", short_help="Show what every layer of a model costs.")
@click.argument("words", metavar="RECIPE|FILE [KEY=VALUE...]", nargs=-1, required=True)
@click.option("--json", "json_file", metavar="OUT.json", help="Write the profile here; pipebench reads it back.")
@click.option("--graph-txt", metavar="OUT.txt", help="Write it in the PipeDream artifact's format.")
@click.option("--picture", metavar="OUT.png", help="Write the picture here.")
@click.option(
    "--samples", type=click.IntRange(1), help="Which size to show, by default the largest; of a graph.txt, its."
)
@click.option("--all", "show_all", is_flag=True, help="Show every layer, however many there are.")
@_tracebacks
def profile_(
    words: tuple[str, ...],
    json_file: str | None,
    graph_txt: str | None,
    picture: str | None,
    samples: int | None,
    show_all: bool,
) -> None:
    """Show what every layer of a model costs: time forward and backward, activations, parameters.

    RECIPE is profiled as it says (engine.timing): measured on this machine, computed for its cluster's device, or read
    from a file. NAME.profile.json and NAME.profile.png are written to the current folder, NAME being the recipe's.
    FILE is a profile (.json) or the PipeDream artifact's graph.txt (.txt); it is shown, and NAME.profile.png written.

    \b
    Examples:
      pipebench profile quickstart
      pipebench profile quickstart cluster.name=local --samples 32
      pipebench profile quickstart cluster.name=cluster-b --json v100.json --picture v100.png
      pipebench profile quickstart.profile.json --graph-txt quickstart.graph.txt
      pipebench profile gnmt8.graph.txt --samples 64 --all
      pipebench run quickstart engine.timing=v100.json
    """
    references, overrides = _split(words)
    file = Path(references[0]) if len(references) == 1 and references[0].endswith((".json", ".txt")) else None
    if file is not None and overrides:
        raise click.UsageError(f"{overrides[0]} changes a recipe, and {file} is a profile")
    loaded = _load_one(words) if file is None else None
    from pipebench.cli import profiling
    from pipebench.recipe.preflight import preflight

    if loaded is not None:
        preflight(loaded, trains=False)

    name = profiling.plain_name(file) if file is not None else loaded.recipe.name if loaded is not None else ""
    json_path = json_file or (None if file is not None else f"{name}.profile.json")
    wanted = profiling.Wanted(
        json_path=Path(json_path) if json_path else None,
        graph_path=Path(graph_txt) if graph_txt else None,
        picture_path=Path(picture or f"{name}.profile.png"),
        num_samples=samples,
        show_all=show_all,
    )
    if file is not None:
        profiling.profile_of_file(file, wanted)
    elif loaded is not None:
        profiling.profile_of_recipe(loaded, wanted)


@cli.command(short_help="Find the best plan: stages, replicas, and why.")
@click.argument("words", metavar="[RECIPE] [KEY=VALUE...]", nargs=-1)
@click.option("--profile", metavar="FILE", help="Layer costs: a profile (.json) or the PipeDream artifact's graph.txt.")
@click.option("--cluster", metavar="NAME", help="Devices and links, from `pipebench ls clusters`, or a YAML file.")
@click.option("--servers", metavar="N", help="How many components of the cluster's outermost level.  [default: 1]")
@click.option(
    "--levels",
    metavar="N@RATE[,...]",
    help="Instead of a cluster: workers and bytes/s per level, innermost first.",
)
@click.option("--memory", metavar="BYTES", help="With --levels: memory per device, such as 16GB.  [default: no limit]")
@click.option("--latency", metavar="SECONDS", help="With --levels: latency of every link, such as 10us.  [default: 0]")
@click.option("--cost-model", metavar="NAME", help="How times add up, from `pipebench ls cost-models`.")
@click.option("--mode", metavar="NAME|auto", help="The mode to plan, from `pipebench ls modes`; auto: the fastest.")
@click.option("--minibatch-size", metavar="N", help="Samples per minibatch of a profile file.")
@click.option("--shapes", is_flag=True, help="Also plan equal stages (2BW) and 2 chunks per worker (interleaved).")
@click.option("--picture", metavar="OUT.png", help="Write a picture of the plan here.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, numbers unrounded, and nothing else.")
@_tracebacks
def plan(words: tuple[str, ...], **given: Any) -> None:
    """Find the best plan: which layers make a stage, how many workers run it, what it comes to, and why.

    The planner is exact for its cost model, or says how far off it may be; the simulator then predicts throughput.
    With a RECIPE everything comes from it unless an option says otherwise, and the plan is one that `pipebench run`
    can follow. Without one, a profile file and links are enough. The best plan of every other mode is shown beside
    it.

    \b
    Examples:
      pipebench plan quickstart
      pipebench plan quickstart --cluster cluster-a --servers 4 --mode auto
      pipebench plan quickstart train.minibatch_size=64 --picture plan.png
      pipebench plan --profile vgg16.graph.txt --levels 16@1.25e9
      pipebench plan --profile vgg16.graph.txt --levels 4@1e10,4@10Gbit/s --minibatch-size 128
      pipebench plan --profile v100.json --levels 16@1.25e9 --memory 16GB --latency 10us
      pipebench plan --profile gnmt8.graph.txt --levels 16@1.25e9 --cost-model artifact --json

    `--levels 16@1.25e9` is 16 workers, each with a link of 1.25 GB/s; `--levels 4@1e10,4@1.25e9` is 4 servers of
    4 workers, 10 GB/s inside a server and 1.25 GB/s for each server.
    """
    references, _ = _split(words)
    files = [word for word in references if word.endswith((".json", ".txt"))]
    if files:
        raise UserError(f"{files[0]} looks like a profile and not like a recipe: write --profile {files[0]}")
    from pipebench.cli import planning
    from pipebench.recipe.preflight import preflight

    asked = planning.Asked(**given)
    planning.check(asked, with_recipe=bool(words))
    loaded = None
    if words:
        loaded = planning.with_options(_load_one(words), asked)
        preflight(loaded, trains=False)
    planning.plan(loaded, asked)


@cli.command(short_help="Write the weights of a run's checkpoint to a file.")
@click.argument("run_", metavar="RUN")
@click.option("--output", metavar="FILE.pt", help="Where to write them.  [default: RUN's id, in the current folder]")
@click.option("--step", type=click.IntRange(0), help="Which checkpoint, in minibatches.  [default: the newest]")
@_tracebacks
def export(run_: str, output: str | None, step: int | None) -> None:
    """Write the weights of a run's checkpoint as a plain state_dict, whatever plan it was trained under.

    RUN is the run's id (or the start of it), its MLflow run id, or its folder under pipebench-runs/.

    \b
    Examples:
      pipebench export quickstart-1f0c9a7e
      pipebench export quickstart-1f0c9a7e --step 375 --output quickstart.pt
    """
    from pipebench.run import export as exporting

    exported = exporting.export(run_, output, step)
    for sentence in exported.skipped:
        click.echo(f"pipebench: {printable(sentence)}", err=True)
    click.echo(exported)


@cli.command(name="ls", short_help="List models, data sets, clusters, modes, cost models and recipes.")
@click.argument("what", type=click.Choice(LISTS), required=False)
def list_(what: str | None) -> None:
    """List what a recipe can name, one line each.

    \b
    Examples:
      pipebench ls
      pipebench ls clusters
    """
    from pipebench.cli import listing

    for index, heading in enumerate(LISTS if what is None else (what,)):
        if what is None:
            click.echo(f"{chr(10) if index else ''}{heading}:")
        for line in listing.lines(heading, indent="" if what else "  "):
            click.echo(line)


@cli.command(short_help="Open the recorded runs in the MLflow UI.")
@click.option("--port", type=click.IntRange(1, 65535), help="Port on 127.0.0.1; by default a free one, from 5000 on.")
def ui(port: int | None) -> int:
    """Serve the MLflow UI on the store that `pipebench run` writes to, on this machine only (127.0.0.1).

    The store is mlflow.db in the working directory, or what MLFLOW_TRACKING_URI says.
    """
    from pipebench.tracking import open_ui

    return open_ui(port)


def main() -> None:
    """Run the command line and exit with its code."""
    cli()


def _reader_is_gone() -> bool:
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in output.poll(0))


def _parse_seeds(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        seeds = [-1]
    if len(set(seeds)) != len(seeds) or not all(0 <= seed < 2**63 for seed in seeds):
        raise UserError(f"--seeds: got {text[:60]!r}, allowed are different whole numbers from 0 on, such as 0,1,2")
    return seeds


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return recipes and overrides: a word with `=` is an override unless it is an existing path."""
    overrides = [word for word in words if "=" in word and not os.path.exists(word)]
    return [word for word in words if word not in overrides], overrides


def _load_one(words: Sequence[str]) -> "LoadedRecipe":
    from pipebench.recipe.load import load

    references, overrides = _split(words)
    if len(references) != 1:
        raise click.UsageError(f"one recipe is needed, got {len(references)}")
    return load(references[0], overrides)


def _load_all(references: Sequence[str], overrides: Sequence[str]) -> list["LoadedRecipe"]:
    """Load every recipe, or raise with the faults of all of them together."""
    from pipebench.recipe.catalog import find_recipes
    from pipebench.recipe.load import load_file
    from pipebench.run.preflight_all import same_names

    loaded: list[LoadedRecipe] = []
    faults: list[Fault] = []
    for reference in references:
        try:
            paths = find_recipes(reference)
        except RecipeError as error:
            faults += error.faults
            continue
        for path in paths:
            try:
                loaded.append(load_file(path, overrides))
            except RecipeError as error:
                faults += error.faults
    faults += same_names(loaded)
    if faults:
        raise RecipeError(dict.fromkeys(faults))
    return loaded
