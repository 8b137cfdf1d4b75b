"""`pipebench plan`: its options and their allowed combinations."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import click

from pipebench.cli.group import tracebacks
from pipebench.cli.json_output import json_flag
from pipebench.cli.parameters import FILE, MOST_WORKERS, Parameter, count, name_of, option, parse_levels, zip_flag
from pipebench.cli.references import complete, load_to_plan, split
from pipebench.cluster import Cluster
from pipebench.errors import UserError, printable
from pipebench.garbage import without_collector
from pipebench.recipe.preflight import preflight
from pipebench.recipe.ranges import CHOICES
from pipebench.units import parse_bytes, parse_duration

_COST_MODEL, _MODE = (name_of(CHOICES[f"parallelism.{key}"]) for key in ("cost_model", "mode"))


@click.command
@click.argument("words", metavar="[RECIPE] [KEY=VALUE...]", nargs=-1, shell_complete=complete)
@click.option("--profile", metavar="FILE", help="Layer costs: a profile (.json) or the PipeDream artifact's graph.txt.")
@click.option("--cluster", metavar="NAME", help="Devices and links, from `pipebench ls clusters`, or a YAML file.")
@option("--servers", count(MOST_WORKERS), "N", "How many components of the cluster's outermost level.  [default: 1]")
@option(
    "--levels", Parameter(parse_levels), "N@RATE[,...]",
    "Instead of a cluster: components, and bytes/s of each, per level, innermost first.",
)  # fmt: skip
@option(
    "--memory", Parameter(parse_bytes), "BYTES",
    "With --levels: memory per device, such as 16GB.  [default: no limit]",
)  # fmt: skip
@option(
    "--latency", Parameter(parse_duration), "DURATION",
    "With --levels: latency of every link, with a unit, such as 10us.  [default: 0]",
)  # fmt: skip
@option("--cost-model", _COST_MODEL, "NAME", "How the planner adds up times, from `pipebench ls cost-models`.")
@option("--mode", _MODE, "NAME|auto", "The mode to plan, from `pipebench ls modes`; auto: the fastest.")
@option("--minibatch-size", count(2**31), "N", "Samples per minibatch of a profile file.")
@option("--out", FILE, "OUT.json", "Write the plan here, to be edited and run with parallelism.plan=OUT.json.")
@option("--picture", FILE, "OUT.png", "Write a picture of the plan here.")
@zip_flag
@click.option(
    "--others/--no-others",
    default=True,
    help="Plan the other modes, too, after the requested plan is printed.  [default: --others]",
)
@json_flag
@tracebacks
def plan(words: tuple[str, ...], zipped: bool, **given: Any) -> None:
    """Find the best plan: which layers make a stage, how many workers run it, its predicted time, and why.

    The planner finds the optimum of its cost model, or says how far off it may be; the simulator then predicts
    throughput. With a RECIPE, everything comes from it that no option gives, and `pipebench run` can run the plan.
    Without one, a profile file and links are enough. The requested plan is printed as soon as it is found. The best
    plan of every other mode follows, which takes most of the time for models with thousands of layers; --no-others
    leaves these out. KEY=A,B,C makes a plan for each value, and shows the plans side by side.

    \b
    Examples:
      pipebench plan quickstart
      pipebench plan quickstart --cluster cluster-a --servers 4 --mode auto
      pipebench plan quickstart train.minibatch_size=64 --picture plan.png
      pipebench plan quickstart parallelism.depth=1,2,4,7
      pipebench plan quickstart --out plan.json && pipebench run quickstart parallelism.plan=plan.json
      pipebench plan --profile vgg16.graph.txt --levels 16@1.25e9
      pipebench plan --profile vgg16.graph.txt --levels 4@1e10,4@10Gbit/s --minibatch-size 128
      pipebench plan --profile v100.json --levels 16@1.25e9 --memory 16GB --latency 10us
      pipebench plan --profile long.json --levels 16@1.25e9 --no-others --json
      pipebench plan --profile gnmt8.graph.txt --levels 16@1.25e9 --cost-model artifact --json

    `--levels 16@1.25e9` is 16 workers, each with a link of 1.25 GB/s; `--levels 4@1e10,4@1.25e9` is 4 servers of
    4 workers, 10 GB/s inside a server and 1.25 GB/s for each server.
    """
    _check_combination({**given, "zip": zipped or None}, words)
    with without_collector():
        from pipebench.cli import planning

    links = _links(*(given.pop(name) for name in ("levels", "memory", "latency")))
    options = planning.PlanOptions(**given, links=links)
    loaded = [planning.with_options(each, options) for each in load_to_plan(words, zipped=zipped)] if words else []
    for each in loaded:
        preflight(each, trains=False)
    if len(loaded) > 1:
        planning.plan_each(loaded, options)
    else:
        planning.plan(next(iter(loaded), None), options)


def _links(levels: Cluster | None, memory_bytes: int | None, latency_s: float | None) -> Cluster | None:
    """Return the cluster that --levels, --memory and --latency describe; None without --levels."""
    if levels is None:
        return None
    own = tuple(replace(level, latency_s=latency_s or 0.0) for level in levels.levels)
    return replace(levels, memory_bytes=memory_bytes, levels=own)


def _check_combination(given: Mapping[str, Any], words: Sequence[str]) -> None:
    """Raise a UserError if options exclude each other, or one lacks another that it needs."""
    references, overrides = split(words)
    files = [word for word in references if word.endswith((".json", ".txt"))]
    if files:
        raise UserError(f"{files[0]} looks like a profile and not like a recipe: write --profile {files[0]}")
    with_recipe = bool(words)
    has = {name for name, value in given.items() if value is not None}
    if {"cluster", "levels"} <= has:
        raise UserError("--cluster and --levels both say where to run; give one of the two")
    of_cluster = [word for word in overrides if word.startswith(("cluster.", "cluster="))]
    if "levels" in has and of_cluster:
        raise UserError(f"--levels takes the place of the recipe's cluster: leave out {printable(of_cluster[0])}")
    if "servers" in has and "cluster" not in has and not (with_recipe and "levels" not in has):
        raise UserError("--servers needs --cluster NAME to multiply")
    for name in ("memory", "latency"):
        if name in has and "levels" not in has:
            raise UserError(f"--{name} goes with --levels; a cluster's file says its own")
    if with_recipe and "minibatch_size" in has:
        raise UserError("--minibatch-size goes with a profile file; a recipe says train.minibatch_size=N")
    if not with_recipe and "zip" in has:
        raise UserError("--zip goes with a recipe, whose lists it takes together")
    if not with_recipe and "out" in has:
        raise UserError("--out goes with a recipe: cuts anywhere, as a profile file alone allows them, needn't run")
    if not with_recipe and "profile" not in has:
        raise UserError(
            "nothing to plan: name a recipe, as in `pipebench plan quickstart`, or a profile file, as in "
            "`pipebench plan --profile vgg16.graph.txt --levels 16@1.25e9`"
        )
    if not with_recipe and not has & {"cluster", "levels"}:
        raise UserError("a profile says nothing about links: add --levels 16@1.25e9 or --cluster NAME --servers N")
