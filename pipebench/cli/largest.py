"""`pipebench largest`: the largest minibatch with which a recipe fits on its cluster."""

import click

from pipebench.cli.group import tracebacks
from pipebench.cli.json_output import json_flag
from pipebench.cli.outputs import print_answer
from pipebench.cli.references import complete, load_one
from pipebench.garbage import without_collector
from pipebench.recipe.load import faults_of
from pipebench.recipe.preflight import preflight
from pipebench.show.answers import LargestMinibatch
from pipebench.show.progress import preparing
from pipebench.show.terminal import standard_error


@click.command
@click.argument("words", metavar="RECIPE [KEY=VALUE...]", nargs=-1, required=True, shell_complete=complete)
@json_flag
@tracebacks
def largest(words: tuple[str, ...], as_json: bool) -> None:
    """Find the largest minibatch with which a recipe's plan fits in the memory of its cluster's devices.

    The simulator predicts the memory of the fullest worker; nothing is trained. (`pipebench plan` shows memory by a
    formula that includes buffers for transfers and is a few percent off.) Sizes are powers of two, and seven between
    each two of them. What the recipe leaves to the planner is planned for every size.

    \b
    Examples:
      pipebench largest vpipe/gnmt16/pipedream
      pipebench largest vpipe/gnmt16/gpipe parallelism.accumulate=8
      pipebench largest quickstart cluster.name=cluster-a
    """
    loaded = load_one(words)
    with without_collector():
        from pipebench.train.largest_minibatch import Trial, largest_minibatch

    preflight(loaded, trains=False)
    trials: list[Trial] = []
    work = "looking for the largest minibatch"
    console = standard_error() if as_json else None
    with faults_of(loaded), preparing(loaded.recipe.name, console, work=work) as say:

        def on_trial(trial: Trial) -> None:
            trials.append(trial)
            say(f"{work}, last tried {trial.minibatch_size:,}")

        found = largest_minibatch(loaded, on_trial)
    print_answer(LargestMinibatch(loaded, found, tuple(trials)), as_json=as_json)
