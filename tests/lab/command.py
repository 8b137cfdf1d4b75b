"""Runs `python -m tests.lab` from loaded recipes to the report, and removes the lab whatever signal ends it."""

import sys
from collections.abc import Callable, Sequence

from pipebench.errors import UserError, printable
from pipebench.recipe.load import LoadedRecipe
from pipebench.run.preflight_all import preflight_all
from pipebench.run.suite import suite_name
from pipebench.tracking.store import require_writable
from tests.lab.findings import Case, Options
from tests.lab.hosts import Lab, ended_by_signals
from tests.lab.report import write_report
from tests.lab.study import Study
from tests.lab.trials import cluster_words

_USUAL_LATENCY_S = 3e-5  # for checking recipes, before the lab is made and its latency is measured


def run_lab(load: Callable[[Sequence[str]], list[LoadedRecipe]], overrides: Sequence[str], options: Options) -> int:
    """Make a lab, study the recipes in it, write the report, and remove the lab; return 0 even if a target is missed.

    Args:
        load: loads the recipes with the user's and additional overrides.
        overrides: the user's.
        options: of the command.

    Raises:
        UserError: a recipe can't be run in a lab, or the folder can't be written.
        WorkersFailedError: a run ended without a result; the reason has been printed.
    """
    try:
        options.folder.mkdir(parents=True, exist_ok=True)
        words = cluster_words(options, min(options.bandwidths), _USUAL_LATENCY_S)
    except OSError as error:
        raise UserError(f"--out: {options.folder} can't be written: {error.strerror}") from error
    require_writable()
    loaded = load(words)
    preflight_all(loaded)
    cases = [
        Case(each.run_name, each.path.absolute(), (*overrides, *each.words), each.recipe.parallelism.mode)
        for each in loaded
    ]
    with ended_by_signals(), Lab(options.num_hosts) as lab:
        found = Study(lab, cases, options, suite_name(loaded), _say).run()
    write_report(found, _say)
    return 0


def _say(text: str) -> None:
    print(f"pipebench: {printable(text)}", file=sys.stderr, flush=True)
